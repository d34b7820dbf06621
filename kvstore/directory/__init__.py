"""What the nodes of a pool know in common: who they are, and who holds which block.

``interface`` says what a node asks; ``memory`` answers within one process, ``redis`` by way of a
Redis that all nodes share. What is kept there are hints: the node that owns a block is the truth.
"""
