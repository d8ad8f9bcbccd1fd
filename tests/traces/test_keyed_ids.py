"""Ids and digests: the same for the same key, and no help to whoever guesses."""

from __future__ import annotations

import hashlib

from tiers.traces.recorder import KeyedIds

KEY, HASHES = bytes(range(32)), [bytes([n]) * 32 for n in range(100)]


def test_ids_depend_on_key_and_facts_alone() -> None:
    ids = KeyedIds(KEY, b"model").of_blocks(HASHES)
    assert ids == KeyedIds(KEY, b"model").of_blocks(HASHES)
    assert len({*ids}) == 100
    assert max(ids).bit_length() == 53, "all bits are used, and no more"
    others = KeyedIds(bytes(32), b"model"), KeyedIds(KEY, b"other")
    for other in others:
        assert not {*ids} & {*other.of_blocks(HASHES)}


def test_a_guess_can_t_be_confirmed() -> None:
    """Whoever knows a block's hash but not the key finds neither it nor a digest of it."""
    (found,) = KeyedIds(KEY, b"model").of_blocks(HASHES[:1])
    guesses = [HASHES[0]]
    guesses += [hashlib.blake2b(HASHES[0], digest_size=8).digest()]
    guesses += [hashlib.blake2b(HASHES[0], digest_size=8, key=key).digest() for key in (b"model",)]
    guesses += [bytes.fromhex(KeyedIds(b"", b"model").of_name("salt"))]
    for guess in guesses:
        for number in (int.from_bytes(guess[:8], order) for order in ("little", "big")):
            assert found not in (number >> 11, number & (1 << 53) - 1)
    assert found not in KeyedIds(b"", b"model").of_blocks(HASHES[:1])
    assert KeyedIds(KEY, b"").of_name("salt") != KeyedIds(b"", b"").of_name("salt")


def test_names_are_the_same_in_all_models() -> None:
    assert KeyedIds(KEY, b"model").of_name("a\udc80") == KeyedIds(KEY, b"other").of_name("a\udc80")
