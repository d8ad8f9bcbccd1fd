"""PackStore: the TierStore over a bucket of packs. See this folder's docstring."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Generator, Sequence, Set
from concurrent.futures import Future, wait
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import NamedTuple, TypeVar

from tiers.block import HEADER_BYTES, Buffer, digest, expect, pack_header, verify
from tiers.concurrency.counter import LockedCounter
from tiers.concurrency.executors import IoExecutor, require_unforked, settle
from tiers.concurrency.repeated_log import RepeatedLog
from tiers.errors import OtherFormat, RecordError, TierError, TierNotOpen, TierUnavailable
from tiers.recent import RecentDict
from tiers.remote.deadline import SLOWEST, Deadline
from tiers.remote.packs import search
from tiers.remote.packs.bucket import Bucket
from tiers.remote.packs.pack import (
    INDEX_BYTES,
    MAX_PACK_BLOCKS,
    Index,
    blocks_of_pack,
    name_of,
    pack_index,
    parse_index,
    record_start,
)
from tiers.remote.packs.search import Found, Span
from tiers.store import Block, PutCounts, Warns, time_left

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")

EACH = 0.001
"""Extra seconds that a verb gets for each key."""
KNOWN = 4096
"""Indexes of packs that are remembered, of a KiB each at most, so that they are not read again."""
KNOWN_SECONDS = 60.0
"""How long one is believed: a pack never changes, but may be gone. That one was missing is not
remembered."""
TRIES = 3
"""How often a `put` looks again where another has put a pack between its look and its own."""


@dataclass
class _Group:
    """The blocks of one call that may lie in one pack. `keys`: of the group, from its first one on,
    as far as they are known. `wanted`: of each number in it the places in the call."""

    keys: Sequence[bytes]
    wanted: dict[int, list[int]] = field(default_factory=dict)

    def left(self, done: Sequence[bool]) -> list[int]:
        """The numbers that are not done, rising."""
        return sorted(n for n, places in self.wanted.items() if not done[places[0]])

    def is_alone(self, firsts: Set[bytes]) -> bool:
        """Whether it is one block, which is among these."""
        return len(self.keys) == 1 and self.keys[0] in firsts


class _Piece(NamedTuple):
    """Blocks in a row of the pack of `key`, from its number `at` on: their places in the call."""

    key: bytes
    at: int
    places: list[list[int]]


class PackStore:
    """A TierStore whose blocks lie in packs of a bucket, which others share. Thread-safe.

    A block that does not verify is a miss, and its pack is deleted, so that the next `put` stores
    it anew; one of another version is a miss, and stays. `drop` deletes whole packs: those that
    begin with a key, and those known to have it. A verb begins nothing after `timeout`, plus `EACH`
    seconds a key and one for each `SLOWEST` bytes; it waits for what it has begun. Verbs raise
    TierUnavailable where the bucket does not answer.
    """

    def __init__(
        self, bucket: Bucket, payload_bytes: int, *, timeout: float, connections: int
    ) -> None:
        """`timeout` in seconds; `connections`: how many calls of the bucket there are at once. The
        store owns the bucket. Raises RuntimeError where threads can't be had."""
        self._bucket = bucket
        self._payload_bytes = payload_bytes
        self._pack_blocks = blocks_of_pack(payload_bytes)
        self._timeout = timeout
        self._deleters = max(1, connections // 2)  # look-ups have the others
        try:
            self._threads = IoExecutor(connections, "packs")
        except RuntimeError:
            bucket.close()
            raise
        self._pid = os.getpid()
        self._known = RecentDict[bytes, Index](KNOWN, KNOWN_SECONDS, time.monotonic)
        """Indexes by the key of the first block."""
        self._damaged, self._renewed = LockedCounter(), LockedCounter()
        self._others = RepeatedLog(logger, bucket.describe(), "packs of another version were met")

    # -- verbs -------------------------------------------------------------------------------

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        """Ask for each key by itself; one in the midst of a pack is found where those before it in
        the pack are asked for, too. `held_prefix` needs far fewer questions."""
        return self._held([keys], 1, known=False)[0]

    def held_prefix(self, prompts: Sequence[Sequence[bytes]]) -> list[int]:
        """See `Packs`. A few round trips, however long the prompts; what is known to be there is
        not asked for."""
        probes = [search.held(keys, self._pack_blocks) for keys in prompts]
        return self._together(probes, self._limit(len(prompts)), known=True)

    def held_blocks(self, prompts: Sequence[Sequence[bytes]]) -> list[list[bool]]:
        """See `PacksWindows`. Two round trips, or one where a pack holds each group; as few keys as
        are asked for at once anyway are all asked for in one."""
        few = sum(map(len, prompts)) <= search.PROBES
        return self._held(prompts, 1 if few else self._pack_blocks, known=True)

    def _held(
        self, prompts: Sequence[Sequence[bytes]], group: int, *, known: bool
    ) -> list[list[bool]]:
        probes = [search.find_all(keys, group) for keys in prompts]
        found = self._together(probes, self._limit(sum(map(len, prompts))), known)
        each = zip(found, prompts, strict=True)
        return [search.marked(spans, len(keys)) for spans, keys in each]

    def pack_blocks(self) -> int:
        return self._pack_blocks

    def put(self, blocks: Sequence[Block]) -> list[bool]:
        """Store what is not there yet, in packs; True also for what is."""
        held = [False] * len(blocks)
        groups, deadline = self._groups(blocks), self._limit_of(blocks)
        for attempt in range(TRIES):
            self._mark_held(groups, held, deadline, answered=attempt > 0)
            if not attempt:
                self._renewed.count("value", sum(held))
            pieces = [piece for group in groups for piece in _missing(group, held)]
            if not pieces:
                break
            created, error = self._each(lambda p: self._put_piece(p, blocks), pieces, deadline)
            for piece, is_new in zip(pieces, created, strict=True):
                if is_new:
                    _mark(held, piece.places)
            if error is not None and not any(created):
                raise error
            if error is not None or all(created):
                break
        return held

    def get(self, blocks: Sequence[Block]) -> list[bool]:
        """Fill each block's payload. Most lie in the pack that begins their group: it is read at
        once. For others the indexes are read, and then their packs."""
        hits = [False] * len(blocks)
        groups, deadline = self._groups(blocks), self._limit_of(blocks)
        pieces = [piece for group in groups for piece in self._guess(group, hits)]
        gone = self._load(pieces, blocks, hits, deadline)
        left = [group for group in groups if group.left(hits) and not group.is_alone(gone)]
        try:
            self._load_by_index(left, blocks, hits, deadline)
        except (TierError, OSError) as error:
            if not any(hits):
                raise
            logger.debug("%d of %d blocks came: %s", sum(hits), len(hits), error)
        return hits

    def drop(self, keys: Sequence[bytes]) -> None:
        wanted, known = set(map(digest, keys)), self._known.items()
        packs = {first for first, index in known if not wanted.isdisjoint(index.each())}
        firsts = packs | set(keys)
        self._known.discard(firsts)
        names, deadline = [name_of(key) for key in firsts], self._limit(len(firsts))
        lanes = min(self._deleters, len(names))
        some = [names[lane::lanes] for lane in range(lanes)]
        _, error = self._each(lambda each: self._delete(each, deadline), some, deadline)
        if error is not None:
            raise error

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._bucket.close()

    # -- capabilities ------------------------------------------------------------------------

    def forget(self) -> None:
        """Read each index anew: a pack that others have deleted is believed for a minute else."""
        self._known.clear()

    def damaged(self) -> int:
        return self._damaged.total

    def counts(self) -> PutCounts:
        """Blocks that were there when they were to be stored; what goes is the bucket's own."""
        return PutCounts(renewed=self._renewed.total)

    def reach(self) -> None:
        """Ask the bucket for a name, as a look-up does."""
        self._bucket.read(name_of(bytes(17)), 0, [memoryview(bytearray(INDEX_BYTES))])

    def warning(self) -> str:
        return self._bucket.warning() if isinstance(self._bucket, Warns) else ""

    def describe(self) -> str:
        return f"{self._bucket.describe()}, {self._pack_blocks} blocks a pack"

    # -- groups ------------------------------------------------------------------------------

    def _groups(self, blocks: Sequence[Block]) -> list[_Group]:
        found: dict[tuple[int, int], _Group] = {}
        for place, block in enumerate(blocks):
            prefix = block.prefix
            if prefix is None:
                found[-1 - place, 0] = _Group([block.key], {0: [place]})
                continue
            size = min(prefix.group, MAX_PACK_BLOCKS)
            base = prefix.at - prefix.at % size
            group = found.get((id(prefix.keys), base))
            if group is None:
                keys = prefix.keys[base : base + size]
                group = found[id(prefix.keys), base] = _Group(keys)
            group.wanted.setdefault(prefix.at - base, []).append(place)
        return list(found.values())

    def _mark_held(
        self, groups: Sequence[_Group], held: list[bool], deadline: Deadline, answered: bool
    ) -> None:
        """Mark the blocks that the bucket has now: what is remembered of it is not believed."""
        asked = [group for group in groups if group.left(held)]
        probes = [search.cover(group.keys, group.left(held), self._known.get) for group in asked]
        found = self._together(probes, deadline, answered=answered)
        for group, spans in zip(asked, found, strict=True):
            for span in spans:
                for number in range(span.at, span.stop):
                    _mark(held, [group.wanted.get(number, [])])

    def _guess(self, group: _Group, hits: Sequence[bool]) -> list[_Piece]:
        """Where the blocks lie: as is known, or else all in the pack that begins their group."""
        spans = search.walk_known(group.keys, 0, len(group.keys), self._known.get)
        if not spans or spans[-1].stop <= max(group.wanted):
            spans = [Span(group.keys[0], 0, len(group.keys))]
        return _pieces(group, spans, hits)

    # -- the bucket --------------------------------------------------------------------------

    def _together(
        self,
        probes: Sequence[Generator[Sequence[bytes], Found, R]],
        deadline: Deadline,
        known: bool = False,
        answered: bool = False,
    ) -> list[R]:
        """Let searches go on together; what they found. `known`: what is known is not read.
        `answered`: the bucket has answered this verb, as it has in later rounds."""
        results: dict[int, R] = {}
        asked: dict[int, Sequence[bytes]] = {}

        def go_on(number: int, found: Found | None) -> None:
            probe = probes[number]
            try:
                asked[number] = next(probe) if found is None else probe.send(found)
            except StopIteration as end:
                asked.pop(number, None)
                results[number] = end.value

        for number in range(len(probes)):
            go_on(number, None)
        while asked:
            keys = [key for some in asked.values() for key in some]
            found = self._indexes(keys, deadline, known, answered)
            answered = True
            for number in list(asked):
                go_on(number, found)
        return [results[number] for number in range(len(probes))]

    def _indexes(
        self, keys: Sequence[bytes], deadline: Deadline, known: bool, answered: bool
    ) -> dict[bytes, Index | None]:
        """The indexes of the packs that begin with these keys; None: there is no such pack, or it
        alone can't be read. Raises when time is over, and where nothing has `answered`."""
        found = dict.fromkeys(keys)
        if known:
            found.update((key, self._known.get(key)) for key in keys)
        asked = [key for key, index in found.items() if index is None]
        answers, error = self._each(lambda key: (self._read_index(key),), asked, deadline)
        if error is not None and (deadline.is_over or not (answered or any(answers))):
            raise error
        each = zip(asked, answers, strict=True)
        found.update((key, answer[0]) for key, answer in each if answer)
        return found

    def _read_index(self, key: bytes) -> Index | None:
        data = bytearray(INDEX_BYTES)
        name = name_of(key)
        count = self._bucket.read(name, 0, [memoryview(data)])
        if count is None:
            return None
        if count < INDEX_BYTES and not time_left():
            raise self._late()
        try:
            index = parse_index(memoryview(data)[:count])
            if not index.matches([key]):
                raise RecordError("the pack begins with another block")
        except OtherFormat as error:
            line = "%s: what another version of kvtiers stored is a miss, and stays: %s"
            self._others.log(line, self._bucket.describe(), error)
            return None
        except RecordError as error:
            logger.debug("pack %s: %s", name, error)
            self._damaged.count("index")
            # Where nothing can be written it is a miss each time.
            with suppress(TierError, OSError):
                self._bucket.delete([name])
            return None
        if index.payload_bytes != self._payload_bytes:
            return None
        self._known.update({key: index})
        return index

    def _put_piece(self, piece: _Piece, blocks: Sequence[Block]) -> bool:
        """Put a pack; False: there is one that begins with the same block."""
        given = [blocks[places[0]] for places in piece.places]
        keys, size = [block.key for block in given], self._payload_bytes
        parts: list[Buffer] = [pack_index(keys, size)]
        for block in given:
            parts.append(pack_header(block.key, size, block.payload, checksum=block.checksum))
            parts.append(block.payload)
        if not self._bucket.put(name_of(piece.key), parts):
            return False
        self._known.update({piece.key: parse_index(parts[0])})
        return True

    def _load(
        self,
        pieces: Sequence[_Piece],
        blocks: Sequence[Block],
        hits: list[bool],
        deadline: Deadline,
        are_there: bool = False,
    ) -> set[bytes]:
        """Read pieces and note which blocks came; the keys of packs that do not exist. `are_there`:
        the packs' indexes say that they have these blocks. Raises if none has come."""
        read, error = self._each(lambda p: self._read_piece(p, blocks), pieces, deadline)
        spoilt: set[bytes] = set()
        for piece, good in zip(pieces, read, strict=True):
            _mark(hits, good or [])
            if good is None or deadline.is_over:  # then what has not come may still be right
                continue
            if are_there and len(good) < len(piece.places) and self._names_still(piece, blocks):
                spoilt.add(piece.key)
                self._damaged.count("record", len(piece.places) - len(good))
        if error is not None and not any(hits):
            raise error
        self._known.discard(spoilt)
        with suppress(TierError, OSError):  # what is loaded stays loaded; the next load finds them
            self._bucket.delete([name_of(key) for key in spoilt])
        answered = zip(pieces, read, strict=True)
        return {piece.key for piece, good in answered if good is None and error is None}

    def _names_still(self, piece: _Piece, blocks: Sequence[Block]) -> bool:
        """Whether the pack has these blocks now: another may be in its place, from elsewhere."""
        named = [digest(blocks[places[0]].key) for places in piece.places]
        with suppress(TierError, OSError):
            index = self._read_index(piece.key)
            return index is not None and [*index.each()][piece.at :][: len(named)] == named
        return False

    def _load_by_index(
        self,
        groups: Sequence[_Group],
        blocks: Sequence[Block],
        hits: list[bool],
        deadline: Deadline,
    ) -> None:
        """Read what has not come of these groups from where the packs' indexes say that it is."""
        probes = [search.find(group.keys, group.left(hits)[-1] + 1) for group in groups]
        spans = self._together(probes, deadline)
        pieces = [
            piece
            for group, some in zip(groups, spans, strict=True)
            for piece in _pieces(group, some, hits)
        ]
        self._load(pieces, blocks, hits, deadline, are_there=True)

    def _read_piece(self, piece: _Piece, blocks: Sequence[Block]) -> list[list[int]] | None:
        """Read records into their blocks' payloads; the places of those that verify. None: there is
        no such pack."""
        headers = memoryview(bytearray(HEADER_BYTES * len(piece.places)))
        each = [headers[at : at + HEADER_BYTES] for at in range(0, len(headers), HEADER_BYTES)]
        given = [blocks[places[0]] for places in piece.places]
        views = [v for pair in zip(each, given, strict=True) for v in (pair[0], pair[1].payload)]
        start = record_start(piece.at, self._payload_bytes)
        count = self._bucket.read(name_of(piece.key), start, views)
        if count is None:
            self._known.discard([piece.key])
            return None
        whole = count // (HEADER_BYTES + self._payload_bytes)
        good: list[list[int]] = []
        for number, places in enumerate(piece.places[:whole]):
            block = given[number]
            with suppress(RecordError):
                verify(expect(each[number], block.key, self._payload_bytes), block.payload)
                for place in places[1:]:
                    blocks[place].payload[:] = block.payload
                good.append(places)
        return good

    def _delete(self, names: Sequence[str], deadline: Deadline) -> None:
        for name in names:
            self._require_time(deadline)
            self._bucket.delete([name])

    def _require_time(self, deadline: Deadline) -> None:
        if deadline.is_over:
            raise self._late()

    def _closed(self) -> TierNotOpen:
        return TierNotOpen(f"{self._bucket.describe()} was closed meanwhile")

    def _late(self) -> TierUnavailable:
        return TierUnavailable(f"{self._bucket.describe()}: no answer in time")

    def _each(
        self, call: Callable[[T], R | None], some: Sequence[T], deadline: Deadline
    ) -> tuple[list[R | None], Exception | None]:
        """Call this for each, many at once; the results, None of those that failed, and an error
        that was raised, if any was. Waits for all that has begun. Raises TierNotOpen of a store
        that was closed, and TierUnusable in a forked child, which has none of the threads: it would
        wait for ever."""
        require_unforked(self._pid, self._bucket.describe())

        def in_time(one: T) -> R | None:
            self._require_time(deadline)
            return call(one)

        futures = [Future[R | None]() for _ in some[:1]]
        try:
            # In this call's context: they see how long its caller waits.
            calls = (partial(copy_context().run, in_time, one) for one in some[1:])
            futures.extend(map(self._threads.submit, calls))
            if some:  # one on this thread, which would only wait
                settle(futures[0], partial(in_time, some[0]))
        except RuntimeError as refused:  # its threads take no more
            raise self._closed() from refused
        finally:
            wait(futures[1:])
        if any(future.cancelled() for future in futures):
            raise self._closed()
        errors = [error for future in futures if (error := future.exception()) is not None]
        if odd := [error for error in errors if not isinstance(error, TierError | OSError)]:
            raise odd[0]
        results = [None if future.exception() else future.result() for future in futures]
        return results, next((e for e in errors if isinstance(e, Exception)), None)

    def _limit(self, keys: int, num_bytes: int = 0) -> Deadline:
        return Deadline(self._timeout + EACH * keys + num_bytes / SLOWEST)

    def _limit_of(self, blocks: Sequence[Block]) -> Deadline:
        return self._limit(len(blocks), len(blocks) * self._payload_bytes)


def _mark(done: list[bool], places: Sequence[Sequence[int]]) -> None:
    for some in places:
        for place in some:
            done[place] = True


def _rows(numbers: Sequence[int]) -> list[list[int]]:
    """Numbers that rise, as lists of those that follow each other."""
    rows = groupby(enumerate(numbers), lambda item: item[1] - item[0])
    return [[number for _, number in row] for _, row in rows]


def _missing(group: _Group, held: Sequence[bool]) -> list[_Piece]:
    """The packs to put for what is not held."""
    return [
        _Piece(group.keys[row[0]], 0, [group.wanted[number] for number in row])
        for row in _rows(group.left(held))
    ]


def _pieces(group: _Group, spans: Sequence[Span], hits: Sequence[bool]) -> list[_Piece]:
    """The parts of packs to read for what has not come."""
    wanted = group.left(hits)
    return [
        _Piece(span.key, row[0] - span.at, [group.wanted[number] for number in row])
        for span in spans
        for row in _rows([number for number in wanted if span.at <= number < span.stop])
    ]
