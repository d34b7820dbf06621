"""What each thing that nodes ask of their directory costs Redis, by the number of members.

``python -m benchmarks.directory_scripts`` starts a redis-server of its own for each number of
members, runs the scripts that nodes run, and prints the time that Redis itself counted for a call,
which is what one server can give: it does one thing at a time. ``sent`` is what a node sends.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import redis
from rich.console import Console
from rich.table import Table

from benchmarks.directory_memory import FIRST_NUMBER, NAMESPACE, server
from kvstore.directory.changes import Batch
from kvstore.directory.interface import NOBODY, Member, Place
from kvstore.directory.membership import encode_member, encode_summary
from kvstore.directory.names import hash_parts, name, pack_numbers, pool_prefix, tag
from kvstore.directory.scripts import BEAT, MOST_RECORDS, PUBLISH, REACH, ROSTER, SWEEP, Script

CHAIN: Final = 256
CHAINS: Final = 64
BUCKETS: Final = 1024
LEASE: Final = 60_000

Call = Callable[[], tuple[Script, bytes, Sequence[Any]]]
"""Makes one call: the script, its key, its arguments."""


class Cost(NamedTuple):
    """Of one kind of call.

    Attributes:
        microseconds: of Redis's time.
        sent: bytes of its arguments.
    """

    microseconds: float
    sent: int


class Pool:
    """A directory with members, each of which holds some of the chains.

    Args:
        client: of an empty Redis.
        members: how many.
    """

    def __init__(self, client: redis.Redis, members: int) -> None:
        self._client = client
        self._random = random.Random(members)
        self._prefix = pool_prefix("pool")
        self._root = os.urandom(32)
        self._tag = tag("pool", NAMESPACE, self._root)
        self._numbers = list(range(FIRST_NUMBER, FIRST_NUMBER + members))
        self._chains = [
            [self._root, *(os.urandom(32) for _ in range(CHAIN - 1))] for _ in range(CHAINS)
        ]
        self._summary = encode_summary({f"figure{at}": 1e9 + at for at in range(9)})
        self._join()
        self._owners = [self._random.choice(self._numbers) for _ in self._chains]
        for chain, owner in zip(self._chains, self._owners, strict=True):
            self._hold(chain, owner)

    def _record(self, number: int) -> bytes:
        host = f"node-{number % 10_000}.example.internal:9410"
        return encode_member(Member(NOBODY, host, "0" * 16, "0" * 36, host, host))

    def _join(self) -> None:
        pipe = self._client.pipeline(transaction=False)
        pipe.set(self._prefix + b":number", self._numbers[-1])
        for number in self._numbers:
            key = self._prefix + b":member:%d" % number
            pipe.set(key, self._record(number), px=LEASE)
            pipe.sadd(self._prefix + b":members", number)
            pipe.hset(self._prefix + b":summaries", str(number), self._summary)
        pipe.execute()

    def _hold(self, blocks: Sequence[bytes], number: int) -> None:
        for first in range(0, len(blocks), MOST_RECORDS):
            self._client.eval(PUBLISH.text, 1, self._tag, self._records(blocks[first:], number))

    def _records(self, blocks: Sequence[bytes], number: int) -> bytes:
        places = [Place(NAMESPACE, 0, self._root, block) for block in blocks[:MOST_RECORDS]]
        return Batch(self._tag, {(name(p), number): True for p in places}, 0).records(0)

    def kinds(self) -> dict[str, Call]:
        """What is measured, by what it is called in the table."""
        live = pack_numbers(self._numbers)

        def reach(held: int) -> tuple[Script, bytes, Sequence[Any]]:
            chain = self._random.choice(self._chains)[:held]
            rest = [os.urandom(32) for _ in range(CHAIN - held)]
            return REACH, self._tag, (hash_parts([*chain, *rest]), 1, live)

        def beat() -> tuple[Script, bytes, Sequence[Any]]:
            number = self._random.choice(self._numbers)
            return BEAT, self._prefix, (number, self._record(number), LEASE, self._summary)

        def publish() -> tuple[Script, bytes, Sequence[Any]]:
            blocks = [os.urandom(32) for _ in range(MOST_RECORDS)]
            return PUBLISH, self._tag, (self._records(blocks, self._numbers[0]),)

        def again() -> tuple[Script, bytes, Sequence[Any]]:
            at = self._random.randrange(CHAINS)
            return PUBLISH, self._tag, (self._records(self._chains[at], self._owners[at]),)

        def sweep() -> tuple[Script, bytes, Sequence[Any]]:
            bucket = self._tag + b":%03x" % self._random.randrange(BUCKETS)
            return SWEEP, bucket, (live, self._numbers[-1], b"0")

        return {
            f"lookup, all {CHAIN} blocks held": lambda: reach(CHAIN),
            f"lookup, {CHAIN // 3} of {CHAIN} held": lambda: reach(CHAIN // 3),
            f"sweep of {CHAINS * CHAIN // BUCKETS} blocks": sweep,
            "heartbeat": beat,
            "roster after a change": lambda: (ROSTER, self._prefix, (live[4:], 0)),
            "roster of a census": lambda: (ROSTER, self._prefix, (b"", 1)),
            f"telling {MOST_RECORDS} blocks again": again,
            f"publication of {MOST_RECORDS} blocks": publish,
        }

    def cost(self, call: Call, repeats: int) -> Cost:
        """Mean of so many calls."""
        self._client.config_resetstat()
        sent = 0
        for _ in range(repeats):
            script, key, arguments = call()
            self._client.eval(script.text, 1, key, *arguments)
            sent += sum(len(a) if isinstance(a, bytes) else len(str(a)) for a in arguments)
        spent: Any = self._client.info("commandstats")
        return Cost(float(spent["cmdstat_eval"]["usec_per_call"]), sent // repeats)


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.directory_scripts")
    parser.add_argument("--members", default="10,100,1000,5000", help="numbers of members")
    parser.add_argument("--repeats", type=int, default=300, help="calls of each kind")
    arguments = parser.parse_args()
    if shutil.which("redis-server") is None:
        print("redis-server is not installed", file=sys.stderr)
        return 1
    numbers = [int(number) for number in arguments.members.split(",")]
    costs: dict[str, list[Cost]] = {}
    for number in numbers:
        with server() as client:
            pool = Pool(client, number)
            for kind, call in pool.kinds().items():
                costs.setdefault(kind, []).append(pool.cost(call, arguments.repeats))
    table = Table("members", *(f"{number:,}" for number in numbers))
    for kind, found in costs.items():
        table.add_row(kind, *(f"{one.microseconds:,.0f} us, {one.sent:,} B sent" for one in found))
    Console(width=140).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
