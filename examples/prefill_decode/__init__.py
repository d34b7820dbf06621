"""Prefill on one engine, decode on another: the blocks go through the store."""
