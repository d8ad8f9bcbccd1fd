"""Tries whether a store finds damage, as its spec claims: its blocks are damaged in its medium."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Protocol

from tiers.store import Block, TierStore, each

KEY_BYTES = 48


def _two(data: bytes) -> list[int]:
    """Two drawn places: with a bit flipped in both a sum is as it was, and a parity."""
    one, *others = secrets.SystemRandom().sample(range(len(data)), min(len(data), 32))
    return [one, next((at for at in others if (data[at] ^ data[one]) & 1), others[0])]


def _flipped(data: bytes, *places: int) -> bytes:
    flipped = bytearray(data)
    for place in places:
        flipped[place] ^= 1
    return bytes(flipped)


DAMAGES: Sequence[tuple[str, Callable[[bytes], bytes]]] = (
    ("a bit flipped at its start", lambda data: _flipped(data, 0)),
    ("a bit flipped at its end", lambda data: _flipped(data, len(data) - 1)),
    ("a bit flipped somewhere", lambda data: _flipped(data, secrets.randbelow(len(data)))),
    ("two bits flipped", lambda data: _flipped(data, *_two(data))),
    ("half of it cut off", lambda data: data[: len(data) // 2]),
)
"""What becomes of a stored block's bytes. Each trial draws other places, so that in the end a
checksum of some of the bytes is found."""


class Medium(Protocol):
    """The stored bytes of one store's blocks, where they lie."""

    def read(self, key: bytes) -> bytes:
        """The bytes kept for this block, with all that the store adds, and without padding."""

    def write(self, key: bytes, data: bytes) -> None:
        """Put these bytes, as many or fewer, in their place, as damage would: the store does not
        learn of it."""


def find_lie(store: TierStore, medium: Medium, payload_bytes: int) -> str | None:
    """Damage blocks in the medium of a store for payloads of this length. Say which damage it
    serves, like "a bit flipped at its end"; None: each damaged block is a miss.

    Stores nine blocks, whose keys are drawn, and drops them.
    """
    trial = _Trial(store, medium, payload_bytes)
    try:
        return next((what for what, key in trial.damaged() if trial.serves(key)), None)
    finally:
        with suppress(Exception):  # nobody finds a block that is left, and it is evicted in time
            store.drop(trial.keys)


class _Trial:
    """Blocks that are made up, in one piece of memory."""

    def __init__(self, store: TierStore, medium: Medium, payload_bytes: int) -> None:
        self.keys: list[bytes] = []
        self._store = store
        self._medium = medium
        self._memory = memoryview(bytearray(payload_bytes))

    def damaged(self) -> Iterator[tuple[str, bytes]]:
        """Keys of damaged blocks, each with its damage. All are loaded while whole."""
        medium = self._medium
        for what, damage in DAMAGES:
            key, data = self._put()
            medium.write(key, damage(data))
            yield what, key
        key, data = self._put()
        other, others = self._put()
        medium.write(key, others)
        medium.write(other, data)
        yield "another block's bytes in place of its own", key
        yield "another block's bytes in place of its own", other
        gone, data = self._put()
        self._store.drop([gone])
        key, _ = self._put()
        medium.write(key, data)
        yield "the bytes of a block that was dropped before", key

    def _put(self) -> tuple[bytes, bytes]:
        """Store one more block; its key and stored bytes."""
        key = secrets.token_bytes(KEY_BYTES)
        self.keys.append(key)
        size = len(self._memory)
        self._memory[:] = (key * (size // KEY_BYTES + 1))[:size]
        block = Block(key, self._memory)
        assert each("put", self._store.put([block.readonly()]), 1) == [True], "a block isn't taken"
        whole = bytes(self._memory)
        assert self.serves(key) and self._memory == whole, "a block isn't given back at once"
        data = self._medium.read(key)
        assert len(data) > 1, f"the medium shows {len(data)} bytes of a block"
        return key, data

    def serves(self, key: bytes) -> bool:
        """Whether the store has a hit, right or wrong: none may be made of a damaged block."""
        self._memory[:] = bytes(len(self._memory))
        return each("get", self._store.get([Block(key, self._memory)]), 1)[0]
