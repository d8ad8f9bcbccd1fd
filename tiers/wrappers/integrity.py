"""What if a plugin's store lies? Only our own record of that very block is believed.

Around every store that does not verify by itself. A record is that of `tiers.block`: a header with
the key, the length and a checksum, then the payload, on whole pages. It finds bytes that are broken
or mistaken, and is no defence against who can write to the tier: that is encryption.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import cast

from tiers.block import HEADER_BYTES, copy, expect, pack_header, verify
from tiers.concurrency.counter import LockedCounter
from tiers.errors import RecordError, TierError
from tiers.host.scratch import Scratch
from tiers.host.slots import slot_stride
from tiers.store import (
    Block,
    Capability,
    Damages,
    GatheredBlock,
    StoreWrapper,
    TierStore,
    capability,
    each,
)

SCRATCH_BYTES = 33 << 20
"""Scratch memory that a verb uses at most; one block at least. What comes by one call goes on by
one: the forms of 32 MiB of payloads are longer."""


class StagedStore(StoreWrapper, ABC):
    """A TierStore over another that is opened for payloads of `form_bytes`, and keeps blocks in a
    form of its own, which shows damage. Thread-safe, as the other is; each thread in a verb has its
    own scratch memory.
    """

    def __init__(self, store: TierStore, form_bytes: int) -> None:
        super().__init__(store)
        self._form_bytes = form_bytes
        self._at_once = max(1, SCRATCH_BYTES // form_bytes)
        self._scratch = Scratch(self._at_once * form_bytes)
        self._damaged = LockedCounter()

    def capability(self, kind: type[Capability]) -> Capability | None:
        return cast(Capability, self) if kind is Damages else super().capability(kind)

    def damaged(self) -> int:
        """Blocks that were damaged in their form, and those that the store itself found damaged."""
        inner = capability(self._inner, Damages)
        return self._damaged.total + (0 if inner is None else inner.damaged())

    def _drop_damaged(self, keys: Sequence[bytes]) -> None:
        if keys:
            self._damaged.count("form", len(keys))
            # Loaded blocks stay loaded, even if the store fails to drop.
            with suppress(Exception):
                self._inner.drop(keys)

    @abstractmethod
    def _pack(self, blocks: Sequence[Block], forms: Sequence[memoryview]) -> list[Block]:
        """Fill each of `forms`, of `form_bytes`, from its block; return what to store."""

    @abstractmethod
    def _load(self, blocks: Sequence[Block], forms: Sequence[memoryview]) -> list[bool]:
        """Load into `forms` and fill the payloads; return which were hits."""

    def put(self, blocks: Sequence[Block]) -> list[bool]:
        stored: list[bool] = []
        for part, forms in self._parts(blocks):
            packed = [block.readonly() for block in self._pack(part, forms)]
            try:
                stored += each("put", self._inner.put(packed), len(packed))
            except TierError:
                if not any(stored):
                    raise
                return stored + [False] * (len(blocks) - len(stored))
        return stored

    def get(self, blocks: Sequence[Block]) -> list[bool]:
        got: list[bool] = []
        for part, forms in self._parts(blocks):
            try:
                got += self._load(part, forms)
            except TierError:
                if not any(got):
                    raise
                return got + [False] * (len(blocks) - len(got))
        return got

    def _parts(self, blocks: Sequence[Block]) -> Iterator[tuple[Sequence[Block], list[memoryview]]]:
        size = self._form_bytes
        for start in range(0, len(blocks), self._at_once):
            part = blocks[start : start + self._at_once]
            with self._scratch.borrow() as memory:
                yield part, [memory[i * size : (i + 1) * size] for i in range(len(part))]


_NO_HEADER = bytes(HEADER_BYTES)


def record_bytes(payload_bytes: int) -> int:
    """Return the bytes of a payload's record, in whole pages, which direct I/O needs."""
    return slot_stride(HEADER_BYTES + payload_bytes)


class VerifiedStore(StagedStore):
    """A TierStore over another that is opened for payloads of `record_bytes`. Serves only blocks
    that verify; others count as damaged and are dropped."""

    def __init__(self, store: TierStore, payload_bytes: int) -> None:
        super().__init__(store, record_bytes(payload_bytes))

    def _pack(self, blocks: Sequence[Block], forms: Sequence[memoryview]) -> list[Block]:
        return list(map(_write, blocks, forms))

    def _load(self, blocks: Sequence[Block], forms: Sequence[memoryview]) -> list[bool]:
        for form in forms:  # an older record in this memory must not pass for an answer
            form[:HEADER_BYTES] = _NO_HEADER
        asked = [
            GatheredBlock(block.key, form, None, block.prefix)
            for block, form in zip(blocks, forms, strict=True)
        ]
        got = each("get", self._inner.get(asked), len(asked))
        good = [ok and _take(b, form) for b, form, ok in zip(blocks, forms, got, strict=True)]
        answers = zip(blocks, got, good, strict=True)
        self._drop_damaged([block.key for block, ok, is_good in answers if ok and not is_good])
        return good


def _write(block: Block, form: memoryview) -> Block:
    """Write a payload's record; return it as a block."""
    size = len(block.payload)
    form[:HEADER_BYTES] = pack_header(block.key, size, block.payload, checksum=block.checksum)
    copy(form[HEADER_BYTES : HEADER_BYTES + size], block.payload)
    form[HEADER_BYTES + size :] = bytes(len(form) - HEADER_BYTES - size)
    return GatheredBlock(block.key, form, None, block.prefix)


def _take(block: Block, form: memoryview) -> bool:
    """Copy a payload out of its record; return whether the record is the block's."""
    size = len(block.payload)
    try:
        header = expect(form[:HEADER_BYTES], block.key, size)
        # Verified in memory that the store can't reach: it may write on after it has answered.
        copy(block.payload, form[HEADER_BYTES : HEADER_BYTES + size])
        verify(header, block.payload)
    except RecordError:
        return False
    return True
