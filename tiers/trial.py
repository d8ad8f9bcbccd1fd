"""Tries whether a store finds damage, as its spec claims: its blocks are damaged in its medium.

The blocks have keys that nobody else can have, and are dropped afterwards.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import suppress
from typing import Protocol

from tiers.errors import KVTiersError
from tiers.store import Block, TierStore, each

KEY_BYTES = 48
FLIPS = (("start", 0.0), ("middle", 0.5), ("end", 1.0))
"""Where a bit of the stored bytes is flipped, and at which part of them."""


class Medium(Protocol):
    """The stored bytes of one store's blocks, where they lie. Only keys of a trial are named."""

    def read(self, key: bytes) -> bytes:
        """The bytes kept for this block, with all that the store adds, and without padding."""

    def write(self, key: bytes, data: bytes) -> None:
        """Put these bytes, as many or fewer, in their place, as damage would: the store does not
        learn of it."""


class CannotTry(KVTiersError):
    """The store takes no block now, so that it can't be tried."""


def find_lie(store: TierStore, medium: Medium, payload_bytes: int) -> str | None:
    """Damage blocks in the medium of a store for payloads of this length. Say which damage it
    serves, like "a bit flipped at its end"; None: each damaged block is a miss.

    Stores eight blocks, whose keys are drawn. Raises CannotTry if the store does not take them and
    give them back, and whatever the store and the medium raise.
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
        for where, part in FLIPS:
            key, data = self._put()
            place = int(part * (len(data) - 1))
            flipped = bytes([data[place] ^ 1])
            medium.write(key, data[:place] + flipped + data[place + 1 :])
            yield f"a bit flipped at its {where}", key
        key, data = self._put()
        medium.write(key, data[: len(data) // 2])
        yield "half of it cut off", key
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
        """Store one more block; its key and stored bytes. Raises CannotTry."""
        key = secrets.token_bytes(KEY_BYTES)
        self.keys.append(key)
        size = len(self._memory)
        self._memory[:] = (key * (size // KEY_BYTES + 1))[:size]
        block = Block(key, self._memory)
        if each("put", self._store.put([block.readonly()]), 1) != [True]:
            raise CannotTry("it does not take a block")
        whole = bytes(self._memory)
        if not self.serves(key) or self._memory != whole:
            raise CannotTry("it does not give back the block that it has just taken")
        data = self._medium.read(key)
        if len(data) < 2:
            raise CannotTry(f"its medium shows {len(data)} bytes of a block")
        return key, data

    def serves(self, key: bytes) -> bool:
        """Whether the store has a hit, right or wrong: none may be made of a damaged block."""
        self._memory[:] = bytes(len(self._memory))
        return each("get", self._store.get([Block(key, self._memory)]), 1)[0]
