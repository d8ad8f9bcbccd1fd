"""RedisStore: blocks as records under names of a Redis or Valkey server.

redis-py connects and authenticates. Commands and replies then travel on its sockets directly, where
values need no copy and a whole verb has one deadline.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

from tiers.block import HEADER_BYTES, expect, pack_header, verify
from tiers.codec import CODECS, Encoder, decode
from tiers.concurrency.counter import LockedCounter
from tiers.concurrency.repeated_log import RepeatedLog
from tiers.errors import OtherFormat, RecordError, TierUnavailable, TierUnusable
from tiers.remote.deadline import SLOWEST, Deadline
from tiers.remote.redis import pipeline
from tiers.remote.redis.pipeline import Record, Window
from tiers.remote.redis.pools import ConnectionSettings, is_of_files, reason
from tiers.remote.redis.stream import ServerError, Stream, each_command, read_flags
from tiers.remote.redis.topology import FAILURES, Cluster, Kind, OneMaster, Operation, open_topology
from tiers.store import Block, PutCounts

logger = logging.getLogger(__name__)

MAX_VALUE_BYTES = 512 << 20
"""Largest value of a Redis string (proto-max-bulk-len's default, and its hard limit of old)."""

EACH = 0.01
"""Extra seconds that a verb gets for each turn, which a block takes that it moves, and `ASKED`
names do otherwise: an engine's thread that is busy with Python keeps ours waiting for 5 ms."""

ASKED = 500
"""Names that are sent, and answered, in one call of the system."""
OUT_OF_MEMORY = (
    "it is out of memory and refuses to store; raise its maxmemory, or CONFIG SET "
    "maxmemory-policy allkeys-lru"
)


class RedisNames:
    """The names that begin with a prefix, in a server or several, as a store or a tool asks for
    them. Thread-safe; a forked child connects anew."""

    def __init__(
        self, settings: Callable[[], ConnectionSettings], key_prefix: str, timeout: float
    ) -> None:
        """`settings` reads the files of passwords and certificates: now, and again where they are
        refused. `timeout`: of a verb, in seconds. Connects to nothing. Raises TierUnusable."""
        self._read_settings, self._settings = settings, settings()
        self._place = str(self._settings.url)
        self._timeout = timeout
        self._prefix = key_prefix.encode() + b":"
        self._topology = open_topology(self._settings, timeout)
        self._window = Window()

    def close(self) -> None:
        self._topology.close()

    def _limit(self, turns: int, num_bytes: int = 0) -> Deadline:
        """The deadline of a verb that begins now, for so many `turns` and bytes at most."""
        return Deadline(self._timeout + EACH * turns + num_bytes / SLOWEST)

    def _dispatch(
        self, names: Sequence[bytes], kind: Kind, operation: Operation, deadline: Deadline
    ) -> None:
        if names:
            with self._asked() as topology:
                topology.dispatch(names, kind, operation, deadline)

    @contextmanager
    def _asked(self) -> Iterator[OneMaster | Cluster]:
        """The servers, to be asked by the body. Raises TierUnavailable where they don't answer."""
        topology = self._topology
        try:
            yield topology
        except FAILURES as error:
            if is_of_files(error):
                self._renew(topology)
            # Not chained: a traceback would print the server's text, which `reason` masks.
            raise TierUnavailable(f"{self._place}: {reason(error)}") from None

    def _renew(self, refused: OneMaster | Cluster) -> None:
        """Read the files again, and connect with what they have from now on, unless it is the same.
        Verbs in flight end over the connections that they have."""
        with suppress(TierUnusable):  # one is being replaced
            settings = self._read_settings()
            is_other = settings.url != self._settings.url or settings.tls is not None
            if is_other and self._topology is refused:
                self._settings = settings
                self._topology = open_topology(settings, self._timeout)


class RedisStore(RedisNames):
    """A TierStore whose blocks live in a server, or several, that others share.

    Each block is one value: the header of `tiers.block`, then the payload as its codec stored it.
    A value that does not verify is a miss, and is dropped, so that the next `put` replaces it. So
    is one of a later version's codec: later versions read what this one stores.

    A verb ends after `timeout`, plus `EACH` seconds a turn and a second for each `SLOWEST` bytes,
    connecting included, however many servers it asks; only a silent name server can make it take
    longer. A connection found dead when it is borrowed is made anew once, and names that moved
    within a cluster are looked for once more; nothing else is tried again. Verbs raise
    TierUnavailable while no server answers. While some nodes of a cluster answer, the names of the
    others have no value and take none.
    """

    def __init__(
        self,
        settings: Callable[[], ConnectionSettings],
        payload_bytes: int,
        encoder: Encoder,
        *,
        key_prefix: str,
        timeout: float,
        ttl: float | None,
    ) -> None:
        """As the names. `ttl` is in seconds. Raises TierUnusable."""
        if HEADER_BYTES + payload_bytes > MAX_VALUE_BYTES:
            raise TierUnusable(
                f"blocks of {payload_bytes} bytes; with a header of {HEADER_BYTES} bytes they "
                f"must fit in a Redis value of {MAX_VALUE_BYTES}"
            )
        super().__init__(settings, key_prefix, timeout)
        self._payload_bytes = payload_bytes
        self._encoder = encoder
        self._ttl_ms = None if ttl is None else b"%d" % max(1, round(ttl * 1000))
        self._damaged, self._renewed = LockedCounter(), LockedCounter()
        self._others = RepeatedLog(logger, self._place, "values of another version were met")
        self._full, self._refused, self._ask_at = "", b"", 0.0
        self.may_touch = True
        """Whether the server was not seen to refuse TOUCH."""
        self._refusals = RepeatedLog(logger, self._place, "stores were refused for want of memory")

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        return self._ask(self._names(keys), "reads", self._limit(len(keys) // ASKED), b"EXISTS")

    def put(self, blocks: Sequence[Block]) -> list[bool]:
        """Store the blocks that the server does not hold; the ttl of the others starts anew."""
        deadline, ttl = self._limit_of(blocks), self._ttl_ms
        names = self._names(block.key for block in blocks)
        if ttl is None:
            held = self._use(names, deadline)
        else:
            held = self._ask(names, "writes", deadline, b"PEXPIRE", ttl)
        self._renewed.count("value", sum(held))
        missing = [index for index, here in enumerate(held) if not here]
        expiry = () if ttl is None else (b"PX", ttl)
        full: list[bool] = []

        def operation(stream: Stream, positions: Sequence[int]) -> None:
            indices = [missing[position] for position in positions]
            stored, is_full = pipeline.store(
                stream,
                [names[index] for index in indices],
                lambda at: self._record(blocks[indices[at]]),
                expiry,
                self._window,
            )
            full.append(is_full)
            for index, answer in zip(indices, stored, strict=True):
                held[index] = answer

        self._dispatch([names[index] for index in missing], "writes", operation, deadline)
        if full:  # else all were there, which needs no memory
            self._full = OUT_OF_MEMORY if any(full) else ""
        if any(full):
            self._refused = next(names[at] for at in missing if not held[at])
            self._ask_at = time.monotonic() + 1
            self._refusals.log("%s: %s", self._place, self._full)
        return held

    def _use(self, names: Sequence[bytes], deadline: Deadline) -> list[bool]:
        """Which of these the server has, which count as used by that: else a full one would evict
        first what engines have from themselves or from a faster tier. Where that is forbidden, as
        to users of before, they are asked for alone."""
        if self.may_touch:
            held = self._ask(names, "reads", deadline, b"TOUCH")
            if self.may_touch:
                return held
            line = "%s: its user may not TOUCH: once full, it evicts what faster tiers serve first"
            logger.warning(line, self._place)
        return self._ask(names, "reads", deadline, b"EXISTS")

    def warning(self) -> str:
        """What a server that is out of memory lacks. A second after it refused it is asked for a
        moment's value under the name that it refused, if it has none by now."""
        if self._full and time.monotonic() >= self._ask_at:
            self._ask_at, names = time.monotonic() + 1, [self._refused]

            def operation(stream: Stream, _: Sequence[int]) -> None:
                value, now = Record(b"", b""), (b"PX", b"1")
                answers = pipeline.store(stream, names, lambda _: value, now, self._window)
                self._full = OUT_OF_MEMORY if answers[1] else ""

            if any(self._ask(names, "reads", self._limit(1), b"EXISTS")):
                self._full = ""
            else:
                self._dispatch(names, "writes", operation, self._limit(1))
        return self._full

    def get(self, blocks: Sequence[Block]) -> list[bool]:
        """Fill each block's payload; False for each that is absent, does not verify, or had not
        arrived when the server failed. Raises TierUnavailable if none arrived."""
        hits = [False] * len(blocks)
        came: set[int] = set()
        spoilt: set[bytes] = set()
        others: set[bytes] = set()
        names = self._names(block.key for block in blocks)
        deadline = self._limit_of(blocks)

        def operation(stream: Stream, positions: Sequence[int]) -> None:
            # Where some names have moved, all of their server are to be looked for again. Of one
            # that came before and is gone by now, other values would be left in its memory.
            here = [position for position in positions if position not in came]

            def on_value(at: int, record: Record | None) -> None:
                came.add(here[at])
                try:
                    self._fill(blocks[here[at]], record)
                except RecordError as error:
                    spoilt.add(names[here[at]])
                    if isinstance(error, OtherFormat):
                        others.add(names[here[at]])
                        line = "%s: a value of another version of kvtiers is dropped: %s"
                        self._others.log(line, self._place, error)
                else:
                    hits[here[at]] = True

            if here:
                asked, memory = [names[at] for at in here], [blocks[at].payload for at in here]
                pipeline.load(stream, asked, memory, on_value, self._window)

        try:
            self._dispatch(names, "reads", operation, deadline)
        except TierUnavailable as error:
            if not any(hits):
                raise
            logger.debug("%d of %d blocks arrived: %s", sum(hits), len(hits), error)
        self._damaged.count("value", len(spoilt - others))
        # If this fails, loaded blocks stay loaded: the next load finds the spoilt values again.
        with suppress(TierUnavailable):
            self._unlink(list(spoilt), deadline)
        return hits

    def damaged(self) -> int:
        return self._damaged.total

    def reach(self) -> None:
        """Ask the server for a name, as a look-up does."""
        self.has([b""])

    def counts(self) -> PutCounts:
        """Values that were there when they were to be stored; evictions are the server's own."""
        return PutCounts(renewed=self._renewed.total)

    def describe(self) -> str:
        return self._place

    def drop(self, keys: Sequence[bytes]) -> None:
        """Drop these keys, for everybody who shares the server."""
        self._unlink(self._names(keys), self._limit(len(keys) // ASKED))

    def _limit_of(self, blocks: Sequence[Block]) -> Deadline:
        return self._limit(len(blocks), len(blocks) * self._payload_bytes)

    def _fill(self, block: Block, record: Record | None) -> None:
        """Fill the block's payload. Raises RecordError."""
        if record is None:
            raise RecordError("the value has another length, or is of another type")
        header = expect(record.header, block.key, self._payload_bytes)
        verify(header, record.stored)
        if record.stored is not block.payload or header.codec != CODECS["none"]:
            decode(header.codec, record.stored, block.payload)

    def _record(self, block: Block) -> Record:
        codec, stored = self._encoder.encode(block.payload)
        # Under the payload's checksum other bytes are never served: of a payload that has changed
        # they must not be.
        known = codec == CODECS["none"] or block.has_changed()
        checksum = block.checksum if known else None
        header = pack_header(block.key, self._payload_bytes, stored, codec, checksum)
        return Record(header, stored)

    def _names(self, keys: Iterable[bytes]) -> list[bytes]:
        return [self._prefix + key for key in keys]

    def _unlink(self, names: Sequence[bytes], deadline: Deadline) -> None:
        # UNLINK, since the server then frees their memory in the background.
        self._ask(names, "writes", deadline, b"UNLINK")

    def _ask(
        self, names: Sequence[bytes], kind: Kind, deadline: Deadline, verb: bytes, *after: bytes
    ) -> list[bool]:
        """Send `verb name *after` for each name; whether each was answered by more than 0."""
        answers = [False] * len(names)

        def operation(stream: Stream, positions: Sequence[int]) -> None:
            # What a lookup costs: it asks for a prompt's blocks of all ranks.
            is_all = isinstance(positions, range)
            here = names if is_all else [names[position] for position in positions]
            commands = each_command(verb, here, *after)
            began = time.monotonic()
            stream.send([commands])
            done = 0
            while done < len(positions):
                some = self._answers(stream, len(positions) - done if done else 1)
                if not done:
                    self._window.answered(time.monotonic() - began)
                if is_all:
                    answers[done : done + len(some)] = some
                else:
                    for position, answer in zip(positions[done:], some, strict=False):
                        answers[position] = answer
                done += len(some)

        self._dispatch(names, kind, operation, deadline)
        return answers

    def _answers(self, stream: Stream, most: int) -> list[bool]:
        """Read up to `most` answers, one at least."""
        try:
            return read_flags(stream, most)
        except ServerError as error:
            if error.code in ("NOPERM", "ERR") and "touch" in str(error).lower():
                self.may_touch = False
            elif error.code != "ASK":  # a name that left a slot which is moving counts as absent
                raise
            return [False]
