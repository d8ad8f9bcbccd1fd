"""What if a plugin's store lies? Only our own record of that very block is believed.

Around every store that does not verify by itself. A record is that of `tiers.block`: a header with
the key, the length and a checksum, then the payload, on whole pages. It finds what is broken or
mistaken, and is no defence against who can write to the tier: that is encryption.
"""

from __future__ import annotations

from collections.abc import Sequence

from tiers.block import HEADER_BYTES, expect, pack_header, verify
from tiers.errors import RecordError
from tiers.host.slot_memory import slot_stride
from tiers.store import Block, TierStore, each
from tiers.wrappers.staged import StagedStore

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
        asked = [Block(block.key, form) for block, form in zip(blocks, forms, strict=True)]
        got = each("get", self._inner.get(asked), len(asked))
        good = [ok and _take(b, form) for b, form, ok in zip(blocks, forms, got, strict=True)]
        said = zip(blocks, got, good, strict=True)
        self._drop_damaged([block.key for block, ok, is_good in said if ok and not is_good])
        return good


def _write(block: Block, form: memoryview) -> Block:
    """Write a payload's record; return it as a block."""
    size = len(block.payload)
    form[:HEADER_BYTES] = pack_header(block.key, size, block.payload, checksum=block.checksum)
    form[HEADER_BYTES : HEADER_BYTES + size] = block.payload
    form[HEADER_BYTES + size :] = bytes(len(form) - HEADER_BYTES - size)
    return Block(block.key, form)


def _take(block: Block, form: memoryview) -> bool:
    """Copy a payload out of its record; return whether the record is the block's."""
    size = len(block.payload)
    try:
        header = expect(form[:HEADER_BYTES], block.key, size)
        # Verified in memory that the store can't reach: it may write on after it has answered.
        block.payload[:] = form[HEADER_BYTES : HEADER_BYTES + size]
        verify(header, block.payload)
    except RecordError:
        return False
    return True
