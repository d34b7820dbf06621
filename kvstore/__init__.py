"""The kvstore service: identity, protocol, index, node, daemon, control plane and CLI."""
