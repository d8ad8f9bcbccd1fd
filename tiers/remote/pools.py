"""Pools of connections, which redis-py makes, greets and keeps; nothing is tried again by it."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, NamedTuple

import redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError
from redis.retry import Retry

from tiers.remote.resp import Reply, command, read_reply
from tiers.remote.stream import Deadline, Stream
from tiers.remote.url import Endpoint, RedisUrl

LEAST_WAIT = 0.001
"""Seconds for each further address of a host when the time is over: enough to be refused."""


class Way(NamedTuple):
    """How to get to the servers of a URL: its user and password, and TLS unless None."""

    url: RedisUrl
    tls: ssl.SSLContext | None

    def to_sentinels(self) -> Way:
        """The way without what is meant for the servers alone."""
        return self._replace(url=replace(self.url, username=None, password=None, db=0))


class Pool:
    """Connections to one server; an endpoint of None means the URL's own. Connects to nothing.

    Thread-safe; a forked child makes connections of its own.
    """

    def __init__(self, way: Way, endpoint: Endpoint | None = None) -> None:
        self._turn = _Turn()
        self._pool = redis.ConnectionPool(turn=self._turn, **_options(way, endpoint))

    @contextmanager
    def taken(self, deadline: Deadline) -> Iterator[Stream]:
        """A connection for as long as the block lasts; closed unless every reply to it was read.

        The deadline is for connecting and greeting, too, and longer only where a name server is
        silent. Raises RedisError or OSError.
        """
        self._turn.deadline = deadline
        connection: Any = self._pool.get_connection()
        is_clean = False
        try:
            stream = Stream(connection._sock, deadline)
            yield stream
            is_clean = stream.is_drained
        finally:
            if not is_clean:
                connection.disconnect()
            self._pool.release(connection)

    def ask(self, deadline: Deadline, *words: bytes) -> Reply:
        """What the server answers to a small command."""
        with self.taken(deadline) as stream:
            stream.send([command(*words)])
            return read_reply(stream)

    def close(self) -> None:
        """Close every connection. Idempotent."""
        self._pool.disconnect()


class Pools:
    """A pool for each of several endpoints, made when it is first asked for. Thread-safe."""

    def __init__(self, way: Way) -> None:
        self._way = way
        self._pools: dict[Endpoint, Pool] = {}
        # Without it two threads could open two pools for a node, and one would never be closed.
        self._lock = threading.Lock()

    def at(self, endpoint: Endpoint) -> Pool:
        """The endpoint's pool."""
        with self._lock:
            if endpoint not in self._pools:
                self._pools[endpoint] = Pool(self._way, endpoint)
            return self._pools[endpoint]

    def close(self) -> None:
        """Close every connection."""
        with self._lock:
            for pool in self._pools.values():
                pool.close()


def reason(error: Exception) -> str:
    """What an error says, as far as it may be shown."""
    text = str(error)
    # A server may quote the AUTH it did not understand, password and all.
    if isinstance(error, AuthenticationError) or "AUTH" in text:
        return "the server refused the user or password"
    return text or type(error).__name__


class _Turn(threading.local):
    """The deadline of the verb this thread is in, for the connections that are made in it."""

    deadline = Deadline(0)


class _Bounded:
    """Mixed into a connection: connecting and greeting end with the verb, however slow they are."""

    _sock: Any
    host: str

    def __init__(self, *, turn: _Turn, tls: ssl.SSLContext | None = None, **options: Any) -> None:
        self._turn = turn
        self._tls = tls
        super().__init__(**options)

    @property
    def socket_connect_timeout(self) -> float:
        """What is left, whenever redis-py asks: it does for each address of the host."""
        deadline = self._turn.deadline
        return LEAST_WAIT if deadline.is_over else deadline.left()

    @socket_connect_timeout.setter
    def socket_connect_timeout(self, _: float) -> None:
        pass

    def connect(self) -> None:
        if self._sock is None:
            left = self.socket_timeout = self._turn.deadline.left()
            with _cut_off(self, left):
                super().connect()  # type: ignore[misc]

    def _connect(self) -> socket.socket:
        plain: socket.socket = super()._connect()  # type: ignore[misc]
        return plain if self._tls is None else self._wrapped(plain, self._tls)

    def _wrapped(self, plain: socket.socket, tls: ssl.SSLContext) -> socket.socket:
        try:
            plain.settimeout(self.socket_connect_timeout)  # of the whole handshake
            return tls.wrap_socket(plain, server_hostname=self.host)
        except OSError as error:
            plain.close()
            raise OSError(_why_no_tls(error)) from None


def _why_no_tls(error: OSError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted: {error.verify_message}"
    # A server without TLS waits for what it takes for a line to end.
    late = isinstance(error, TimeoutError)
    why = "the handshake is not answered" if late else getattr(error, "reason", None) or error
    return f"no TLS with this server: {why}"


class _OverTcp(_Bounded, redis.Connection):  # type: ignore[misc]
    pass


class _OverUnixSocket(_Bounded, redis.UnixDomainSocketConnection):  # type: ignore[misc]
    pass


@contextmanager
def _cut_off(connection: Any, seconds: float) -> Iterator[None]:
    """Shut the connection's socket down when the time is over, whatever it is waiting for.

    redis-py bounds each wait, and a server that drips its replies makes it wait any number of
    times.
    """
    done = threading.Event()

    def watch() -> None:
        wait = seconds
        while not done.wait(wait):  # there may be no socket yet
            wait = 0.05
            connected = connection._sock
            if connected is not None:
                with suppress(OSError):
                    # Not that of SSLSocket, which also forgets TLS: a thread that is about to send
                    # would then send in the clear.
                    socket.socket.shutdown(connected, socket.SHUT_RDWR)

    watcher = threading.Thread(target=watch, name="kvtiers-cut-off", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()


def _options(way: Way, endpoint: Endpoint | None) -> dict[str, Any]:
    url = way.url
    shared = {
        "db": url.db,
        "username": url.username,
        "password": url.password.get_secret_value() if url.password else None,
        "health_check_interval": 0,
        "protocol": 2,
        # The pool itself replaces a connection it finds dead; a retry would only add waits.
        "retry": Retry(NoBackoff(), 0),
    }
    if url.path is not None:
        return shared | {"connection_class": _OverUnixSocket, "path": url.path}
    host, port = endpoint or url.endpoints[0]
    # Keepalive notices a peer that vanished while the connection was idle.
    over_tcp = {"connection_class": _OverTcp, "socket_keepalive": True, "tls": way.tls}
    return shared | over_tcp | {"host": host, "port": port}
