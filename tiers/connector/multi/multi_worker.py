"""MultiWorker: a chain's children on a worker, each of which does its part of the step."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tiers.connector.multi.multi_connector import (
    MultiConnector,
    MultiConnectorMetadata,
    MultiHandshakeMetadata,
    MultiWorkerMetadata,
)
from tiers.connector.multi.worker_changes import ChangeParts, WorkerChanges
from tiers.contract.connector import WorkerConnector
from tiers.contract.messages import OffloadingConnectorMetadata, TransferResults
from tiers.contract.weight_reports import Watch

_Report = tuple[TransferResults, set[int], MultiWorkerMetadata]


class MultiWorker(MultiConnector[WorkerConnector], WorkerConnector):
    """Calls every child, with its orders; a request's transfer ends with its last child's."""

    def __init__(
        self,
        children: Sequence[WorkerConnector],
        names: Sequence[str] | None = None,
        chain: str = "",
        watch: Watch | None = None,
        parts: ChangeParts | None = None,
    ) -> None:
        """`names` and `chain`: see `MultiConnector`. `watch`: that of the children's weights; None:
        they keep no blocks. `parts`: with which the chain changes; None: it does not."""
        MultiConnector.__init__(self, children, names, chain)
        self._watch = watch or Watch()
        self._chain_changes = None if parts is None else WorkerChanges(self, parts)
        self._hears_layers = any(map(_hears_layers, self.children))
        self._saves_awaited: dict[str, Awaited] = {}
        self._loads_awaited: dict[str, Awaited] = {}
        self._failed_blocks: set[int] = set()
        # A list reports again for its chain, too: it has taken in what ended there.
        inner = [child for child in self.children if isinstance(child, MultiWorker)]
        ranks = [child._rank for child in inner] if parts is None else [parts.rank]
        self._rank: int = max(ranks, default=-1)
        for child in inner:
            child._rank = -1
        self._unheard: dict[int, _Report] = {}
        """By number, the reports of steps that may have raised behind them: ends, blocks that
        failed to load, and what our scheduler's half gets."""
        self._lost: list[_Report] = []
        self._results, self._blocks = TransferResults(), set[int]()
        self._loaded: object = None
        """The orders whose loads have begun."""
        self._handled: BaseException | None = None
        """What the engine's caller is handling while this step runs."""

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        self.for_each(lambda child: child.register_kv_caches(kv_caches))

    def unregister_kv_caches(self) -> None:
        """Every child lets go of the paged KV. Connectors of vLLM before 0.33 have no such member,
        and their engine does not call this."""
        self._watch.kv_gone()
        self.for_each(lambda child: child.unregister_kv_caches())

    def restore_kv_caches(self) -> None:
        self.for_each(lambda child: child.restore_kv_caches())

    def set_host_xfer_buffer_ops(self, copy_operation: Any) -> None:
        self.for_each(lambda child: child.set_host_xfer_buffer_ops(copy_operation))

    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        """The one child's that has any. Raises ValueError, naming them, if several have."""
        contexts = {
            name: context
            for name, child in zip(self.names, self.children, strict=True)
            if (context := child.get_mem_pool_context()) is not None
        }
        if len(contexts) > 1:
            raise ValueError(
                f"{', '.join(contexts)} each want to allocate the KV cache, which has one place; "
                "configure a memory pool for one of them"
            )
        return next(iter(contexts.values()), None)

    def get_handshake_metadata(self) -> MultiHandshakeMetadata | None:
        shakes = tuple(child.get_handshake_metadata() for child in self.children)
        if all(shake is None for shake in shakes):
            return None
        return MultiHandshakeMetadata(shakes, self._chain)

    # -- a step ------------------------------------------------------------------------------

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        assert isinstance(connector_metadata, MultiConnectorMetadata), "another's orders"
        self._follow(connector_metadata)
        for request, more in connector_metadata.extra_async_saves.items():
            self._saves_awaited[request] = Awaited(more + 1)
        heard = connector_metadata.heard.get(self._rank, frozenset())
        for number in [number for number in self._unheard if number <= max(heard, default=-1)]:
            report = self._unheard.pop(number)
            # Of several ranks the engine acts on a failure that it counts twice before our half can
            # hold it back.
            is_safe = not report[0].failed_recving or len(connector_metadata.heard) == 1
            self._lost += [report] if number not in heard and is_safe else []
        self._handled = sys.exception()
        self._watch.bind(connector_metadata.weights)
        if self._metadata is not None and self._chain_changes is not None:
            # Model Runner V2 leaves out what is behind that which raised in a step. Of its blocks
            # none is stored.
            if self._metadata is not self._loaded:
                self.start_load_kv(None)
            self.for_each(lambda child: child.wait_for_save())
        for child, orders in zip(self.children, connector_metadata.metadata, strict=True):
            child.bind_connector_metadata(orders)
        super().bind_connector_metadata(connector_metadata)

    def _follow(self, orders: MultiConnectorMetadata) -> None:
        """Change the chain as a step orders. Raises ValueError for orders to another chain: each
        process reads its file, which may be changed while an engine starts."""
        if self._chain_changes is not None:
            self._chain_changes.follow(orders.changes)
        if orders.names and orders.names != self.names:
            raise ValueError(
                f"the scheduler's chain has the tiers {', '.join(orders.names)}, and this worker's "
                f"has {', '.join(self.names)}: the chain's file was changed while the engine was "
                "starting, or differs between its hosts; give all the same, and start it again"
            )

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        self.for_each(lambda child: child.clear_connector_metadata())

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        assert isinstance(kv_connector_metadata, MultiConnectorMetadata), "another's orders"
        self._follow(kv_connector_metadata)
        self.for_each(
            lambda child, orders: child.handle_preemptions(orders), kv_connector_metadata.metadata
        )

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._loaded = self._metadata
        orders = getattr(self._metadata, "metadata", ())
        tiers = [tier for tier in orders if isinstance(tier, OffloadingConnectorMetadata)]
        loading = Counter(job.request_id for tier in tiers for job in tier.reqs_to_load)
        several = {request: Awaited(jobs) for request, jobs in loading.items() if jobs > 1}
        self._loads_awaited |= several
        for request, pieces in getattr(self._metadata, "pieces", {}).items():
            self._loads_awaited[request] = Awaited(len(pieces), pieces)
        self.for_each(lambda child: child.start_load_kv(forward_context, **kwargs))

    def wait_for_layer_load(self, layer_name: str) -> None:
        if self._hears_layers:
            self.for_each(lambda child: child.wait_for_layer_load(layer_name))

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        if self._hears_layers:
            self.for_each(
                lambda child: child.save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)
            )

    def finish_forward(self) -> None:
        self.for_each(lambda child: child.finish_forward())

    def reset_capture_state(self) -> None:
        self.for_each(lambda child: child.reset_capture_state())

    def wait_for_save(self) -> None:
        # Model Runner V1 comes here too when a step raises, with blocks that are filled in part.
        if sys.exception() is self._handled:
            self._watch.computed()
        self.for_each(lambda child: child.wait_for_save())

    # -- ends --------------------------------------------------------------------------------

    def get_transfer_results(self, finished_req_ids: set[str]) -> TransferResults:
        """Loads and saves that ended on every child that was loading, or saving.

        A request of which one child failed its piece has not failed: only the blocks of that piece
        have, which `get_block_ids_with_load_errors` reports in the same step.
        """
        whole = TransferResults()
        for results, blocks, _ in self._lost:
            for name, ended in vars(results).items():
                getattr(whole, name).update(ended)
            self._failed_blocks |= blocks
        for place, child in enumerate(self.children):
            results = _transfer_results(child, finished_req_ids)
            for request in results.failed_recving:
                load = self._loads_awaited.get(request, ALONE)
                self._failed_blocks.update(load.pieces.get(place, ()))
                if place not in load.pieces:
                    whole.failed_recving.add(request)
            whole.finished_recving |= _last(self._loads_awaited, results.finished_recving)
            whole.finished_sending |= _last(self._saves_awaited, results.finished_sending)
        self._results = whole
        return whole

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        self._blocks = failed.union(*(c.get_block_ids_with_load_errors() for c in self.children))
        return self._blocks

    def build_connector_worker_meta(self) -> MultiWorkerMetadata | None:
        """What every child finished, and what was seen of the weights; None: nothing, and the step
        is not measured."""
        metadata = tuple(child.build_connector_worker_meta() for child in self.children)
        weights, step = self._watch.report(), getattr(self._metadata, "step", None)
        changes = None if self._chain_changes is None else self._chain_changes.report()
        whole = MultiWorkerMetadata(metadata, step, weights, changes)
        for *_, lost in self._lost:
            whole = replace(lost.aggregate(whole), step=step)
        self._lost = []
        results, self._results = self._results, TransferResults()
        parts = whole.weights, whole.changes, *whole.metadata
        is_news = any(part is not None for part in parts)
        has_ends = bool(self._blocks) or any(vars(results).values())
        number = getattr(getattr(self._metadata, "weights", None), "step", None)
        if self._rank >= 0 and number is not None and (is_news or has_ends or self._unheard):
            whole.reports = {self._rank: (number, {*self._unheard})}
            if is_news or has_ends:
                self._unheard[number] = results, self._blocks, whole
        elif step is None and not is_news:
            return None
        return whole

    def shutdown(self) -> None:
        """Shut every child down, and close what was prepared for a change."""
        if self._chain_changes is not None:
            self._chain_changes.close()
        super().shutdown()

    def get_kv_connector_kv_cache_events(self) -> Any:
        """The events of all children that collect any on workers; None: none does."""
        whole: Any = None
        for child in self.children:
            events = child.get_kv_connector_kv_cache_events()
            if events is not None:
                whole = events if whole is None else whole.merge(events)
        return whole


def _hears_layers(child: WorkerConnector) -> bool:
    """Whether a child does anything in the members that an engine calls once a layer. No tier of
    ours does, and a step of 80 layers would call each of them 160 times."""
    does_nothing = (WorkerConnector.wait_for_layer_load, WorkerConnector.save_kv_layer)
    # Check the instance: it may delegate or be patched.
    calls = (getattr(child, member.__name__, None) for member in does_nothing)
    return any(getattr(call, "__func__", None) not in does_nothing for call in calls)


@dataclass
class Awaited:
    """A request's loads, or saves, by several children: how many are `left`, and the paged blocks
    that each loads, by its place, where it is a connector of the engine."""

    left: int = 1
    pieces: Mapping[int, list[int]] = field(default_factory=dict)


ALONE = Awaited()
"""That of a request that no two children load, or tiers that report blocks themselves."""


def _last(awaited: dict[str, Awaited], ended: set[str]) -> set[str]:
    """Of requests that one child has ended, those for which no more children are awaited."""
    last = {request for request in ended if request not in awaited}
    for request in ended - last:
        awaited[request].left -= 1
        if awaited[request].left == 0:
            del awaited[request]
            last.add(request)
    return last


def _transfer_results(child: WorkerConnector, finished_req_ids: set[str]) -> TransferResults:
    """The results of one child; a connector of vLLM before 0.30 has `get_finished` alone."""
    if hasattr(child, "get_transfer_results"):
        return child.get_transfer_results(finished_req_ids)
    sent, received = child.get_finished(finished_req_ids)
    return TransferResults(sent or set(), received or set())
