"""A Cluster: names by hash slot, over masters of which some may be down."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import get_args

from redis.crc import key_slot
from redis.exceptions import ConnectionError as Unreachable

from tiers.breaker import Breaker, Call
from tiers.remote.places import FAILURES, Kind, Work
from tiers.remote.pools import Pool, Pools, Way, reason
from tiers.remote.resp import Reply, ServerError
from tiers.remote.stream import Deadline
from tiers.remote.url import Endpoint

SLOTS = 16384
"""Hash slots of every Cluster."""

RETRY_AFTER = 1.0
"""Seconds a node that failed is left alone at first; doubled by every trial that fails."""

RETRY_AFTER_MAX = 8.0
"""Seconds a node is left alone at most: a trial of one that hangs holds up a verb for half its
time, and a failover is noticed by the next trial."""

_log = logging.getLogger(__name__)


class Node:
    """A master, and whether it is left alone: one that takes no writes may still serve reads."""

    def __init__(self, endpoint: Endpoint, pool: Pool, timeout: float) -> None:
        self.endpoint = endpoint
        self.pool = pool
        self.breakers: dict[Kind, Breaker] = {
            kind: Breaker(RETRY_AFTER, RETRY_AFTER_MAX, timeout, time.monotonic)
            for kind in get_args(Kind)
        }

    def serves(self, kind: Kind) -> bool:
        """Whether it did when it was last asked."""
        return self.breakers[kind].is_closed


class Cluster:
    """Names by hash slot, over the masters of a Cluster, whose map any of its nodes knows.

    Where a node can't be reached, its names are passed over while another node serves, and it is
    left alone for a while; each such change is logged. `timeout`, in seconds, is that of a verb.
    """

    def __init__(self, way: Way, timeout: float) -> None:
        self._url = way.url
        self._timeout = timeout
        self._pools = Pools(way)
        self._nodes: dict[Endpoint, Node] = {}
        self._map: list[Node | None] | None = None

    def visit(self, names: Sequence[bytes], kind: Kind, work: Work, deadline: Deadline) -> None:
        """Do the work at each master concerned, once more for names that moved meanwhile.

        Raises where no node serves work of this kind any more, and where nobody has the map.
        """
        served: list[Node | None] = []
        failures: list[Exception] = []
        left = list(range(len(names)))
        for _ in range(2):
            served = self._map or self._learn(deadline)
            visits = _at_nodes(served, names, left)
            left = self._go_round(visits, kind, work, deadline, failures)
            if not left:
                break
            self._map = None
        if not any(node.serves(kind) for node in {*served} if node is not None):
            raise failures[-1] if failures else Unreachable("no node of the cluster serves")

    def close(self) -> None:
        """Close every connection."""
        self._pools.close()

    def _go_round(
        self,
        visits: dict[Node, list[int]],
        kind: Kind,
        work: Work,
        deadline: Deadline,
        failures: list[Exception],
    ) -> list[int]:
        """Visit each node, those that are down last; the positions of names that moved."""
        moved: list[int] = []
        for node in sorted(visits, key=lambda node: not node.serves(kind)):
            if deadline.is_over:  # that says nothing about those that were not asked
                break
            call = node.breakers[kind].enter()
            if call is None:
                continue
            try:
                # One that hangs leaves time for the others, and for the second half of a put.
                with node.pool.taken(deadline.half()) as stream:
                    work(stream, visits[node])
            except FAILURES as error:
                if not (isinstance(error, ServerError) and error.code == "MOVED"):
                    failures.append(error)
                    self._failed(node, kind, call, error)
                    continue
                moved += visits[node]
            if node.breakers[kind].succeeded(call):
                _log.warning("%s: node %s: %s are up again", self._url, node.endpoint, kind)
        return moved

    def _failed(self, node: Node, kind: Kind, call: Call, error: Exception) -> None:
        self._map = None  # its slots may have a new master
        if node.breakers[kind].failed(call):
            _log.warning(
                "%s: node %s: %s are down (%s); the other nodes go on",
                self._url,
                node.endpoint,
                kind,
                reason(error),
            )

    def _learn(self, deadline: Deadline) -> list[Node | None]:
        """The map, from the first node that answers: those that serve, then the URL's."""
        failure: Exception = Unreachable("no node of the cluster answers")
        up = [node.endpoint for node in list(self._nodes.values()) if node.serves("reads")]
        for endpoint in dict.fromkeys((*up, *self._url.endpoints, *list(self._nodes))):
            try:
                reply = self._pools.at(endpoint).ask(deadline.half(), b"CLUSTER", b"SLOTS")
                served = _endpoints(reply, endpoint.host)
            except FAILURES as error:
                failure = error
                continue
            nodes = {each: self._node(each) for each in {*served} if each is not None}
            self._map = learnt = [None if each is None else nodes[each] for each in served]
            return learnt
        raise failure

    def _node(self, endpoint: Endpoint) -> Node:
        made = Node(endpoint, self._pools.at(endpoint), self._timeout)
        return self._nodes.setdefault(endpoint, made)


def _at_nodes(
    served: Sequence[Node | None], names: Sequence[bytes], positions: Sequence[int]
) -> dict[Node, list[int]]:
    """The positions by the node that serves their names; some are served by nobody."""
    visits: dict[Node, list[int]] = {}
    for position in positions:
        node = served[key_slot(names[position])]
        if node is not None:
            visits.setdefault(node, []).append(position)
    return visits


def _endpoints(reply: Reply, asked: str) -> list[Endpoint | None]:
    """The master of each slot; a node that does not know its own address is the one asked."""
    served: list[Endpoint | None] = [None] * SLOTS
    for entry in reply if isinstance(reply, list) else [None]:
        match entry:
            case [int(first), int(last), [bytes() | None as host, int(port), *_], *_] if (
                0 <= first <= last < SLOTS
            ):
                name = host.decode(errors="replace") if host else asked
                served[first : last + 1] = [Endpoint(name, port)] * (last + 1 - first)
            case _:
                raise Unreachable("the cluster's map can't be read")
    return served
