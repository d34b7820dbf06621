"""What is remembered of chains that others hold."""

from __future__ import annotations

from hashlib import sha256

from kvstore.chains import Chains
from kvstore.protocol.fields import JoinedHashes

HASHES = [sha256(bytes([number])).digest() for number in range(12)]


def test_a_chain_is_found_by_each_of_its_blocks() -> None:
    chains = Chains()
    chain = chains.remember(JoinedHashes(b"".join(HASHES[:6])), [[1]])
    assert chain.hashes == tuple(HASHES[:6])
    assert {chains.find(block) for block in HASHES[:6]} == {chain}
    assert chains.find(HASHES[6]) is None


def test_a_chain_asked_about_again_is_the_same_with_its_new_owners() -> None:
    chains = Chains()
    chain = chains.remember(HASHES, [[1]])
    assert chains.remember(JoinedHashes(b"".join(HASHES)), [[2, 3]]) is chain
    assert chain.owners == [[2, 3]]
    assert len(chains) == 1


def test_a_chain_with_the_same_last_block_is_another() -> None:
    chains = Chains()
    chain = chains.remember(HASHES[:3], [[1]])
    assert chains.remember(HASHES[1:3], [[2]]) is not chain
    assert chain.owners == [[1]]
    assert len(chains) == 2


def test_the_chain_not_asked_about_for_longest_goes_first() -> None:
    chains = Chains(most_blocks=8)
    for start in (0, 4):
        chains.remember(HASHES[start : start + 4], [[1]])
    chains.find(HASHES[0])
    chains.remember(HASHES[8:], [[1]])
    found = [chains.find(HASHES[at]) is not None for at in (0, 4, 8)]
    assert found == [True, False, True]
