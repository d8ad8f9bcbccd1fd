"""Pools of connections, which redis-py makes, greets and keeps; nothing is tried again by it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import redis
import redis.sentinel
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.sentinel import SentinelManagedConnection

from tiers.remote.url import Endpoint, RedisUrl

Pool = redis.ConnectionPool


def open_pool(url: RedisUrl, timeout: float, endpoint: Endpoint | None = None) -> Pool:
    """A pool for the URL's server, or for another endpoint of its cluster. Connects to nothing.

    `timeout`, in seconds, is for connecting, and again for the greeting with all its replies. A
    forked child makes connections of its own.
    """
    options = _options(url, timeout)
    if url.path is not None:
        return Pool(connection_class=_OverUnixSocket, path=url.path, **options)
    # Keepalive notices a peer that vanished while the connection was idle.
    options["socket_keepalive"] = True
    if url.service is not None:
        return _sentinel_pool(url, timeout, options)
    host, port = endpoint or url.endpoints[0]
    return Pool(connection_class=_OverTcp, host=host, port=port, **options)


def socket_of(connection: Any) -> socket.socket:
    """The socket of a connection taken from a pool."""
    connected = connection._sock
    assert isinstance(connected, socket.socket)
    return connected


@contextmanager
def cut_off(connection: Any, seconds: float) -> Iterator[None]:
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
                    connected.shutdown(socket.SHUT_RDWR)

    watcher = threading.Thread(target=watch, name="kvtiers-cut-off", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()


class _Bounded:
    """Mixed into a connection: connecting and greeting end, however slowly the server answers."""

    _sock: Any
    socket_connect_timeout: Any

    def connect(self) -> None:
        if self._sock is None:
            with cut_off(self, 2 * self.socket_connect_timeout):
                super().connect()  # type: ignore[misc]


class _OverTcp(_Bounded, redis.Connection):
    pass


class _OverUnixSocket(_Bounded, redis.UnixDomainSocketConnection):
    pass


class _ToTheMaster(_Bounded, SentinelManagedConnection):
    pass


def _options(url: RedisUrl, timeout: float) -> dict[str, Any]:
    return {
        "db": url.db,
        "username": url.username,
        "password": url.password.get_secret_value() if url.password else None,
        "socket_timeout": timeout,
        "socket_connect_timeout": timeout,
        "health_check_interval": 0,
        "protocol": 2,
        # The pool itself replaces a connection it finds dead; a retry would only add waits.
        "retry": Retry(NoBackoff(), 0),
    }


def _sentinel_pool(url: RedisUrl, timeout: float, options: dict[str, Any]) -> Pool:
    asking = {
        name: options[name]
        for name in ("socket_timeout", "socket_connect_timeout", "protocol", "retry")
    }
    untyped: Any = redis.sentinel
    sentinels = untyped.Sentinel(list(url.endpoints), sentinel_kwargs=asking)
    made: Pool = untyped.SentinelConnectionPool(
        url.service, sentinels, connection_class=_ToTheMaster, **options
    )
    return made
