"""The records of a Redis tier, for tools. What they read counts as no use where the server can tell
(CLIENT NO-TOUCH, since 7.2): its eviction goes by uses."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from operator import eq
from typing import Any, TypeVar

from tiers.block import (
    HEADER_BYTES,
    MAGIC,
    MAX_KEY_BYTES,
    NAMESPACE_BYTES,
    digest,
    parse_header,
    verify,
)
from tiers.errors import OtherFormat, RecordError
from tiers.records import GONE, WHOLE, Finding, StoredRecord, Use, ignore
from tiers.remote.redis import pipeline
from tiers.remote.redis.pipeline import Record
from tiers.remote.redis.pools import ConnectionSettings
from tiers.remote.redis.redis_store import RedisNames
from tiers.remote.redis.stream import (
    ServerError,
    Stream,
    command,
    each_command,
    read_integer,
    read_length,
    read_status,
)
from tiers.remote.redis.topology import Kind

T = TypeVar("T")

_SCAN = b"500"
_NOTES = b"namespace:"
_MARKS = b"size:"
"""In a note's name: of marks, which are no namespaces'."""
_MARK_MS = b"%d" % (30 * 86_400_000)
"""How long a mark is kept: it is set as an engine starts, whose blocks live as long as it runs."""
_SPECIAL = re.compile(rb"[*?\[\]\\]")
_OTHER_LENGTH = Finding("damaged", "the value has another length, or is of another type")


class RedisRecords(RedisNames):
    """`StoredRecords` of the names that begin with a prefix. Connects when it is first asked."""

    def __init__(
        self,
        settings: Callable[[], ConnectionSettings],
        key_prefix: str,
        timeout: float,
        ttl: float | None,
    ) -> None:
        """As the names. `ttl`: how long a note is kept, in seconds. Raises TierUnusable."""
        super().__init__(settings, key_prefix, timeout)
        self._ttl = () if ttl is None else (b"PX", b"%d" % max(1, round(ttl * 1000)))

    def listed(self) -> Iterator[Sequence[StoredRecord]]:
        """As the server scans its names, so that one may come twice."""
        for names in self._scan(self._prefix):
            if some := [name for name in names if not name.startswith(self._prefix + _NOTES)]:
                yield self._looked_at(some)

    def _scan(self, prefix: bytes) -> Iterator[list[bytes]]:
        pattern = _SPECIAL.sub(rb"\\\g<0>", prefix) + b"*"
        with self._asked() as topology:
            pools = topology.masters(self._limit(0))[0].values()
        for pool in pools:
            cursor = b"0"
            while True:
                words = (b"SCAN", cursor, b"MATCH", pattern, b"COUNT", _SCAN)
                with self._asked():
                    cursor, names = pool.ask(self._limit(int(_SCAN)), *words)
                yield names
                if cursor == b"0":
                    break

    def _looked_at(self, names: Sequence[bytes]) -> list[StoredRecord]:
        found: dict[int, StoredRecord] = {}
        now = time.time()

        def operation(stream: Stream, positions: Sequence[int]) -> None:
            here = [names[position] for position in positions]
            _do_not_touch(stream)
            asked = [each_command(b"GETRANGE", here, b"0", b"%d" % (HEADER_BYTES - 1))]
            asked.append(each_command(b"STRLEN", here))
            asked += [command(b"OBJECT", b"IDLETIME", name) for name in here]
            stream.send(asked)
            fronts = [_bulk(stream) for _ in here]
            sizes = [_number(stream) for _ in here]
            ages = [_number(stream) for _ in here]
            for position, name, front, size, idle in zip(
                positions, here, fronts, sizes, ages, strict=True
            ):
                used = None if idle is None else now - idle
                found[position] = self._listed(name, front or b"", size or 0, used)

        self._dispatch(names, "reads", operation, self._limit(len(names)))
        return [found[position] for position in sorted(found)]

    def _listed(self, name: bytes, front: bytes, size: int, used: float | None) -> StoredRecord:
        key = name[len(self._prefix) :]
        order = -math.inf if used is None else used
        payload = _payload_bytes(key, front, size)
        return StoredRecord(name, digest(key), key[:NAMESPACE_BYTES], payload, size, used, order)

    def read(self, some: Sequence[StoredRecord], use: Use = ignore) -> list[Finding]:
        findings = self._read(some, use)
        odd = [place for place, finding in enumerate(findings) if finding is _OTHER_LENGTH]
        if odd:  # stored anew by another codec, perhaps, since it was listed
            now = self._looked_at([some[place].name for place in odd])
            for place, finding in zip(odd, self._read(now, use), strict=True):
                findings[place] = finding
        return findings

    def _read(self, some: Sequence[StoredRecord], use: Use) -> list[Finding]:
        findings = [GONE] * len(some)

        def operation(stream: Stream, positions: Sequence[int]) -> None:
            here = [position for position in positions if findings[position] is GONE]

            def on_value(at: int, record: Record | None) -> None:
                findings[here[at]] = self._check(some[here[at]].name, record, use)

            _do_not_touch(stream)
            asked = [some[at].name for at in here]
            memory = [memoryview(bytearray(max(0, some[at].size - HEADER_BYTES))) for at in here]
            if here:
                pipeline.load(stream, asked, memory, on_value, self._window)

        names = [record.name for record in some]
        size = sum(record.size for record in some)
        self._dispatch(names, "reads", operation, self._limit(len(names), size))
        return findings

    def _check(self, name: bytes, record: Record | None, use: Use) -> Finding:
        if record is None:
            return _OTHER_LENGTH
        try:
            header = parse_header(record.header)
            if self._prefix + header.key != name:
                raise RecordError("the record belongs to another key")
            verify(header, record.stored)
        except RecordError as error:
            return Finding("damaged", str(error))
        use(header, memoryview(record.stored))
        return WHOLE

    def drop_damaged(self, some: Sequence[StoredRecord]) -> int:
        read = zip(some, self.read(some), strict=True)
        return self._unlink([one.name for one, found in read if found.state == "damaged"])

    def drop(self, some: Sequence[StoredRecord]) -> None:
        self._unlink([record.name for record in some])

    def _unlink(self, names: Sequence[bytes]) -> int:
        return sum(self._ask(names, "writes", read_integer, b"UNLINK").values())

    def others(self) -> bool | None:
        """A server's other clients may be engines, and may be none."""
        return None

    def notes(self) -> Mapping[bytes, bytes]:
        found: dict[bytes, bytes] = {}
        for names in self._scan(self._prefix + _NOTES):
            for position, text in self._ask(names, "reads", _bulk, b"GET").items():
                with suppress(ValueError):  # a mark's, or of somebody else
                    space = bytes.fromhex(names[position][len(self._prefix + _NOTES) :].decode())
                    found.update({space: text} if text else {})
        return found

    def note(self, namespace: bytes, text: bytes) -> None:
        names = [self._prefix + _NOTES + namespace.hex().encode()]
        if text:
            self._ask(names, "writes", read_status, b"SET", text, *self._ttl)
        else:
            self._ask(names, "writes", read_integer, b"UNLINK")

    def mark(self, names: Sequence[bytes]) -> None:
        keys = self._mark_names(names)
        self._ask(keys, "writes", read_status, b"SET", b"1", b"PX", _MARK_MS)

    def marked(self, names: Sequence[bytes]) -> list[bool]:
        found = self._ask(self._mark_names(names), "reads", read_integer, b"EXISTS")
        return [found.get(position, 0) > 0 for position in range(len(names))]

    def _mark_names(self, names: Sequence[bytes]) -> list[bytes]:
        return [self._prefix + _NOTES + _MARKS + name.hex().encode() for name in names]

    def _ask(
        self,
        names: Sequence[bytes],
        kind: Kind,
        read: Callable[[Stream], T],
        verb: bytes,
        *after: bytes,
    ) -> dict[int, T]:
        """Send `verb name *after` for each name. Returns what `read` makes of each answer, by the
        name's position; those of nodes that are down are left out."""
        found: dict[int, T] = {}

        def operation(stream: Stream, positions: Sequence[int]) -> None:
            here = [names[position] for position in positions]
            stream.send([each_command(verb, here, *after)])
            for position in positions:
                found[position] = read(stream)

        self._dispatch(names, kind, operation, self._limit(len(names)))
        return found


def _do_not_touch(stream: Stream) -> None:
    stream.send([command(b"CLIENT", b"NO-TOUCH", b"ON")])
    with suppress(ServerError):  # an older server, or one whose rules forbid it
        read_status(stream)


def _payload_bytes(key: bytes, front: bytes, size: int) -> int:
    """The length of a value's payload as its header says, or about, where that is damaged; 0: it is
    none of our records, of this format, or one of a tier whose key prefix begins with ours."""
    if not NAMESPACE_BYTES < len(key) <= MAX_KEY_BYTES:
        return 0
    try:
        header = parse_header(front)
        return 0 if key.endswith(b":" + header.key) else header.payload_bytes
    except OtherFormat:
        return 0
    except RecordError:
        like_ours = sum(map(eq, front, MAGIC)) >= len(MAGIC) - 1
        return max(1, size - HEADER_BYTES) if like_ours else 0


def _bulk(stream: Stream) -> bytes | None:
    try:
        length = read_length(stream, HEADER_BYTES)
    except ServerError as error:
        if error.code not in ("WRONGTYPE", "ASK"):
            raise
        return None
    if length < 0:
        return None
    text = stream.take(length)
    stream.line()
    return text


def _number(stream: Stream) -> int | None:
    """An integer; None: there is none, or the server keeps none."""
    line: Any = stream.line()
    return int(line[1:]) if line[:1] == b":" else None
