"""The guest is what the other tests here take it for: a machine with a working RoCEv2 device."""

from __future__ import annotations

import ctypes
import mmap
import time
from pathlib import Path

import pytest

from rdma.verbs.binding import Binding, load
from tests.rdma.guest.perftest import GID_INDEX, measure

DEVICE = Path("/sys/class/infiniband/rxe0")
SIZE = 1 << 20


def test_the_port_is_active_with_roce_v2_gids() -> None:
    port = DEVICE / "ports/1"
    assert (port / "state").read_text().strip() == "4: ACTIVE"
    assert (port / "link_layer").read_text().strip() == "Ethernet"
    assert (port / "gid_attrs/types" / str(GID_INDEX)).read_text().strip() == "RoCE v2"
    gid = (port / "gids" / str(GID_INDEX)).read_text().strip()
    assert gid == "0000:0000:0000:0000:0000:ffff:7f00:0001"


@pytest.mark.parametrize("tool", ["ib_write_bw", "ib_read_bw"])
def test_perftest_measures_bandwidth(tool: str) -> None:
    assert measure(tool, SIZE, 20) > 0


def test_an_rdma_write_moves_bytes() -> None:
    verbs = load()
    with verbs.device.Context(name="rxe0") as context:
        domain = verbs.pd.PD(context)
        queue = verbs.cq.CQ(context, 16)
        sender, receiver = (_queue_pair(verbs, domain, queue) for _ in range(2))
        _connect(verbs, context, sender, receiver.qp_num)
        _connect(verbs, context, receiver, sender.qp_num)
        source, target = mmap.mmap(-1, SIZE), mmap.mmap(-1, SIZE)
        source.write(bytes(range(256)) * (SIZE // 256))
        access = verbs.enums.IBV_ACCESS_LOCAL_WRITE | verbs.enums.IBV_ACCESS_REMOTE_WRITE
        regions = [
            verbs.mr.MR(domain, SIZE, access, address=_address(memory))
            for memory in (source, target)
        ]
        piece = verbs.wr.SGE(_address(source), SIZE, regions[0].lkey)
        request = verbs.wr.SendWR(
            wr_id=7,
            num_sge=1,
            sg=[piece],
            opcode=verbs.enums.IBV_WR_RDMA_WRITE,
            send_flags=verbs.enums.IBV_SEND_SIGNALED,
        )
        request.set_wr_rdma(regions[1].rkey, _address(target))
        sender.post_send(request)
        completion = _poll(queue)
        assert (completion.status, completion.wr_id) == (verbs.enums.IBV_WC_SUCCESS, 7)
        assert target[:] == source[:]


def _queue_pair(verbs: Binding, domain: object, queue: object) -> object:
    capacity = verbs.qp.QPCap(max_send_wr=8, max_recv_wr=1, max_send_sge=1, max_recv_sge=1)
    wanted = verbs.qp.QPInitAttr(
        qp_type=verbs.enums.IBV_QPT_RC, scq=queue, rcq=queue, cap=capacity, sq_sig_all=0
    )
    return verbs.qp.QP(domain, wanted)


def _connect(verbs: Binding, context: object, pair: object, remote: int) -> None:
    attributes = verbs.qp.QPAttr(port_num=1)
    attributes.qp_access_flags = verbs.enums.IBV_ACCESS_REMOTE_WRITE
    pair.to_init(attributes)
    route = verbs.addr.GlobalRoute(
        dgid=context.query_gid(port_num=1, index=GID_INDEX), sgid_index=GID_INDEX, hop_limit=64
    )
    attributes.ah_attr = verbs.addr.AHAttr(gr=route, is_global=1, port_num=1)
    attributes.path_mtu = verbs.enums.IBV_MTU_4096
    attributes.dest_qp_num = remote
    attributes.max_dest_rd_atomic = attributes.max_rd_atomic = 1
    attributes.min_rnr_timer = 12
    attributes.timeout, attributes.retry_cnt, attributes.rnr_retry = 14, 6, 6
    pair.to_rts(attributes)


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _poll(queue: object) -> object:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        count, completions = queue.poll(1)
        if count:
            return completions[0]
    raise TimeoutError("no completion")
