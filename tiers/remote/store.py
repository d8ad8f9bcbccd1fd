"""RedisStore: blocks as records under names of a Redis or Valkey server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tiers.block import HEADER_BYTES, expect, pack_header, verify
from tiers.codec import CODECS, Encoder, decode
from tiers.errors import RecordError, TierUnusable
from tiers.remote.bulk import Record, Wanted
from tiers.remote.wire import Wire
from tiers.store import Block

if TYPE_CHECKING:
    from tiers.remote.spec import RedisSpec

MAX_VALUE_BYTES = 512 << 20
"""Largest value of a Redis string (proto-max-bulk-len's default, and its hard limit of old)."""


class RedisStore:
    """A TierStore whose blocks live in a server that others share.

    Each block is one value: the header of `tiers.block`, then the payload as its codec stored
    it. What does not verify is a miss, and is dropped so that the next `put` replaces it.
    Thread-safe. Verbs raise TierUnavailable while the server can't be asked.
    """

    def __init__(self, spec: RedisSpec, payload_bytes: int) -> None:
        if HEADER_BYTES + payload_bytes > MAX_VALUE_BYTES:
            raise TierUnusable(
                f"blocks of {payload_bytes} bytes; with a header of {HEADER_BYTES} bytes they "
                f"must fit in a Redis value of {MAX_VALUE_BYTES}"
            )
        self._payload_bytes = payload_bytes
        self._encoder = Encoder(spec.codec, spec.tier_name)
        self._prefix = spec.key_prefix.encode() + b":"
        self._wire = Wire(spec.url, spec.timeout, spec.ttl)

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        """Say for each key whether the server has a value for it now."""
        return self._wire.exists([self._name(key) for key in keys])

    def put(self, blocks: Sequence[Block]) -> list[bool]:
        """Store blocks the server lacks; the ttl of the others starts anew."""
        held = self._wire.refresh([self._name(block.key) for block in blocks])
        missing = [index for index, here in enumerate(held) if not here]
        names = [self._name(blocks[index].key) for index in missing]
        stored = self._wire.store(
            names, lambda at: self._record(blocks[missing[at]]), self._payload_bytes
        )
        for index, done in zip(missing, stored, strict=True):
            held[index] = done
        return held

    def get(self, blocks: Sequence[Block]) -> list[bool]:
        """Fill each block's payload; False where nothing that verifies is stored."""
        hits = [False] * len(blocks)
        spoilt: set[bytes] = set()

        def arrived(index: int, record: Record | None) -> None:
            hits[index] = record is not None and self._fill(blocks[index], record)
            if not hits[index]:
                spoilt.add(blocks[index].key)

        wanted = [Wanted(self._name(block.key), block.payload) for block in blocks]
        self._wire.load(wanted, arrived)
        if spoilt:
            self.drop(list(spoilt))
        return hits

    def drop(self, keys: Sequence[bytes]) -> None:
        """Forget these keys, for everyone who shares the server."""
        self._wire.delete([self._name(key) for key in keys])

    def close(self) -> None:
        """Close every connection. Idempotent."""
        self._wire.close()

    def _fill(self, block: Block, record: Record) -> bool:
        try:
            header = expect(record.header, block.key, self._payload_bytes)
            verify(header, record.stored)
            if record.stored is not block.payload or header.codec != CODECS["none"]:
                decode(header.codec, record.stored, block.payload)
        except RecordError:
            return False
        return True

    def _record(self, block: Block) -> Record:
        codec, stored = self._encoder.encode(block.payload)
        return Record(pack_header(block.key, self._payload_bytes, stored, codec), stored)

    def _name(self, key: bytes) -> bytes:
        return self._prefix + key
