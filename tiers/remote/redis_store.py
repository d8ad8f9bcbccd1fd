"""RedisStore: blocks as records under names of a Redis or Valkey server."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress

from tiers.block import HEADER_BYTES, expect, pack_header, verify
from tiers.codec import CODECS, Encoder, decode
from tiers.concurrency.counter import LockedCounter
from tiers.errors import RecordError, TierUnavailable, TierUnusable
from tiers.remote.pipeline import GetRequest, Record
from tiers.remote.pools import ConnectionSettings
from tiers.remote.redis_client import RedisClient
from tiers.remote.stream import Deadline
from tiers.store import Block, PutCounts

_log = logging.getLogger(__name__)

MAX_VALUE_BYTES = 512 << 20
"""Largest value of a Redis string (proto-max-bulk-len's default, and its hard limit of old)."""


class RedisStore:
    """A TierStore whose blocks live in a server that others share.

    Each block is one value: the header of `tiers.block`, then the payload as its codec stored it.
    A value that does not verify is a miss, and is dropped, so that the next `put` replaces it.
    Thread-safe. Verbs raise TierUnavailable while the server does not answer. They end after
    `timeout`, plus `client.EACH` seconds a block and a second for each `client.SLOWEST` bytes.
    """

    def __init__(
        self,
        settings: ConnectionSettings,
        payload_bytes: int,
        encoder: Encoder,
        *,
        key_prefix: str,
        timeout: float,
        ttl: float | None,
    ) -> None:
        """`timeout` and `ttl` are in seconds. Connects to nothing. Raises TierUnusable."""
        if HEADER_BYTES + payload_bytes > MAX_VALUE_BYTES:
            raise TierUnusable(
                f"blocks of {payload_bytes} bytes; with a header of {HEADER_BYTES} bytes they "
                f"must fit in a Redis value of {MAX_VALUE_BYTES}"
            )
        self._payload_bytes = payload_bytes
        self._place = str(settings.url)
        self._encoder = encoder
        self._damaged, self._renewed = LockedCounter(), LockedCounter()
        self._prefix = key_prefix.encode() + b":"
        self._client = RedisClient(settings, timeout, ttl)

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        return self._client.exists(self._names(keys), self._client.limit(len(keys)))

    def put(self, blocks: Sequence[Block]) -> list[bool]:
        """Store the blocks that the server lacks; the ttl of the others starts anew."""
        deadline = self._limit(blocks)
        names = self._names([block.key for block in blocks])
        held = self._client.refresh(names, deadline)
        missing = [index for index, here in enumerate(held) if not here]
        wanted = [names[index] for index in missing]
        stored = self._client.store(wanted, lambda at: self._record(blocks[missing[at]]), deadline)
        self._renewed.count("value", sum(held))
        for index, done in zip(missing, stored, strict=True):
            held[index] = done
        return held

    def get(self, blocks: Sequence[Block]) -> list[bool]:
        """Fill each block's payload; False for each that is absent, does not verify, or had not
        arrived when the server failed. Raises TierUnavailable if none arrived."""
        hits = [False] * len(blocks)
        spoilt: set[bytes] = set()

        def on_value(index: int, record: Record | None) -> None:
            hits[index] = record is not None and self._fill(blocks[index], record)
            if not hits[index]:
                spoilt.add(blocks[index].key)

        deadline = self._limit(blocks)
        names = self._names([block.key for block in blocks])
        requests = [
            GetRequest(name, block.payload) for name, block in zip(names, blocks, strict=True)
        ]
        try:
            self._client.load(requests, on_value, deadline)
        except TierUnavailable as error:
            if not any(hits):
                raise
            _log.debug("%d of %d blocks arrived: %s", sum(hits), len(hits), error)
        self._damaged.count("value", len(spoilt))
        # What was loaded stays loaded if this fails: the next load finds the spoilt values again.
        with suppress(TierUnavailable):
            self._client.delete(self._names(list(spoilt)), deadline)
        return hits

    def damaged(self) -> int:
        """Number of values found that were not the record of their key."""
        return self._damaged.total

    def reach(self) -> None:
        """Ask the server for a name, as a look-up does."""
        self.has([b""])

    def counts(self) -> PutCounts:
        """Values that were there when they were to be stored. What the server evicts is its own
        matter."""
        return PutCounts(renewed=self._renewed.total)

    def describe(self) -> str:
        return self._place

    def drop(self, keys: Sequence[bytes]) -> None:
        """Drop these keys, for everybody who shares the server."""
        self._client.delete(self._names(keys), self._client.limit(len(keys)))

    def close(self) -> None:
        self._client.close()

    def _limit(self, blocks: Sequence[Block]) -> Deadline:
        return self._client.limit(len(blocks), len(blocks) * self._payload_bytes)

    def _fill(self, block: Block, record: Record) -> bool:
        try:
            header = expect(record.header, block.key, self._payload_bytes)
            verify(header, record.stored, record.checksum)
            if record.stored is not block.payload or header.codec != CODECS["none"]:
                decode(header.codec, record.stored, block.payload)
        except RecordError:
            return False
        return True

    def _record(self, block: Block) -> Record:
        codec, stored = self._encoder.encode(block.payload)
        # Under the payload's checksum other bytes are never served: of a payload that has changed
        # they must not be.
        known = codec == CODECS["none"] or block.has_changed()
        checksum = block.checksum if known else None
        header = pack_header(block.key, self._payload_bytes, stored, codec, checksum)
        return Record(header, stored)

    def _names(self, keys: Sequence[bytes]) -> list[bytes]:
        return [self._prefix + key for key in keys]
