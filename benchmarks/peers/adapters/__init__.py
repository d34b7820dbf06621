"""One module a store: its class ``Adapter`` is what the worker drives.

Nothing is imported here, because each module needs what only its own environment has.
"""
