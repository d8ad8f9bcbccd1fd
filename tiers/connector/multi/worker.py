"""The worker members of a MultiConnector: every child does its part of the step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from tiers.connector.contract.connector import Connector
from tiers.connector.contract.engine import Role
from tiers.connector.contract.messages import TransferResults
from tiers.connector.multi.metadata import (
    MultiConnectorMetadata,
    MultiHandshakeMetadata,
    MultiWorkerMetadata,
)


class MultiWorker(Connector):
    """Children in load-priority order, and the members that an engine calls on its workers.

    A child that raises never keeps the others from being called; what it raised goes on to the
    engine afterwards, since only the engine can tell what an unfinished load means.
    """

    def __init__(
        self,
        role: Role,
        children: Sequence[Connector],
        *,
        names: Sequence[str] | None = None,
        chain: str = "",
    ) -> None:
        """`names`: of the children, unique; those of the tiers are known. `chain`: differs
        between chains of one engine."""
        super().__init__(role)
        self.children = tuple(children)
        self.names = tuple(
            names or (getattr(child, "tier", str(index)) for index, child in enumerate(children))
        )
        self._chain = chain
        self._extra_async_saves: dict[str, int] = {}
        self._extra_async_loads: dict[str, int] = {}

    def for_each(self, call: Callable[[Connector], object], start: int = 0) -> None:
        """Call for every child from `start` on, in order, also when one raises; then raise.

        Of several errors the last is raised, with the earlier ones as its context.
        """
        if start < len(self.children):
            try:
                call(self.children[start])
            finally:
                self.for_each(call, start + 1)

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Every child takes the same paged KV."""
        self.for_each(lambda child: child.register_kv_caches(kv_caches))

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        """Only if every child does: the engine allocates its KV once."""
        # Engines since 0.29 have no such member, nor do their connectors.
        return bool(self.children) and all(
            getattr(child, "prefer_cross_layer_blocks", False) for child in self.children
        )

    def register_cross_layers_kv_cache(self, kv_cache: torch.Tensor, attn_backend: Any) -> None:
        """Every child takes the same tensor of all layers."""
        self.for_each(lambda child: child.register_cross_layers_kv_cache(kv_cache, attn_backend))

    def set_host_xfer_buffer_ops(self, copy_operation: Any) -> None:
        """Every child may copy with the engine's own operation."""
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
        """What all children say; None: none says anything."""
        said = tuple(child.get_handshake_metadata() for child in self.children)
        if all(one is None for one in said):
            return None
        return MultiHandshakeMetadata(said, self._chain)

    def get_finished_count(self) -> int | None:
        """The count that all children name; None if any leaves it to the engine.

        Raises ValueError, naming them, if they disagree.
        """
        counts = {
            name: child.get_finished_count()
            for name, child in zip(self.names, self.children, strict=True)
        }
        if None in counts.values():
            return None
        if len(set(counts.values())) > 1:
            named = ", ".join(f"{name}: {count}" for name, count in counts.items())
            raise ValueError(f"connectors disagree on how often a request finishes ({named})")
        return next(iter(counts.values()), None)

    # -- a step ------------------------------------------------------------------------------

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Give each child its orders."""
        assert isinstance(connector_metadata, MultiConnectorMetadata), "another connector's orders"
        self._extra_async_saves.update(connector_metadata.extra_async_saves)
        self._extra_async_loads.update(connector_metadata.extra_async_loads)
        for child, orders in zip(self.children, connector_metadata.metadata, strict=True):
            child.bind_connector_metadata(orders)
        super().bind_connector_metadata(connector_metadata)

    def clear_connector_metadata(self) -> None:
        """The step is over for every child."""
        self.for_each(lambda child: child.clear_connector_metadata())
        super().clear_connector_metadata()

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Every child fences, before blocks are overwritten.

        Takes a step's orders, or, from engines before 0.21, the ids of preempted requests.
        """
        if isinstance(kv_connector_metadata, MultiConnectorMetadata):
            parts = kv_connector_metadata.metadata
        else:
            parts = (kv_connector_metadata,) * len(self.children)
        orders = iter(parts)
        self.for_each(lambda child: child.handle_preemptions(next(orders)))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin every child's loads."""
        self.for_each(lambda child: child.start_load_kv(forward_context, **kwargs))

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for every child."""
        self.for_each(lambda child: child.wait_for_layer_load(layer_name))

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """A save goes to all."""
        self.for_each(
            lambda child: child.save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)
        )

    def finish_forward(self) -> None:
        """Every child learns that the model has read the step's KV."""
        self.for_each(lambda child: child.finish_forward())

    def reset_capture_state(self) -> None:
        """Every child forgets what it did while graphs were captured."""
        self.for_each(lambda child: child.reset_capture_state())

    def wait_for_save(self) -> None:
        """Begin every child's stores."""
        self.for_each(lambda child: child.wait_for_save())

    # -- ends --------------------------------------------------------------------------------

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Saves and loads that ended, as `get_transfer_results` says."""
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending or None, results.finished_recving or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> TransferResults:
        """Loads and saves that ended on every child that was loading, or saving."""
        whole = TransferResults()
        for child in self.children:
            results = _transfer_results(child, finished_req_ids)
            whole.failed_recving |= results.failed_recving
            whole.finished_recving |= _last(self._extra_async_loads, results.finished_recving)
            whole.finished_sending |= _last(self._extra_async_saves, results.finished_sending)
        return whole

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that any child failed to load."""
        return set().union(*(c.get_block_ids_with_load_errors() for c in self.children))

    def build_connector_worker_meta(self) -> MultiWorkerMetadata | None:
        """What every child finished; None: nothing, and the step is not measured."""
        metadata = tuple(child.build_connector_worker_meta() for child in self.children)
        step = getattr(self._metadata, "step", None)
        if step is None and all(m is None for m in metadata):
            return None
        return MultiWorkerMetadata(metadata, step)

    def get_kv_connector_kv_cache_events(self) -> Any:
        """The events of all children that collect any on workers; None: none does."""
        whole: Any = None
        for child in self.children:
            events = child.get_kv_connector_kv_cache_events()
            if events is not None:
                whole = events if whole is None else whole.merge(events)
        return whole


def _last(more: dict[str, int], ended: set[str]) -> set[str]:
    """Of requests that one child has ended, those for which no more children are awaited."""
    last = {request for request in ended if request not in more}
    for request in ended - last:
        more[request] -= 1
        if more[request] == 0:
            del more[request]
    return last


def _transfer_results(child: Connector, finished_req_ids: set[str]) -> TransferResults:
    """What one child says; a connector of vLLM before 0.30 knows `get_finished` alone."""
    if hasattr(child, "get_transfer_results"):
        return child.get_transfer_results(finished_req_ids)
    sent, received = child.get_finished(finished_req_ids)
    return TransferResults(sent or set(), received or set())
