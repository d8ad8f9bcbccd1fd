"""A change of the chain while its engine runs, as a worker sees it: see `ChangeOrder`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from spec.errors import reason_of
from spec.offloading import OffloadingSpec
from tiers.concurrency.executors import IoExecutor
from tiers.connector.multi.multi_connector import MultiConnector
from tiers.contract.changes import ChangeOrder, ChangeReport
from tiers.contract.connector import WorkerConnector, do_nothing
from tiers.contract.messages import TransferResults


@dataclass(frozen=True)
class ChangeParts:
    """What a worker's half of a chain needs to change. `make`: makes a tier that is not open.
    `release`: gives up a tier's part of what all tiers share."""

    rank: int
    make: Callable[[OffloadingSpec], Any]
    release: Callable[[], None]


@dataclass
class _Prepared:
    order: ChangeOrder
    resized: Sequence[Any]
    resize: Future[str] | None = None
    attach: dict[int, Any] = field(default_factory=dict)


class WorkerChanges:
    """Follows the scheduler's orders, on the engine's thread, which never waits for them."""

    def __init__(self, half: MultiConnector[Any], parts: ChangeParts) -> None:
        self._half, self._parts = half, parts
        self._followed: object = None
        self._prepared: _Prepared | None = None
        self._is_reported = False
        self._detaching: dict[int, Future[None]] = {}
        self._given_back: Future[None] | None = None
        # One thread: what a change was refused for is given back before the next one takes any.
        self._resizer = IoExecutor(1, "resize")
        self._closer = IoExecutor(1, "detach")

    def follow(self, orders: Sequence[ChangeOrder]) -> None:
        """Do what a step orders, before anything else in it; it may be called twice for a step."""
        if orders is self._followed:
            return
        self._followed = orders
        for order in orders:
            if order.phase == "prepare":
                self._prepare(order)
            elif order.phase == "commit":
                self._commit(order)
            elif order.phase == "abort":
                self._abort()
            else:
                for place in order.closed:
                    self._detach(place)

    def _prepare(self, order: ChangeOrder) -> None:
        self._is_reported = False
        retuned = [(self._half.children[place], tier) for place, tier in order.retune.items()]
        resized = {child: tier for child, tier in retuned if child.capacity != tier.capacity_bytes}
        self._prepared = prepared = _Prepared(order, [*resized])

        def prepare_all() -> str:
            reasons = ((child.tier, child.prepare_resize(tier)) for child, tier in resized.items())
            return next((f"tier {name}: {why}" for name, why in reasons if why), "")

        if resized:
            prepared.resize = self._resizer.submit(prepare_all)

    def _commit(self, order: ChangeOrder) -> None:
        prepared, self._prepared = self._prepared, None
        for place, child in prepared.attach.items() if prepared is not None else ():
            before = self._half.children[place:]
            self._half.put_child(place, child.tier, child)
            if before:
                before[0].shutdown()  # it stood in for the tier, and has nothing
        for place, tier in order.retune.items():
            self._half.children[place].retune(tier)

    def _abort(self) -> None:
        prepared, self._prepared = self._prepared, None
        for child in prepared.attach.values() if prepared is not None else ():
            self._given_back = self._closer.submit(child.detach)
            self._parts.release()
        for child in prepared.resized if prepared is not None else ():
            # Behind what is being prepared, which may take its time.
            self._resizer.submit(child.abort_resize)

    def _detach(self, place: int) -> None:
        child = self._half.children[place]
        name = self._half.names[place]
        self._half.put_child(place, name, AbsentWorker(self._parts.release))
        self._detaching[place] = self._closer.submit(child.detach)

    def report(self) -> ChangeReport | None:
        """What this rank has done since the last report; None: nothing."""
        report, rank = ChangeReport(), self._parts.rank
        prepared = self._prepared
        if prepared is not None and not self._is_reported:
            why = self._outcome(prepared)
            if why is not None:
                self._is_reported = True
                report.prepared[prepared.order.number] = {rank: why}
                if not why:
                    report.handshakes = {
                        place: [child.get_handshake_metadata()]
                        for place, child in prepared.attach.items()
                    }
        for place in [place for place, closed in self._detaching.items() if closed.done()]:
            del self._detaching[place]
            report.detached[place] = {rank}
        return report if report.prepared or report.detached else None

    def _outcome(self, prepared: _Prepared) -> str | None:
        """Why this rank can't; empty: it is ready; None: not known yet. What was refused before is
        closed first: it may have the folder of a tier open, with other settings."""
        attach, closed = prepared.order.attach, self._given_back
        if attach and closed is not None and not closed.done():
            return None
        if not prepared.attach:
            try:
                for place, tier in attach.items():
                    made = prepared.attach[place] = self._parts.make(tier)
                    made.open_beside()
            except (RuntimeError, OSError) as error:  # no thread or memory can be had
                return reason_of(error)
        reasons: list[str | None] = []
        for child in prepared.attach.values():
            why = child.opened()
            reasons.append(why and f"tier {child.tier}: {why}")
        if prepared.resize is not None:
            reasons.append(_result(prepared.resize))
        refused = next((why for why in reasons if why), None)
        return refused or (None if None in reasons else "")

    def close(self) -> None:
        """The engine ends: close what was prepared."""
        self._abort()
        self._resizer.shutdown(wait=False)
        self._closer.shutdown(wait=False)


def _result(future: Future[str]) -> str | None:
    if not future.done():
        return None
    error = future.exception()
    return future.result() if error is None else reason_of(error)


class AbsentWorker(WorkerConnector):
    """Stands at the place of a tier that was detached: it moves nothing."""

    register_kv_caches = handle_preemptions = start_load_kv = wait_for_save = do_nothing
    build_connector_worker_meta = do_nothing

    def __init__(self, release: Callable[[], None]) -> None:
        self._release = release

    def get_transfer_results(self, finished_req_ids: set[str]) -> TransferResults:
        return TransferResults()

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set()

    def shutdown(self) -> None:
        """Give up the tier's part of the host memory, which closes with the last one."""
        self._release()
