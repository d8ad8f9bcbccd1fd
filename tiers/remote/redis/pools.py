"""Pools of connections. redis-py makes, greets and keeps them; it never retries."""

from __future__ import annotations

import io
import re
import socket
import ssl
import threading
from collections.abc import Iterator, Set
from contextlib import contextmanager
from typing import Any, NamedTuple

import redis
from redis._parsers import _RESP2Parser
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError
from redis.retry import Retry

from tiers.remote.deadline import Deadline
from tiers.remote.redis.stream import Stream
from tiers.remote.redis.url import Endpoint, RedisUrl

LEAST_WAIT = 0.001
"""Seconds for each further address of a host once the time is over: enough to be refused."""

REPLY_BYTES = 4 << 20
"""Most bytes of a reply that redis-py reads: a Cluster's map of 16,384 pairs takes 3 MB."""

_REFUSAL = re.compile(r"certificate|_ssl\.c|reset by peer|Broken pipe|closed")
"""Is in errors about a server's certificate, and of a server that refuses ours or just hangs up."""


class ConnectionSettings(NamedTuple):
    """How to connect to the servers of a URL, which holds user and password. `tls`: None: plain."""

    url: RedisUrl
    tls: ssl.SSLContext | None


class Pool:
    """Connections to one server: `endpoint`, or the URL's own. Making a pool connects to nothing.

    Thread-safe; a forked child makes connections of its own.
    """

    def __init__(self, settings: ConnectionSettings, endpoint: Endpoint | None = None) -> None:
        self._current = _CurrentDeadline()
        self._pool = redis.ConnectionPool(current=self._current, **_options(settings, endpoint))

    @contextmanager
    def borrow(self, deadline: Deadline) -> Iterator[Stream]:
        """Borrow a connection for the body; it is closed unless every reply on it was read.

        The deadline includes connecting and greeting; only a silent name server can exceed it.
        Raises RedisError or OSError.
        """
        with self._connected(deadline) as connection:
            stream = Stream(connection._sock, deadline)
            yield stream
            if not stream.is_drained:
                connection.disconnect()

    def ask(self, deadline: Deadline, *words: bytes) -> Any:
        """Send a small command and return the reply, which redis-py reads. Raises RedisError or
        OSError."""
        with self._connected(deadline) as connection:
            connection._sock.settimeout(deadline.left())
            connection.send_command(*words)
            return connection.read_response()

    def certificate(self, deadline: Deadline) -> Any:
        """The server's certificate, as `ssl` shows it; empty: it is not verified, or there is none.
        Raises RedisError or OSError."""
        with self._connected(deadline) as connection:
            connected = connection._sock
            return connected.getpeercert() if isinstance(connected, ssl.SSLSocket) else {}

    @contextmanager
    def _connected(self, deadline: Deadline) -> Iterator[Any]:
        """Borrow a connection for the body; it is closed if the body raises."""
        self._current.deadline = deadline
        connection: Any = self._pool.get_connection()
        try:
            yield connection
        except BaseException:
            connection.disconnect()
            raise
        finally:
            self._pool.release(connection)

    def close(self, in_use: bool = True) -> None:
        self._pool.disconnect(inuse_connections=in_use)


class Pools:
    """A pool for each endpoint, made at its first use. Thread-safe."""

    def __init__(self, settings: ConnectionSettings) -> None:
        self._settings = settings
        self._pools: dict[Endpoint | None, Pool] = {}
        # Without it two threads could make two pools for a node, and one would never be closed.
        self._lock = threading.Lock()

    def at(self, endpoint: Endpoint | None) -> Pool:
        """The endpoint's pool; None: that of the URL's own server."""
        with self._lock:
            if endpoint not in self._pools:
                self._pools[endpoint] = Pool(self._settings, endpoint)
            return self._pools[endpoint]

    def keep(self, endpoints: Set[Endpoint]) -> None:
        """Drop the pools of all others, with their connections; those in use close when they are
        not needed any more."""
        with self._lock:
            for other in self._pools.keys() - endpoints:
                self._pools.pop(other).close(in_use=False)

    def close(self) -> None:
        with self._lock:
            for pool in self._pools.values():
                pool.close()


def reason(error: Exception) -> str:
    """Return an error's text, without what may hold a password."""
    # A server may quote the AUTH it did not understand, password and all.
    if _is_refused(error):
        return "the server refused the user or password"
    return str(error) or type(error).__name__


def is_of_files(error: Exception) -> bool:
    """Return whether one side did not take the other's password or certificate: files of ours may
    have changed since they were read."""
    return _is_refused(error) or _REFUSAL.search(str(error)) is not None


def _is_refused(error: Exception) -> bool:
    return isinstance(error, AuthenticationError) or "AUTH" in str(error)


class _CurrentDeadline(threading.local):
    """The deadline of the verb that this thread runs, for connections made meanwhile."""

    deadline = Deadline(0)


class _Bounded:
    """Mixed into a connection: connects until the verb's deadline."""

    _sock: Any
    host: str

    def __init__(
        self, *, current: _CurrentDeadline, tls: ssl.SSLContext | None = None, **options: Any
    ) -> None:
        self._current = current
        self._tls = tls
        super().__init__(**options)

    @property
    def socket_connect_timeout(self) -> float:
        """Seconds left; redis-py asks for each address of the host."""
        deadline = self._current.deadline
        return LEAST_WAIT if deadline.is_over else deadline.left()

    @socket_connect_timeout.setter
    def socket_connect_timeout(self, _: float) -> None:
        pass

    def _connect(self) -> socket.socket:
        plain: socket.socket = super()._connect()  # type: ignore[misc]
        if self._tls is None:
            return plain
        try:
            plain.settimeout(self.socket_connect_timeout)  # of the whole handshake
            return self._tls.wrap_socket(plain, server_hostname=self.host)
        except OSError as error:
            plain.close()
            raise OSError(_why_no_tls(error)) from None


def _why_no_tls(error: OSError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted: {error.verify_message}"
    # A server without TLS takes the handshake for a line, and waits for its end.
    late = isinstance(error, TimeoutError)
    why = "the handshake is not answered" if late else getattr(error, "reason", None) or error
    return f"no TLS with this server: {why}"


class _Received(io.BytesIO):
    """What redis-py has received of a reply, which a server may drip, and make as long as it likes:
    bounds its bytes, and the wait for each further one. redis-py bounds each wait alone."""

    def __init__(self, connected: socket.socket, current: _CurrentDeadline) -> None:
        super().__init__()
        self._connected, self._current = connected, current

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > REPLY_BYTES:
            raise redis.ConnectionError(f"a reply of more than {REPLY_BYTES} bytes")
        self._connected.settimeout(self._current.deadline.left())
        return super().write(data)


class _Parser(_RESP2Parser):
    def on_connect(self, connection: Any) -> None:
        super().on_connect(connection)  # type: ignore[no-untyped-call]
        connection._sock.settimeout(connection.socket_connect_timeout)  # of the greeting, too
        connection._parser._buffer._buffer = _Received(connection._sock, connection._current)


class _OverTcp(_Bounded, redis.Connection):  # type: ignore[misc]
    pass


class _OverUnixSocket(_Bounded, redis.UnixDomainSocketConnection):  # type: ignore[misc]
    pass


def _options(settings: ConnectionSettings, endpoint: Endpoint | None) -> dict[str, Any]:
    url = settings.url
    shared = {
        "db": url.db,
        "username": url.username,
        "password": url.password.get_secret_value() if url.password else None,
        "health_check_interval": 0,
        "protocol": 2,
        "parser_class": _Parser,
        # The pool replaces a connection that it finds dead; retries would only add waits.
        "retry": Retry(NoBackoff(), 0),
    }
    if url.path is not None:
        return shared | {"connection_class": _OverUnixSocket, "path": url.path}
    host, port = endpoint or url.endpoints[0]
    # Keepalive notices a peer that vanished while the connection was idle.
    over_tcp = {"connection_class": _OverTcp, "socket_keepalive": True, "tls": settings.tls}
    return shared | over_tcp | {"host": host, "port": port}
