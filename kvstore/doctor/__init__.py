"""What can be wrong with a machine before a node runs on it, and the command that mends it.

Each check looks at one thing, changes nothing that lasts, and gives findings. None raises: what
cannot be found out is a finding too.
"""

from collections.abc import Iterable, Iterator

from kvstore.config import Config
from kvstore.doctor import hbm, machine, memory, rdma
from kvstore.doctor.facts import gather
from kvstore.doctor.finding import Finding, State
from kvstore.doctor.memory import check_capacity

__all__ = ["Finding", "State", "check_capacity", "examine"]


def examine(config: Config) -> list[Finding]:
    """All checks of this machine for a node with ``config``, except whether one is running."""
    facts = gather(config.rdma)
    needs_rdma = config.rdma.mode == "require"
    checks: Iterable[Iterator[Finding]] = (
        machine.check_python(),
        machine.check_platform(),
        memory.check_memory(config),
        memory.check_huge_pages(config.dram),
        memory.check_locked_memory(
            config.dram.capacity,
            memory.lock_limit(),
            devices=bool(facts.devices) and config.rdma.mode != "off",
            required=needs_rdma,
        ),
        machine.check_state_directory(config.node.state_directory),
        machine.check_ssd(config),
        machine.check_socket(config.listen.unix),
        machine.check_clock(),
        machine.check_extras(),
        rdma.check_rdma(config.rdma, facts),
        rdma.check_gpu_memory(facts),
        hbm.check_hbm(config.hbm),
    )
    return [finding for check in checks for finding in check]
