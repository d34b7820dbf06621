"""The engines' side: clients, KV layout and connectors."""
