"""The connector inside a real vLLM engine on the CPU, held against recompute and its peers."""
