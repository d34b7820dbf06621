"""The ``kvstore`` command: one module for each group of sub-commands.

Modules import what is slow to load (gRPC, pydantic, rich) where it is used, so that ``--help`` and
shell completion answer at once.
"""
