"""Topology: which server has a name: the only one, the master that a Sentinel names, or one of the
masters of a Cluster, of which some may be down."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

from redis.crc import key_slot
from redis.exceptions import ConnectionError as Unreachable
from redis.exceptions import RedisError

from tiers.breaker import Breaker, Call
from tiers.remote.deadline import Deadline
from tiers.remote.redis.pools import ConnectionSettings, Pool, Pools, reason
from tiers.remote.redis.stream import ServerError, Stream
from tiers.remote.redis.url import Endpoint
from tiers.store import time_left

Operation = Callable[[Stream, Sequence[int]], None]
"""Called with a connection to a server, and the positions of the names it has: a range if all."""

Kind = Literal["reads", "writes"]
"""What an operation does at a server; a server that refuses one kind may do the other."""

FAILURES = (RedisError, ServerError, OSError, ValueError, OverflowError, RecursionError)
"""Raised by connecting to a server and by operations; the last ones by redis-py, for a reply that
is none."""


class OneMaster:
    """All names are at one server: that of the URL, or the master that the first sentinel to answer
    names. After any failure the sentinels are asked again. Thread-safe."""

    def __init__(self, settings: ConnectionSettings) -> None:
        self._url = settings.url
        self._service = settings.url.service
        self._endpoints = tuple(dict.fromkeys(settings.url.endpoints))
        # User, password and db are the servers' own.
        url = replace(settings.url, username=None, password=None, db=0)
        self._sentinels = Pools(settings._replace(url=url))
        self._masters = Pools(settings)
        self._master: Pool | None = None

    def dispatch(
        self, names: Sequence[bytes], kind: Kind, operation: Operation, deadline: Deadline
    ) -> None:
        """Run `operation` at the server, until the deadline. Raises an error of FAILURES if it
        can't be reached."""
        if (master := self._master) is None:  # another thread may forget it at any time
            master = self._master = self._find(deadline)
        try:
            with master.borrow(deadline) as stream:
                operation(stream, range(len(names)))
        except FAILURES:
            if time_left():  # else nobody waits for it any more, which shows nothing of the master
                self._master = None
            raise

    def masters(self, deadline: Deadline) -> tuple[dict[str, Pool], int]:
        """The master, by its place, and how many hash slots nobody has: none. Raises an error of
        FAILURES."""
        return {str(self._url): self._master or self._find(deadline)}, 0

    def close(self) -> None:
        self._sentinels.close()
        self._masters.close()

    def _find(self, deadline: Deadline) -> Pool:
        if self._service is None:
            return self._masters.at(None)
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
                self._masters.keep({named})
                return self._masters.at(named)
        raise Unreachable(f"no sentinel names a master of {self._service!r} ({why})")


def _endpoint(reply: Any) -> Endpoint | None:
    match reply:
        case None:
            return None
        case [bytes(host), bytes(port)] if port.isdigit():
            return Endpoint(host.decode(errors="replace"), int(port))
    raise Unreachable("a sentinel's answer can't be read")


SLOTS = 16384
"""Hash slots of every Cluster."""

RETRY_AFTER = 1.0
"""Seconds until a failed node is tried again; doubled by each trial that fails."""

RETRY_AFTER_MAX = 8.0
"""Most seconds between trials. A trial of a node that hangs delays a verb by half of its time; a
failover is noticed by the next trial."""

logger = logging.getLogger(__name__)


class Node:
    """A master, with a breaker for each kind: one that refuses writes may still serve reads."""

    def __init__(self, endpoint: Endpoint, pool: Pool, timeout: float) -> None:
        self.endpoint = endpoint
        self.pool = pool
        self.breakers: dict[Kind, Breaker] = {
            kind: Breaker(RETRY_AFTER, RETRY_AFTER_MAX, timeout, time.monotonic)
            for kind in get_args(Kind)
        }

    def serves(self, kind: Kind) -> bool:
        """Whether the last operation of this kind worked."""
        return self.breakers[kind].is_closed


class Cluster:
    """Masters that share the hash slots; any node knows the map.

    A node that fails is left alone for a while, and its names are skipped while another node
    serves; each such change is logged. `timeout`: of a verb, in seconds. Thread-safe.
    """

    def __init__(self, settings: ConnectionSettings, timeout: float) -> None:
        self._url = settings.url
        self._timeout = timeout
        self._pools = Pools(settings)
        self._nodes: dict[Endpoint, Node] = {}
        self._map: list[Node | None] | None = None

    def dispatch(
        self, names: Sequence[bytes], kind: Kind, operation: Operation, deadline: Deadline
    ) -> None:
        """Run `operation` at each master of the names, and once more for names that moved.

        Raises if no node serves this kind any more, or no node answers with the map.
        """
        served: list[Node | None] = []
        failures: list[Exception] = []
        left = list(range(len(names)))
        for _ in range(2):
            served = self._map or self._learn(deadline)
            batches = _at_nodes(served, names, left)
            left = self._go_round(batches, kind, operation, deadline, failures)
            if not left:
                break
            self._map = None
        if not any(node.serves(kind) for node in {*served} if node is not None):
            raise failures[-1] if failures else Unreachable("no node of the cluster serves")

    def masters(self, deadline: Deadline) -> tuple[dict[str, Pool], int]:
        """The masters, by their places, and how many hash slots nobody has. Raises an error of
        FAILURES."""
        served = self._map or self._learn(deadline)
        nodes = [node for node in dict.fromkeys(served) if node is not None]
        return {str(node.endpoint): node.pool for node in nodes}, served.count(None)

    def close(self) -> None:
        self._pools.close()

    def _go_round(
        self,
        batches: dict[Node, list[int]],
        kind: Kind,
        operation: Operation,
        deadline: Deadline,
        failures: list[Exception],
    ) -> list[int]:
        """Run `operation` at each node, failed ones last; return positions of moved names."""
        moved: list[int] = []
        for node in sorted(batches, key=lambda node: not node.serves(kind)):
            if deadline.is_over:  # which shows nothing of the nodes not asked
                break
            call = node.breakers[kind].enter()
            if call is None:
                continue
            try:
                # Half of the time: a node that hangs leaves some for the others.
                with node.pool.borrow(deadline.half()) as stream:
                    operation(stream, batches[node])
            except FAILURES as error:
                if not (isinstance(error, ServerError) and error.code == "MOVED"):
                    failures.append(error)
                    self._failed(node, kind, call, error)
                    continue
                moved += batches[node]
            except BaseException:
                node.breakers[kind].leave(call)
                raise
            if node.breakers[kind].succeeded(call):
                logger.info("%s: node %s: %s are up again", self._url, node.endpoint, kind)
        return moved

    def _failed(self, node: Node, kind: Kind, call: Call, error: Exception) -> None:
        breaker = node.breakers[kind]
        if time_left():
            self._map = None  # its slots may have a new master
            opened = breaker.failed(call)
        else:  # nobody waits for it any more
            opened = breaker.given_up(call)
        if opened:
            logger.warning(
                "%s: node %s: %s are down (%s); the other nodes serve on",
                self._url,
                node.endpoint,
                kind,
                reason(error),
            )

    def _learn(self, deadline: Deadline) -> list[Node | None]:
        """Ask for the map: nodes that serve first, then those of the URL, then all others."""
        failure: Exception = Unreachable("no node of the cluster answers")
        up = [node.endpoint for node in list(self._nodes.values()) if node.serves("reads")]
        for endpoint in dict.fromkeys((*up, *self._url.endpoints, *list(self._nodes))):
            try:
                reply = self._pools.at(endpoint).ask(deadline.half(), b"CLUSTER", b"SLOTS")
                served = _endpoints(reply, endpoint.host)
            except FAILURES as error:
                failure = error
                continue
            there = set(filter(None, served))
            if not there:  # it was reset, or has not joined yet
                failure = Unreachable(f"{endpoint} knows no node of the cluster")
                continue
            # Those that left are forgotten, else each map would be asked of all of them first.
            before = self._nodes
            self._nodes = nodes = {
                each: before.get(each) or Node(each, self._pools.at(each), self._timeout)
                for each in there
            }
            self._pools.keep(there.union(self._url.endpoints))
            self._map = learnt = [None if each is None else nodes[each] for each in served]
            return learnt
        raise failure


def open_topology(settings: ConnectionSettings, timeout: float) -> OneMaster | Cluster:
    """The topology of a URL; `timeout`: of a verb, in seconds. Connects to nothing."""
    return Cluster(settings, timeout) if settings.url.is_cluster else OneMaster(settings)


def _at_nodes(
    served: Sequence[Node | None], names: Sequence[bytes], positions: Sequence[int]
) -> dict[Node, list[int]]:
    """Group the positions by the node that serves their names; omit names that no node serves."""
    batches: dict[Node, list[int]] = {}
    for position in positions:
        if (node := served[key_slot(names[position])]) is not None:
            batches.setdefault(node, []).append(position)
    return batches


def _endpoints(reply: Any, asked: str) -> list[Endpoint | None]:
    """Parse the map: each slot's master. A node that does not know its own address is `asked`."""
    served: list[Endpoint | None] = [None] * SLOTS
    for entry in reply if isinstance(reply, list) else [None]:
        match entry:
            case [int(first), int(last), [bytes() | None as host, int(port), *_], *_] if (
                0 <= first <= last < SLOTS
            ):
                name = host.decode(errors="replace") if host else asked
                served[first : last + 1] = [Endpoint(name, port)] * (last + 1 - first)
            case _:
                raise Unreachable("the answer to CLUSTER SLOTS can't be read")
    return served
