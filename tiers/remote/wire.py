"""Wire: the few commands the remote tier needs, over redis-py, and its errors translated.

Nothing else knows that redis-py exists. `store` takes a value in parts and `load` answers value
by value, so that values can travel on plain sockets without a change above. Protocol 2: it needs
no greeting, works with every server, and nothing of protocol 3 is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import redis
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    OutOfMemoryError,
    RedisError,
    ResponseError,
)
from redis.retry import Retry

from tiers.block import Buffer
from tiers.errors import TierError, TierUnavailable
from tiers.remote.url import RedisUrl


class Value(NamedTuple):
    """What is kept under a name: a header and the bytes behind it."""

    name: bytes
    header: bytes
    stored: Buffer


class Wire:
    """A pool of connections to one server; thread-safe, and a forked child makes its own.

    `timeout` in seconds bounds connecting and every single wait for the server. A connection
    found dead (the server was restarted) is made anew once; nothing else is tried again.
    Every method raises TierUnavailable when the server can't be asked.
    """

    def __init__(self, url: RedisUrl, timeout: float, ttl: float | None) -> None:
        self._url = url
        self._ttl_ms = None if ttl is None else max(1, round(ttl * 1000))
        self._pool = _pool(url, timeout)
        self._client: Any = redis.Redis(connection_pool=self._pool)

    def exists(self, names: Sequence[bytes]) -> list[bool]:
        """Whether each name has a value, in one round trip."""
        return [bool(reply) for reply in self._ask([("EXISTS", name) for name in names])]

    def refresh(self, names: Sequence[bytes]) -> list[bool]:
        """As `exists`, and what exists lives for the whole ttl again."""
        if self._ttl_ms is None:
            return self.exists(names)
        commands = [("PEXPIRE", name, self._ttl_ms) for name in names]
        return [bool(reply) for reply in self._ask(commands)]

    def store(self, values: Sequence[Value]) -> list[bool]:
        """Keep the values; False for those the server has no memory for."""
        expiry = () if self._ttl_ms is None else ("PX", self._ttl_ms)
        commands = [("SET", v.name, b"".join((v.header, v.stored)), *expiry) for v in values]
        replies = self._ask(commands, tolerate=OutOfMemoryError)
        return [not isinstance(reply, ResponseError) for reply in replies]

    def load(self, names: Sequence[bytes]) -> list[bytes | None]:
        """The values, None where there is none; what is no string loads as the empty value."""
        replies = self._ask([("GET", name) for name in names], tolerate=ResponseError)
        return [self._value(reply) for reply in replies]

    def _value(self, reply: Any) -> bytes | None:
        if isinstance(reply, ResponseError):
            if not str(reply).startswith("WRONGTYPE"):
                raise self._translate(reply)
            return b""
        assert reply is None or isinstance(reply, bytes)
        return reply

    def delete(self, names: Sequence[bytes]) -> None:
        """Forget these names; the server frees their memory in its own time."""
        self._ask([("UNLINK", name) for name in names])

    def close(self) -> None:
        """Close every connection. Idempotent."""
        self._pool.disconnect()

    def _ask(
        self, commands: Sequence[tuple[Any, ...]], tolerate: type[ResponseError] | None = None
    ) -> list[Any]:
        """Send commands in one pipeline; replies in order, tolerated errors among them."""
        with self._translated(), self._client.pipeline(transaction=False) as pipe:
            for command in commands:
                pipe.execute_command(*command)
            replies: list[Any] = pipe.execute(raise_on_error=False)
        for reply in replies:
            if isinstance(reply, ResponseError) and not (tolerate and isinstance(reply, tolerate)):
                raise self._translate(reply)
        return replies

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (RedisError, OSError) as error:
            # Not chained: a server may quote the AUTH it did not understand, password and all,
            # and a traceback would print that.
            raise self._translate(error) from None

    def _translate(self, error: RedisError | OSError) -> TierError:
        text = str(error)
        if isinstance(error, AuthenticationError) or "AUTH" in text:
            text = "the server refused the user or password"
        return TierUnavailable(f"{self._url}: {text or type(error).__name__}")


def _pool(url: RedisUrl, timeout: float) -> redis.ConnectionPool:
    options: dict[str, Any] = {
        "db": url.db,
        "username": url.username,
        "password": url.password.get_secret_value() if url.password else None,
        "socket_timeout": timeout,
        "socket_connect_timeout": timeout,
        "socket_read_size": 1 << 20,
        "health_check_interval": 0,
        "protocol": 2,
        # The pool itself replaces a connection it finds dead; a retry would only add waits.
        "retry": Retry(NoBackoff(), 0),
    }
    if url.path is not None:
        return redis.ConnectionPool(
            connection_class=redis.UnixDomainSocketConnection, path=url.path, **options
        )
    # Keepalive notices a peer that vanished while the connection was idle.
    return redis.ConnectionPool(host=url.host, port=url.port, socket_keepalive=True, **options)
