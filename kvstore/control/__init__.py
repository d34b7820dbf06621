"""The control plane: gRPC for people and routers."""
