"""MultiConnector: what both halves of a chain have, and the messages between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Generic, TypeVar

from tiers.contract.changes import ChangeOrder, ChangeReport
from tiers.contract.connector import Connector
from tiers.contract.stats import TierStats
from tiers.contract.weight_reports import WeightOrders, WeightReport

C = TypeVar("C", bound=Connector)
T = TypeVar("T")


class MultiConnector(Connector, Generic[C]):
    """Several connectors, in load-priority order, behind the contract of one.

    A child that raises never keeps the others from being called; its error is raised
    afterwards, since only the engine knows what an unfinished load means.
    """

    def __init__(
        self, children: Sequence[C], names: Sequence[str] | None = None, chain: str = ""
    ) -> None:
        """`names`: of the children, unique; None: their places. `chain`: differs between chains of
        one engine."""
        self.children = tuple(children)
        self.names = tuple(names or map(str, range(len(self.children))))
        self._chain = chain

    def put_child(self, place: int, name: str, child: C) -> None:
        """Have this child at a place, which may be the next one, from now on. Places last as long
        as the engine runs: plans and notes of requests, and messages in flight, name them."""
        children, names = list(self.children), list(self.names)
        children[place : place + 1] = [child]
        names[place : place + 1] = [name]
        self.children, self.names = tuple(children), tuple(names)

    def for_each(self, call: Callable[..., object], *parts: Iterable[Any]) -> None:
        """Call for every child in order, with its entry of each of `parts`, also when one raises.

        Then raises the last of the errors, with the earlier ones as its context.
        """
        _call_all(call, iter([*zip(self.children, *parts, strict=True)]))

    def shutdown(self) -> None:
        """Shut every child down, also when one raises; then raise."""
        self.for_each(lambda child: child.shutdown())

    def get_kv_connector_stats(self) -> Any:
        """All tiers' counters, by tier name, as `TierStats`."""
        stats = [s for s in self.stats_by_child().values() if isinstance(s, TierStats)]
        if not stats:
            return None
        total = TierStats()
        for counted in stats:
            total.aggregate(counted)
        return total

    def stats_by_child(self) -> dict[str, Any]:
        """What each child counted since the last call, in its own form, by the child's name."""
        stats = {
            name: child.get_kv_connector_stats()
            for name, child in zip(self.names, self.children, strict=True)
        }
        return {name: one for name, one in stats.items() if one is not None}


def _call_all(call: Callable[..., object], arguments: Iterator[tuple[Any, ...]]) -> None:
    try:
        for of_child in arguments:
            call(*of_child)
    finally:
        # What a call raises within `finally` keeps the error before as its context.
        if left := [*arguments]:
            _call_all(call, iter(left))


def merge_parameters(params: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Transfer parameters of two tiers. Raises RuntimeError if both set one."""
    clash = params.keys() & more.keys()
    if clash:
        keys = ", ".join(sorted(clash))
        raise RuntimeError(f"several tiers set the transfer parameter {keys}")
    return params | more


@dataclass
class MultiConnectorMetadata:
    """One step's orders.

    `extra_async_saves`: requests that more than one child is saving, and how many more. `step`: the
    number under which the scheduler measures how long the step takes; None: it does not. `weights`:
    orders for looks at the weights. `changes`: of the chain, which come before all else. `pieces`:
    requests that several connectors begin to load, and the paged blocks of each, by its place.
    `names`: of the children that the orders are for. `heard`: of each rank, the numbers of the last
    reports that came; one before them that is not among them was lost.
    """

    metadata: tuple[Any, ...]
    extra_async_saves: dict[str, int]
    step: int | None = None
    weights: WeightOrders = WeightOrders()  # noqa: RUF009 - it is a constant
    changes: tuple[ChangeOrder, ...] = ()
    pieces: dict[str, dict[int, list[int]]] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    heard: Mapping[int, Set[int]] = field(default_factory=dict)


@dataclass
class MultiWorkerMetadata:
    """What the children of one worker finished, the number of the step that is over, what was
    seen of the weights, and what was done of changes. `reports`: of each rank that may have to send
    it again, its number, and those of earlier ones that it does not know to be heard."""

    metadata: tuple[Any, ...]
    step: int | None = None
    weights: WeightReport | None = None
    changes: ChangeReport | None = None
    reports: dict[int, tuple[int, Set[int]]] = field(default_factory=dict)

    def aggregate(self, other: MultiWorkerMetadata) -> MultiWorkerMetadata:
        """Both ranks' metadata, child by child. One of before tiers came has no part for them."""
        pairs = zip_longest(self.metadata, other.metadata)
        return MultiWorkerMetadata(
            tuple(_both(a, b, lambda one, more: one.aggregate(more)) for a, b in pairs),
            self.step,
            _both(self.weights, other.weights, WeightReport.fold),
            _both(self.changes, other.changes, ChangeReport.fold),
            self.reports | other.reports,
        )


def _both(one: T | None, other: T | None, fold: Callable[[T, T], T]) -> T | None:
    """Two ranks' parts of a report as one; a rank may have none."""
    if one is None or other is None:
        return other if one is None else one
    return fold(one, other)


@dataclass(frozen=True)
class MultiHandshakeMetadata:
    """The handshakes of one worker's children.

    `chain`: an engine's own MultiConnector gives the handshake of its first child to all of them,
    so the children of another chain must ignore it.
    """

    metadata: tuple[Any, ...]
    chain: str = ""
