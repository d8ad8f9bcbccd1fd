"""Which server has a name: one, the master that Sentinel names, or a Cluster's by hash slot."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Protocol

from redis.crc import key_slot
from redis.exceptions import ConnectionError as Unreachable
from redis.exceptions import RedisError

from tiers.remote.pools import Pool, cut_off, open_pool
from tiers.remote.url import Endpoint, RedisUrl

SLOTS = 16384
"""Hash slots of every Cluster."""


class Places(Protocol):
    """Pools, by the names that live behind them. Thread-safe."""

    def split(self, names: Sequence[bytes]) -> list[tuple[Pool, list[int]]]:
        """The pools to ask, each with the positions of its names. It may ask the servers."""
        ...

    def forget(self) -> None:
        """Something failed: learn anew where names are before the next is asked for."""
        ...

    def close(self) -> None:
        """Close every connection. Idempotent."""
        ...


def open_places(url: RedisUrl, timeout: float) -> Places:
    """The places of a URL. Connects to nothing."""
    return Cluster(url, timeout) if url.is_cluster else OneServer(url, timeout)


class OneServer:
    """All names in one place."""

    def __init__(self, url: RedisUrl, timeout: float) -> None:
        self._pool = open_pool(url, timeout)
        self._may_move = url.service is not None

    def split(self, names: Sequence[bytes]) -> list[tuple[Pool, list[int]]]:
        """Everything to the one pool."""
        return [(self._pool, list(range(len(names))))] if names else []

    def forget(self) -> None:
        """Under Sentinel, drop the connections that may lead to the master of yesterday."""
        if self._may_move:
            self._pool.disconnect(inuse_connections=False)

    def close(self) -> None:
        """Close every connection."""
        self._pool.disconnect()


class Cluster:
    """Names by hash slot, over the masters of a Cluster, whose map any of its nodes knows."""

    def __init__(self, url: RedisUrl, timeout: float) -> None:
        self._url = url
        self._timeout = timeout
        self._map: list[Endpoint | None] | None = None
        self._pools: dict[Endpoint, Pool] = {}
        # Without it two threads could open two pools for a node, and one would never be closed.
        self._lock = threading.Lock()

    def split(self, names: Sequence[bytes]) -> list[tuple[Pool, list[int]]]:
        """One pool for each master concerned. Raises Unreachable where a slot has none."""
        served = self._map or self._learn()
        positions: dict[Endpoint, list[int]] = {}
        for position, name in enumerate(names):
            slot = key_slot(name)
            endpoint = served[slot]
            if endpoint is None:
                raise Unreachable(f"no node of the cluster serves slot {slot}")
            positions.setdefault(endpoint, []).append(position)
        return [(self._pool(endpoint), those) for endpoint, those in positions.items()]

    def forget(self) -> None:
        """Ask for the map again before the next name."""
        self._map = None

    def close(self) -> None:
        """Close every connection."""
        with self._lock:
            for pool in self._pools.values():
                pool.disconnect()

    def _pool(self, endpoint: Endpoint) -> Pool:
        with self._lock:
            if endpoint not in self._pools:
                self._pools[endpoint] = open_pool(self._url, self._timeout, endpoint)
            return self._pools[endpoint]

    def _learn(self) -> list[Endpoint | None]:
        """The map, from the first node that answers: those of the URL, then those met since."""
        failure: Exception = Unreachable("no node of the cluster answers")
        for endpoint in dict.fromkeys((*self._url.endpoints, *list(self._pools))):
            try:
                learnt = _slots(self._ask(endpoint), endpoint[0])
            except (RedisError, OSError) as error:
                failure = error
                continue
            self._map = learnt
            return learnt
        raise failure

    def _ask(self, endpoint: Endpoint) -> Any:
        pool = self._pool(endpoint)
        connection: Any = pool.get_connection()
        try:
            with cut_off(connection, self._timeout):
                connection.send_command("CLUSTER", "SLOTS")
                return connection.read_response()
        except BaseException:
            connection.disconnect()
            raise
        finally:
            pool.release(connection)


def _slots(reply: Any, asked: str) -> list[Endpoint | None]:
    """The master of each slot; a node that does not know its own address is the one asked."""
    served: list[Endpoint | None] = [None] * SLOTS
    try:
        for first, last, master, *_ in reply:
            host = master[0].decode() if master[0] else asked
            served[int(first) : int(last) + 1] = [Endpoint(host, int(master[1]))] * (
                last - first + 1
            )
    except (TypeError, ValueError, AttributeError, IndexError):
        raise Unreachable("the cluster's map can't be read") from None
    if len(served) != SLOTS:
        raise Unreachable("the cluster's map has other slots than a cluster")
    return served
