"""Which server has a name: the only one there is, or the master that Sentinel names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from redis.exceptions import ConnectionError as Unreachable
from redis.exceptions import RedisError

from tiers.remote.pools import Pool, Pools, Way, reason
from tiers.remote.resp import Reply, ServerError
from tiers.remote.stream import Deadline, Stream
from tiers.remote.url import Endpoint

Work = Callable[[Stream, list[int]], None]
"""What to do on a connection to a place, for the names at these positions."""

Kind = Literal["reads", "writes"]
"""What work does at a server; one that refuses the one may do the other."""

FAILURES = (RedisError, ServerError, OSError)
"""What speaking with a server raises."""


class Places(Protocol):
    """The servers of a URL, and what has to be known to find a name's. Thread-safe."""

    def visit(self, names: Sequence[bytes], kind: Kind, work: Work, deadline: Deadline) -> None:
        """Do the work at each place that has some of the names, until the deadline.

        Raises RedisError, ServerError or OSError where nothing was reached.
        """
        ...

    def close(self) -> None:
        """Close every connection. Idempotent."""
        ...


class OneServer:
    """All names in one place."""

    def __init__(self, way: Way) -> None:
        self._pool = Pool(way)

    def visit(self, names: Sequence[bytes], kind: Kind, work: Work, deadline: Deadline) -> None:
        """Do all the work here."""
        with self._pool.taken(deadline) as stream:
            work(stream, list(range(len(names))))

    def close(self) -> None:
        """Close every connection."""
        self._pool.close()


class Sentinels:
    """All names at the master that the first sentinel to answer names; any failure makes them be
    asked again before the next visit."""

    def __init__(self, way: Way, service: str) -> None:
        self._service = service
        self._endpoints = tuple(dict.fromkeys(way.url.endpoints))
        self._sentinels = Pools(way.to_sentinels())
        self._masters = Pools(way)
        self._master: Pool | None = None

    def visit(self, names: Sequence[bytes], kind: Kind, work: Work, deadline: Deadline) -> None:
        """Do all the work at the master."""
        master = self._master or self._find(deadline)
        try:
            with master.taken(deadline) as stream:
                work(stream, list(range(len(names))))
        except FAILURES:
            self._master = None
            raise

    def close(self) -> None:
        """Close every connection."""
        self._sentinels.close()
        self._masters.close()

    def _find(self, deadline: Deadline) -> Pool:
        why = "they know none of that name"
        for endpoint in self._endpoints:
            # One that hangs leaves time for those behind it.
            share = deadline if endpoint == self._endpoints[-1] else deadline.half()
            try:
                named = self._ask(self._sentinels.at(endpoint), share)
            except FAILURES as error:
                why = reason(error)
                continue
            if named is not None:
                self._master = self._masters.at(named)
                return self._master
        raise Unreachable(f"no sentinel names a master of {self._service!r} ({why})")

    def _ask(self, sentinel: Pool, deadline: Deadline) -> Endpoint | None:
        question = (b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", self._service.encode())
        return _endpoint(sentinel.ask(deadline, *question))


def _endpoint(reply: Reply) -> Endpoint | None:
    match reply:
        case None:
            return None
        case [bytes(host), bytes(port)] if port.isdigit():
            return Endpoint(host.decode(errors="replace"), int(port))
    raise Unreachable("a sentinel's answer can't be read")
