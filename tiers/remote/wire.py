"""Wire: the few commands the remote tier needs, over redis-py's connections, errors translated.

redis-py connects and authenticates; commands and replies then travel on the sockets of its
connections, where values need no copy and a whole verb has one deadline.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from tiers.errors import TierUnavailable
from tiers.remote import bulk
from tiers.remote.bulk import Arrived, Record, Wanted
from tiers.remote.cluster import Cluster
from tiers.remote.places import FAILURES, Kind, OneServer, Places, Sentinels, Work
from tiers.remote.pools import Way, reason
from tiers.remote.resp import ServerError, command, read_integer
from tiers.remote.stream import Deadline, Stream
from tiers.remote.window import Window

SLOWEST = 32 << 20
"""Bytes a second that a verb which moves values is given time for, beside the timeout: half of
what a gigabit link carries. Computing a block again is faster than a link below it."""

EACH = 0.01
"""Seconds that a verb is given for each name, beside the timeout: an engine's thread that is busy
with Python keeps ours waiting for 5 ms at a time."""


class Wire:
    """Speaks to the server or servers of a URL; thread-safe, and a forked child connects anew.

    What is asked ends at its deadline, however many servers it takes; connecting is included, and
    only a name server that is silent can make it longer. A connection found dead when it is taken
    is made anew once, and names that moved within a cluster are looked for once more; nothing else
    is tried again. A connection on which anything but whole replies was read is closed. Every
    method raises TierUnavailable when no server can be asked; while some nodes of a cluster can,
    names of the others are as if they had no value and took none.
    """

    def __init__(self, way: Way, timeout: float, ttl: float | None) -> None:
        self._url = way.url
        self._timeout = timeout
        self._ttl_ms = None if ttl is None else b"%d" % max(1, round(ttl * 1000))
        self._places = _places(way, timeout)
        self._window = Window()

    def limit(self, names: int, num_bytes: int = 0) -> Deadline:
        """The deadline of a verb that begins now and moves at most that many bytes."""
        return Deadline(self._timeout + EACH * names + num_bytes / SLOWEST)

    def exists(self, names: Sequence[bytes], deadline: Deadline) -> list[bool]:
        """Whether each name has a value, in one round trip."""
        return self._ask(names, "reads", lambda name: command(b"EXISTS", name), deadline)

    def refresh(self, names: Sequence[bytes], deadline: Deadline) -> list[bool]:
        """As `exists`, and what exists lives for the whole ttl again."""
        ttl = self._ttl_ms
        if ttl is None:
            return self.exists(names, deadline)
        return self._ask(names, "writes", lambda name: command(b"PEXPIRE", name, ttl), deadline)

    def delete(self, names: Sequence[bytes], deadline: Deadline) -> None:
        """Forget these names; the server frees their memory in its own time."""
        self._ask(names, "writes", lambda name: command(b"UNLINK", name), deadline)

    def store(
        self, names: Sequence[bytes], record: Callable[[int], Record], deadline: Deadline
    ) -> list[bool]:
        """Keep what `record` makes for each position; False for what was refused."""
        stored = [False] * len(names)
        expiry = () if self._ttl_ms is None else (b"PX", self._ttl_ms)

        def work(stream: Stream, positions: list[int]) -> None:
            here = [names[position] for position in positions]
            done = bulk.store(stream, here, lambda at: record(positions[at]), expiry, self._window)
            for position, answer in zip(positions, done, strict=True):
                stored[position] = answer

        self._visit(names, "writes", work, deadline)
        return stored

    def load(self, wanted: Sequence[Wanted], arrived: Arrived, deadline: Deadline) -> None:
        """Load values into the memory of those who want them; `arrived` is told of each there is.

        What is no string, or longer than was wanted, arrives as None.
        """

        def work(stream: Stream, positions: list[int]) -> None:
            here = [wanted[position] for position in positions]
            bulk.load(stream, here, lambda at, got: arrived(positions[at], got), self._window)

        self._visit([want.name for want in wanted], "reads", work, deadline)

    def close(self) -> None:
        """Close every connection. Idempotent."""
        self._places.close()

    def _ask(
        self, names: Sequence[bytes], kind: Kind, make: Callable[[bytes], bytes], deadline: Deadline
    ) -> list[bool]:
        answers = [False] * len(names)

        def work(stream: Stream, positions: list[int]) -> None:
            commands = b"".join(make(names[position]) for position in positions)
            began = time.monotonic()
            stream.send([commands])
            answers[positions[0]] = _answer(stream)
            self._window.answered(time.monotonic() - began)
            for position in positions[1:]:
                answers[position] = _answer(stream)

        self._visit(names, kind, work, deadline)
        return answers

    def _visit(self, names: Sequence[bytes], kind: Kind, work: Work, deadline: Deadline) -> None:
        if not names:
            return
        try:
            self._places.visit(names, kind, work, deadline)
        except FAILURES as error:
            # Not chained: a traceback would print what the server said, which `reason` does not.
            raise TierUnavailable(f"{self._url}: {reason(error)}") from None


def _places(way: Way, timeout: float) -> Places:
    if way.url.is_cluster:
        return Cluster(way, timeout)
    return OneServer(way) if way.url.service is None else Sentinels(way, way.url.service)


def _answer(stream: Stream) -> bool:
    try:
        return bool(read_integer(stream))
    except ServerError as error:
        if error.code != "ASK":  # in a slot that is moving, what already moved is not looked for
            raise
        return False
