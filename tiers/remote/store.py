"""RedisStore: blocks as records under names of a Redis or Valkey server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from tiers.block import HEADER_BYTES, expect, pack_header, verify
from tiers.codec import CODECS, decode, encode
from tiers.errors import RecordError, TierUnusable
from tiers.remote.wire import Value, Wire
from tiers.store import Block

if TYPE_CHECKING:
    from tiers.remote.spec import RedisSpec

T = TypeVar("T")

MAX_VALUE_BYTES = 512 << 20
"""Largest value of a Redis string (proto-max-bulk-len's default, and its hard limit of old)."""

WINDOW_BYTES = 4 << 20
"""Payload bytes under way at a time: 2 to 8 MiB moved fastest, measured on loopback."""


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
        self._codec = spec.codec
        self._prefix = spec.key_prefix.encode() + b":"
        self._window = max(1, WINDOW_BYTES // payload_bytes)
        self._wire = Wire(spec.url, spec.timeout, spec.ttl)

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        """Say for each key whether the server has a value for it now."""
        return self._wire.exists([self._name(key) for key in keys])

    def put(self, blocks: Sequence[Block]) -> list[bool]:
        """Store blocks the server lacks; the ttl of the others starts anew."""
        held = self._wire.refresh([self._name(block.key) for block in blocks])
        missing = [index for index, here in enumerate(held) if not here]
        for window in _windows(missing, self._window):
            stored = self._wire.store([self._value(blocks[index]) for index in window])
            for index, done in zip(window, stored, strict=True):
                held[index] = done
            if not all(stored):  # the server is full: it would refuse the rest after they travelled
                break
        return held

    def get(self, blocks: Sequence[Block]) -> list[bool]:
        """Fill each block's payload; False where nothing that verifies is stored."""
        hits: list[bool] = []
        for window in _windows(blocks, self._window):
            hits += self._get(window)
        return hits

    def drop(self, keys: Sequence[bytes]) -> None:
        """Forget these keys, for everyone who shares the server."""
        self._wire.delete([self._name(key) for key in keys])

    def close(self) -> None:
        """Close every connection. Idempotent."""
        self._wire.close()

    def _get(self, blocks: Sequence[Block]) -> list[bool]:
        values = self._wire.load([self._name(block.key) for block in blocks])
        hits = []
        spoilt = []
        for block, value in zip(blocks, values, strict=True):
            hit = value is not None and self._fill(block, value)
            hits.append(hit)
            if value is not None and not hit:
                spoilt.append(block.key)
        if spoilt:
            self.drop(spoilt)
        return hits

    def _fill(self, block: Block, value: bytes) -> bool:
        try:
            header = expect(value, block.key, self._payload_bytes)
            stored = memoryview(value)[HEADER_BYTES:]
            verify(header, stored)
            decode(header.codec, stored, block.payload)
        except RecordError:
            return False
        return True

    def _value(self, block: Block) -> Value:
        codec, stored = self._codec, encode(self._codec, block.payload)
        if len(stored) >= len(block.payload):  # what does not shrink is not worth decoding
            codec, stored = "none", block.payload
        header = pack_header(block.key, self._payload_bytes, stored, CODECS[codec])
        return Value(self._name(block.key), header, stored)

    def _name(self, key: bytes) -> bytes:
        return self._prefix + key


def _windows(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
