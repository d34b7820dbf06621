"""What holds of every directory, whatever it is made of."""

from __future__ import annotations

import asyncio

from kvstore.directory.interface import MOST_HASHES, MOST_OWNERS, Directory, Place
from tests.kvstore.directory.conftest import Make
from tests.kvstore.directory.pools import (
    NAMESPACE,
    OTHER_NAMESPACE,
    chain,
    places,
    reach,
    store,
    until,
    until_reach,
)


async def _joined(make: Make, *nodes: str) -> list[Directory]:
    directories = [make(node) for node in nodes]
    for directory in directories:
        await directory.open()
    await until(lambda: all(len(d.members) == len(nodes) - 1 and d.me for d in directories))
    return directories


def _number(directory: Directory) -> int:
    assert directory.me is not None
    return directory.me.number


async def test_members_see_each_other_and_not_themselves(make: Make) -> None:
    first, second = await _joined(make, "one", "two")
    assert _number(first) != _number(second)
    assert first.members.keys() == {_number(second)}
    seen = second.members[_number(first)]
    assert (seen.node, seen.host, seen.data) == ("one", "host of one", "one:9000")
    assert seen.incarnation == "incarnation of one"


async def test_who_leaves_is_no_member_and_holds_nothing(make: Make) -> None:
    first, second = await _joined(make, "one", "two")
    blocks = chain("a", 4)
    store(second, blocks)
    await until_reach(first, blocks, 4)
    await second.close()
    assert second.me is None
    await until(lambda: not first.members)
    assert (await reach(first, blocks)).blocks == 0


async def test_a_new_start_of_a_node_is_another_member(make: Make) -> None:
    first, second = await _joined(make, "one", "two")
    blocks = chain("a", 4)
    store(second, blocks)
    await until_reach(first, blocks, 4)
    before = _number(second)
    await second.close()
    again = make("two")
    await again.open()
    await until(lambda: bool(again.me) and set(first.members) == {_number(again)})
    assert _number(again) != before
    # What the earlier start held, this one does not.
    assert (await reach(first, blocks)).blocks == 0


async def test_a_chain_is_reached_as_far_as_it_is_held(make: Make) -> None:
    first, second = await _joined(make, "one", "two")
    blocks = chain("a", 50)
    for held in (1, 2, 3, 31, 32, 33, 49, 50):
        store(second, blocks[:held])
        found = await until_reach(first, blocks, held)
        assert found.owners == ((_number(second),),)


async def test_any_part_of_a_chain_may_be_held(make: Make) -> None:
    asking, holding = await _joined(make, "asking", "holding")
    for held in range(5):
        blocks = chain(f"{held} held", 4)
        store(holding, blocks[:held])
        if held:
            await until_reach(asking, blocks, held)
        for asked in range(1, 5):
            found = await reach(asking, blocks[:asked])
            assert (found.blocks, found.failure) == (min(held, asked), None)


async def test_only_what_lies_beyond_the_start_is_asked_for(make: Make) -> None:
    first, second = await _joined(make, "one", "two")
    blocks = chain("a", 20)
    store(second, blocks[:12])
    await until_reach(first, blocks, 12)
    assert (await reach(first, blocks, start=5)).blocks == 12
    for start in (12, 15, 20):
        found = await reach(first, blocks, start=start)
        assert (found.blocks, found.owners, found.failure) == (start, (), None)
    assert (await reach(first, [], start=0)).blocks == 0


async def test_what_a_node_holds_itself_is_not_remote(make: Make) -> None:
    first, second = await _joined(make, "one", "two")
    blocks = chain("a", 8)
    store(first, blocks)
    store(second, blocks[:3])
    await until_reach(second, blocks, 8, owners={_number(first)})
    await until_reach(first, blocks, 3, owners={_number(second)})


async def test_every_owner_of_the_deepest_block_is_named(make: Make) -> None:
    first, second, third = await _joined(make, "one", "two", "three")
    blocks = chain("a", 10)
    store(second, blocks)
    store(third, blocks[:6])
    await until_reach(first, blocks, 10, owners={_number(second)})
    await until_reach(first, blocks[:6], 6, owners={_number(second), _number(third)})


async def test_a_prefix_counts_only_where_every_shard_is(make: Make) -> None:
    first, second, third = await _joined(make, "one", "two", "three")
    blocks = chain("a", 10)
    store(second, blocks, shard=0)
    await until_reach(first, blocks, 10)
    assert (await reach(first, blocks, shards=2)).blocks == 0
    store(third, blocks[:7], shard=1)
    found = await until_reach(first, blocks, 7, shards=2)
    assert found.owners == ((_number(second),), (_number(third),))


async def test_namespaces_and_chains_are_apart(make: Make) -> None:
    first, second = await _joined(make, "one", "two")
    blocks = chain("a", 5)
    store(second, blocks)
    await until_reach(first, blocks, 5)
    assert (await reach(first, blocks, namespace=OTHER_NAMESPACE)).blocks == 0
    assert (await reach(first, chain("b", 5))).blocks == 0


async def test_what_was_removed_is_not_named(make: Make) -> None:
    first, second, third = await _joined(make, "one", "two", "three")
    blocks = chain("a", 6)
    store(second, blocks)
    store(third, blocks)
    await until_reach(first, blocks, 6, owners={_number(second), _number(third)})
    for place in reversed(places(blocks)[2:]):
        second.removed(place)
    await until_reach(first, blocks, 6, owners={_number(third)})
    await until_reach(first, blocks[:2], 2, owners={_number(second), _number(third)})
    for place in reversed(places(blocks)[1:]):
        third.removed(place)
    await until_reach(first, blocks, 2, owners={_number(second)})


async def test_the_last_word_on_a_block_holds(make: Make) -> None:
    first, second = await _joined(make, "one", "two")
    blocks = chain("a", 40)
    for _ in range(5):
        store(second, blocks)
        for place in reversed(places(blocks)):
            second.removed(place)
    store(second, blocks[:21])
    await until_reach(first, blocks, 21)
    await asyncio.sleep(0.05)
    assert (await reach(first, blocks)).blocks == 21


async def test_a_wrong_location_is_withdrawn_for_all(make: Make) -> None:
    first, second, third = await _joined(make, "one", "two", "three")
    blocks = chain("a", 6)
    store(second, blocks)
    store(third, blocks[:5])
    await until_reach(first, blocks, 6)
    await until_reach(first, blocks[:5], 5, owners={_number(second), _number(third)})
    for place in places(blocks)[4:]:
        first.withdraw(place, _number(second))
    await until_reach(first, blocks, 5, owners={_number(third)})
    await until(lambda: first.statistics.withdrawn == 2)
    # Who was wronged may say so again.
    store(second, blocks)
    await until_reach(first, blocks, 6, owners={_number(second)})


async def test_withdrawing_what_nobody_said_changes_nothing(make: Make) -> None:
    first, second = await _joined(make, "one", "two")
    blocks = chain("a", 3)
    store(second, blocks)
    await until_reach(first, blocks, 3)
    first.withdraw(places(blocks)[2], 4_000_000_000)
    first.withdraw(Place(NAMESPACE, 0, blocks[0], chain("b", 1)[0]), _number(second))
    second.removed(Place(NAMESPACE, 9, blocks[0], blocks[0]))
    await asyncio.sleep(0.05)
    assert (await reach(first, blocks)).owners == ((_number(second),),)


async def test_what_was_held_before_joining_is_told(make: Make) -> None:
    blocks, early = chain("a", 30), chain("b", 3)
    first, second = make("one"), make("two")
    second_holds = [places(blocks)[:20], places(blocks)[20:], places(early)]
    await second.open(lambda: iter(second_holds))
    await first.open()
    await until_reach(first, blocks, 30)
    await until_reach(first, early, 3)
    assert second.statistics.advertisements >= 1


async def test_a_summary_is_heard(make: Make) -> None:
    first, second = make("one"), make("two")
    await second.open(summary=lambda: {"blocks": 7.0})
    await first.open()
    await until(lambda: [m.summary for m in first.members.values()] == [{"blocks": 7.0}])


async def test_a_block_has_a_bounded_number_of_owners(make: Make) -> None:
    directories = await _joined(make, *(f"node{number}" for number in range(MOST_OWNERS + 4)))
    blocks = chain("a", 2)
    for directory in directories[1:]:
        store(directory, blocks)
    await until(lambda: all(directory.statistics.published == 2 for directory in directories[1:]))
    found = await reach(directories[0], blocks)
    assert found.blocks == 2
    assert len(found.owners[0]) == MOST_OWNERS
    assert set(found.owners[0]) <= set(directories[0].members)


async def test_a_very_long_chain_is_looked_at_in_parts(make: Make) -> None:
    first, second = await _joined(make, "one", "two")
    blocks = chain("a", MOST_HASHES + 10)
    store(second, blocks)
    await until_reach(first, blocks, MOST_HASHES)

    async def rest_is_there() -> bool:
        rest = await reach(first, blocks, start=MOST_HASHES)
        return (rest.blocks, rest.owners) == (len(blocks), ((_number(second),),))

    await until(rest_is_there)


async def test_before_joining_and_after_leaving_nothing_is_known(make: Make) -> None:
    directory = make("one")
    assert directory.me is None
    blocks = chain("a", 3)
    store(directory, blocks)
    directory.withdraw(places(blocks)[0], 1)
    assert (await reach(directory, blocks)).blocks == 0
    await directory.open()
    await until(lambda: directory.me is not None)
    await directory.close()
    await directory.close()
    store(directory, blocks)
    assert (await reach(directory, blocks)).blocks == 0
