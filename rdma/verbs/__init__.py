"""The ``rdma`` transport: blocks move by RDMA verbs over RoCEv2, driven by the node.

The client registers the memory of a call and tells the node its addresses and keys; the node
writes to it (``get``) or reads from it (``put``) and answers when the bytes have arrived. The
session's handshake brings up one reliable connected queue pair for each session. Nothing here
imports pyverbs before a transport of this kind is wanted.
"""
