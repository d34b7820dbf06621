"""Machines with a real RoCEv2 stack, on hosts that have none.

Debian's kernel has `rdma_rxe`, the kernel's own RoCEv2 over any network device. A virtual machine
boots that kernel over the host's file system, read-only, and runs one command of this repository.
The processor is emulated throughout, because hosts without RDMA are mostly guests themselves.

Nothing here needs more than the standard library and Debian's packages: `scripts/rdma-guest`.
"""
