"""The picture of pools: what it says, and that it is made as the others are."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.errors import ConfigError
from kvstore.plot_pool import plot_pool_hit_rate
from kvstore.simulate import Configuration
from kvstore.simulate_pool import Hits, PoolConfiguration, PoolOutcome


def outcome(nodes: int, total: Configuration, hits: int) -> PoolOutcome:
    return PoolOutcome(
        configuration=PoolConfiguration(nodes, total),
        requests=10,
        accesses=100,
        tokens=100,
        unique=1000,
        seconds=1.0,
        pooled=Hits(hits),
        isolated=Hits(hits // nodes),
        lookups=0,
        publications=0,
        withdrawals=0,
        batches=0,
        held=0,
        distinct=0,
    )


def test_a_picture_names_its_lines_axes_and_units(tmp_path: Path) -> None:
    small, large = Configuration("lru", 10), Configuration("arc", 100, 2048)
    outcomes = [outcome(nodes, total, 40) for total in (small, large) for nodes in (16, 1, 4)]
    outcomes.append(outcome(1, Configuration("lru", None), 50))
    for name in ("a.svg", "b.svg"):
        plot_pool_hit_rate(outcomes, tmp_path / name, title="some trace", block_bytes=1 << 20)
    text = (tmp_path / "a.svg").read_text()
    for part in (
        "some trace",
        "pool, LRU, DRAM 10 MiB",
        "isolated, LRU, DRAM 10 MiB",
        "pool, ARC, DRAM 100 MiB, SSD 2 GiB",
        "pool, DRAM infinite",
        "nodes, which share the capacity evenly",
        "hit rate (% of block accesses)",
        "16",
    ):
        assert f">{part}<" in text, part
    assert text == (tmp_path / "b.svg").read_text()


def test_nothing_to_draw_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to plot"):
        plot_pool_hit_rate([], tmp_path / "a.svg", title="", block_bytes=1)
    with pytest.raises(ConfigError, match=r"must end in \.png or \.svg"):
        plot_pool_hit_rate(
            [outcome(1, Configuration("lru", 1), 1)], tmp_path / "a.pdf", title="", block_bytes=1
        )
