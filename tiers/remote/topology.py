"""Topology: which server has a name. Here the only one, or the master that a Sentinel names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from redis.exceptions import ConnectionError as Unreachable
from redis.exceptions import RedisError

from tiers.remote.pools import ConnectionSettings, Pool, Pools, reason
from tiers.remote.resp import Reply, ServerError
from tiers.remote.stream import Deadline, Stream
from tiers.remote.url import Endpoint

Operation = Callable[[Stream, Sequence[int]], None]
"""Called with a connection to a server, and the positions of the names it has: a range if all."""

Kind = Literal["reads", "writes"]
"""What an operation does at a server; a server that refuses one kind may do the other."""

FAILURES = (RedisError, ServerError, OSError)
"""Raised by connecting to a server and by operations."""


class Topology(Protocol):
    """The servers of a URL, and which of them has a name. Thread-safe."""

    def dispatch(
        self, names: Sequence[bytes], kind: Kind, operation: Operation, deadline: Deadline
    ) -> None:
        """Run `operation` at each server that has some of the names, until the deadline. Raises
        RedisError, ServerError or OSError if no server could be reached."""

    def close(self) -> None:
        """Close every connection. Idempotent."""


class OneServer:
    """All names are at one server."""

    def __init__(self, settings: ConnectionSettings) -> None:
        self._pool = Pool(settings)

    def dispatch(
        self, names: Sequence[bytes], kind: Kind, operation: Operation, deadline: Deadline
    ) -> None:
        with self._pool.borrow(deadline) as stream:
            operation(stream, range(len(names)))

    def close(self) -> None:
        self._pool.close()


class Sentinels:
    """All names are at the master that the first sentinel to answer names. After any failure the
    sentinels are asked again."""

    def __init__(self, settings: ConnectionSettings, service: str) -> None:
        self._service = service
        self._endpoints = tuple(dict.fromkeys(settings.url.endpoints))
        self._sentinels = Pools(settings.to_sentinels())
        self._masters = Pools(settings)
        self._master: Pool | None = None

    def dispatch(
        self, names: Sequence[bytes], kind: Kind, operation: Operation, deadline: Deadline
    ) -> None:
        master = self._master or self._find(deadline)
        try:
            with master.borrow(deadline) as stream:
                operation(stream, range(len(names)))
        except FAILURES:
            self._master = None
            raise

    def close(self) -> None:
        self._sentinels.close()
        self._masters.close()

    def _find(self, deadline: Deadline) -> Pool:
        why = "they know none of that name"
        for endpoint in self._endpoints:
            # Half of the time: a sentinel that hangs leaves some for the next ones.
            limit = deadline if endpoint == self._endpoints[-1] else deadline.half()
            try:
                question = (b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", self._service.encode())
                named = _endpoint(self._sentinels.at(endpoint).ask(limit, *question))
            except FAILURES as error:
                why = reason(error)
                continue
            if named is not None:
                self._master = self._masters.at(named)
                return self._master
        raise Unreachable(f"no sentinel names a master of {self._service!r} ({why})")


def _endpoint(reply: Reply) -> Endpoint | None:
    match reply:
        case None:
            return None
        case [bytes(host), bytes(port)] if port.isdigit():
            return Endpoint(host.decode(errors="replace"), int(port))
    raise Unreachable("a sentinel's answer can't be read")
