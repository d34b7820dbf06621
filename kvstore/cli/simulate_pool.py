"""How ``simulate --nodes`` prints what a trace would hit in a pool."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvstore.cli.output import share, table

if TYPE_CHECKING:
    from rich.table import Table

    from kvstore.simulate_pool import Hits, PoolOutcome


def pool_fields(outcome: "PoolOutcome") -> dict[str, object]:
    """One outcome as JSON has it."""
    one = outcome.configuration
    return {
        "nodes": one.nodes,
        "policy": one.total.policy,
        "dram_blocks": one.total.dram_blocks,
        "ssd_blocks": one.total.ssd_blocks,
        "routing": one.routing,
        "seed": one.seed,
        "own_last": one.own_last,
        "hit_rate": outcome.hit_rate,
        "isolated_hit_rate": outcome.isolated_hit_rate,
        "gain": outcome.gain,
        "pooled": _hits(outcome.pooled),
        "isolated": _hits(outcome.isolated),
        "lookups": outcome.lookups,
        "publications": outcome.publications,
        "withdrawals": outcome.withdrawals,
        "operations_a_second": outcome.operations_a_second,
        "batches": outcome.batches,
        "calls_a_second": outcome.calls_a_second,
        "pulled": outcome.pulled,
        "held": outcome.held,
        "distinct": outcome.distinct,
    }


def _hits(hits: "Hits") -> dict[str, int]:
    return {
        "local_blocks": hits.local_blocks,
        "remote_blocks": hits.remote_blocks,
        "local_tokens": hits.local_tokens,
        "remote_tokens": hits.remote_tokens,
        "busiest": hits.busiest,
    }


def pool_table(outcomes: "Sequence[PoolOutcome]", block_bytes: int) -> "Table":
    """One row for each pool."""
    from kvstore.units import format_size

    columns = ["POLICY", ">DRAM", ">SSD", ">NODES", ">HIT RATE", ">LOCAL", ">REMOTE", ">ISOLATED"]
    columns += [">GAIN", ">LOOKUPS", ">PUBLISHED", ">WITHDRAWN", ">OPS/S", ">CALLS/S"]
    columns += [">PULLED", ">COPIES", ">BUSIEST"]
    rows = []
    for outcome in outcomes:
        total, accesses, requests = outcome.configuration.total, outcome.accesses, outcome.requests
        rows.append(
            [
                "any" if total.dram_blocks is None else total.policy,
                format_blocks(total.dram_blocks, block_bytes),
                format_blocks(total.ssd_blocks, block_bytes),
                f"{outcome.configuration.nodes}",
                f"{outcome.hit_rate:.1%}",
                share(outcome.pooled.local_blocks, accesses),
                share(outcome.pooled.remote_blocks, accesses),
                f"{outcome.isolated_hit_rate:.1%}",
                "-" if outcome.gain is None else f"{outcome.gain:.2f}",
                *(
                    f"{1000 * count / requests:,.0f}"
                    for count in (outcome.lookups, outcome.publications, outcome.withdrawals)
                ),
                *(
                    "-" if rate is None else f"{rate:,.1f}"
                    for rate in (outcome.operations_a_second, outcome.calls_a_second)
                ),
                format_size(outcome.pulled * block_bytes),
                share(outcome.held - outcome.distinct, outcome.held),
                f"{outcome.pooled.busiest * outcome.configuration.nodes / requests:.2f}",
            ]
        )
    spare = (
        "BUSIEST",
        "SSD",
        "POLICY",
        "WITHDRAWN",
        "PUBLISHED",
        "LOOKUPS",
        "OPS/S",
        "COPIES",
        "CALLS/S",
    )
    return table(columns, rows, spare=spare)


def format_blocks(blocks: int | None, block_bytes: int) -> str:
    """A capacity in bytes; a dash for none."""
    from kvstore.units import format_size

    if not blocks:
        return "infinite" if blocks is None else "-"
    return format_size(blocks * block_bytes)
