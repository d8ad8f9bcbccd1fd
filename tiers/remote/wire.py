"""Wire: the few commands the remote tier needs, over redis-py's connections, errors translated.

redis-py connects and authenticates; commands and replies then travel on the sockets of its
connections, where values need no copy and a whole verb has one deadline.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from redis.exceptions import AuthenticationError, RedisError
from redis.sentinel import MasterNotFoundError

from tiers.errors import TierUnavailable
from tiers.remote import bulk
from tiers.remote.bulk import Arrived, Record, Wanted
from tiers.remote.places import open_places
from tiers.remote.pools import Pool, socket_of
from tiers.remote.resp import ServerError, command, read_integer
from tiers.remote.stream import Deadline, Stream
from tiers.remote.url import RedisUrl
from tiers.remote.window import Window

SLOWEST = 32 << 20
"""Bytes a second that a verb which moves values is given time for, beside the timeout: half of
what a gigabit link carries. Computing a block again is faster than a link below it."""

EACH = 0.01
"""Seconds that a verb is given for each name, beside the timeout: an engine's thread that is busy
with Python keeps ours waiting for 5 ms at a time."""

Work = Callable[[Stream, list[int]], None]


class Wire:
    """Speaks to the server or servers of a URL; thread-safe, and a forked child connects anew.

    A verb ends after `timeout` seconds and a moment more for each name (`EACH`) and each byte of a
    value (`SLOWEST`);
    connecting to a server it needs may take twice the timeout, and longer only where a name server
    is silent. A connection found dead when it is taken is made anew once, and names that moved
    within a cluster are looked for once more; nothing else is tried again. A connection on which
    anything but whole replies was read is closed. Every method raises TierUnavailable when the
    server can't be asked.
    """

    def __init__(self, url: RedisUrl, timeout: float, ttl: float | None) -> None:
        self._url = url
        self._timeout = timeout
        self._ttl_ms = None if ttl is None else b"%d" % max(1, round(ttl * 1000))
        self._places = open_places(url, timeout)
        self._window = Window()

    def exists(self, names: Sequence[bytes]) -> list[bool]:
        """Whether each name has a value, in one round trip."""
        return self._ask(names, lambda name: command(b"EXISTS", name))

    def refresh(self, names: Sequence[bytes]) -> list[bool]:
        """As `exists`, and what exists lives for the whole ttl again."""
        ttl = self._ttl_ms
        if ttl is None:
            return self.exists(names)
        return self._ask(names, lambda name: command(b"PEXPIRE", name, ttl))

    def delete(self, names: Sequence[bytes]) -> None:
        """Forget these names; the server frees their memory in its own time."""
        self._ask(names, lambda name: command(b"UNLINK", name))

    def store(
        self, names: Sequence[bytes], record: Callable[[int], Record], payload_bytes: int
    ) -> list[bool]:
        """Keep what `record` makes for each position; False for what the server refused.

        `payload_bytes`: the most a record has behind its header.
        """
        stored = [False] * len(names)
        expiry = () if self._ttl_ms is None else (b"PX", self._ttl_ms)

        def work(stream: Stream, positions: list[int]) -> None:
            here = [names[position] for position in positions]
            done = bulk.store(stream, here, lambda at: record(positions[at]), expiry, self._window)
            for position, answer in zip(positions, done, strict=True):
                stored[position] = answer

        self._visit(names, work, len(names) * payload_bytes)
        return stored

    def load(self, wanted: Sequence[Wanted], arrived: Arrived) -> None:
        """Load values into the memory of those who want them; `arrived` is told of each there is.

        What is no string, or longer than was wanted, arrives as None.
        """

        def work(stream: Stream, positions: list[int]) -> None:
            here = [wanted[position] for position in positions]
            bulk.load(stream, here, lambda at, got: arrived(positions[at], got), self._window)

        payloads = sum(len(want.payload) for want in wanted)
        self._visit([want.name for want in wanted], work, payloads)

    def close(self) -> None:
        """Close every connection. Idempotent."""
        self._places.close()

    def _ask(self, names: Sequence[bytes], make: Callable[[bytes], bytes]) -> list[bool]:
        answers = [False] * len(names)

        def work(stream: Stream, positions: list[int]) -> None:
            commands = b"".join(make(names[position]) for position in positions)
            began = time.monotonic()
            stream.send([commands])
            answers[positions[0]] = _answer(stream)
            self._window.answered(time.monotonic() - began)
            for position in positions[1:]:
                answers[position] = _answer(stream)

        self._visit(names, work)
        return answers

    def _visit(self, names: Sequence[bytes], work: Work, num_bytes: int = 0) -> None:
        """Do the work on a connection to each place that has some of the names."""
        deadline = Deadline(self._timeout + EACH * len(names) + num_bytes / SLOWEST)
        with self._translated():
            try:
                self._visit_once(names, work, deadline)
            except ServerError as error:
                if error.code != "MOVED":
                    raise
                self._places.forget()
                self._visit_once(names, work, deadline)

    def _visit_once(self, names: Sequence[bytes], work: Work, deadline: Deadline) -> None:
        for pool, positions in self._places.split(names):
            with _taken(pool, deadline) as stream:
                work(stream, positions)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (RedisError, ServerError, OSError) as error:
            self._places.forget()
            # Not chained: a server may quote the AUTH it did not understand, password and all,
            # and a traceback would print that.
            raise self._translate(error) from None

    def _translate(self, error: Exception) -> TierUnavailable:
        text = str(error)
        if isinstance(error, AuthenticationError) or "AUTH" in text:
            text = "the server refused the user or password"
        elif isinstance(error, MasterNotFoundError):  # its own text is a page of settings
            text = f"no sentinel names a master of {self._url.service!r}"
        return TierUnavailable(f"{self._url}: {text or type(error).__name__}")


@contextmanager
def _taken(pool: Pool, deadline: Deadline) -> Iterator[Stream]:
    """A connection for as long as the block lasts; closed unless every reply to it was read."""
    connection: Any = pool.get_connection()
    is_clean = False
    try:
        stream = Stream(socket_of(connection), deadline)
        yield stream
        is_clean = stream.is_drained
    finally:
        if not is_clean:
            connection.disconnect()
        pool.release(connection)


def _answer(stream: Stream) -> bool:
    try:
        return bool(read_integer(stream))
    except ServerError as error:
        if error.code != "ASK":  # in a slot that is moving, what already moved is not looked for
            raise
        return False
