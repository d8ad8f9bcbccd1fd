"""MultiConnector: a chain of connectors behind the contract of one."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from tiers.connector.base import Blocks, ConnectorOutput, Request, Role, SchedulerOutput
from tiers.connector.contract import Connector
from tiers.connector.policy import first
from tiers.connector.stats import TierStats
from tiers.errors import KVTiersError

logger = logging.getLogger(__name__)


@dataclass
class MultiConnectorMetadata:
    """One step's orders: an entry per child, in order.

    `extra_async_saves`: requests that more than one child is saving, and how many more.
    """

    metadata: tuple[Any, ...]
    extra_async_saves: dict[str, int]


@dataclass
class MultiWorkerMetadata:
    """What the children of one worker finished: an entry per child, in order."""

    metadata: tuple[Any, ...]

    def aggregate(self, other: MultiWorkerMetadata) -> MultiWorkerMetadata:
        """Fold another rank's metadata into this one, child by child."""
        pairs = zip(self.metadata, other.metadata, strict=True)
        self.metadata = tuple(
            a.aggregate(b) if a is not None and b is not None else a if b is None else b
            for a, b in pairs
        )
        return self


@dataclass(frozen=True)
class MultiHandshakeMetadata:
    """What the children of one worker say of themselves, in order."""

    metadata: tuple[Any, ...]


class MultiConnector(Connector):
    """Loads from the first child, in load-priority order, that has a prefix; stores to all."""

    def __init__(self, role: Role, children: Sequence[Connector]) -> None:
        super().__init__(role)
        self.children = tuple(children)
        self._serving: dict[str, int] = {}
        self._extra_async_saves: dict[str, int] = {}

    def shutdown(self) -> None:
        """Shut every child down, also when one raises; then raise what the first one did."""
        errors: list[Exception] = []
        for child in self.children:
            try:
                child.shutdown()
            except (KVTiersError, OSError, RuntimeError, ValueError) as error:
                logger.exception("a tier failed to shut down")
                errors.append(error)
        if errors:
            raise errors[0]

    def get_kv_connector_stats(self) -> TierStats | None:
        """All children's counters, by tier name."""
        stats = [s for child in self.children if (s := child.get_kv_connector_stats()) is not None]
        if not stats:
            return None
        total = TierStats()
        for one in stats:
            total.aggregate(one)
        return total

    # -- scheduler ---------------------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """What the child that the policy chooses has."""

        def answers() -> Iterator[tuple[int | None, bool]]:
            for child in self.children:
                yield child.get_num_new_matched_tokens(request, num_computed_tokens)

        choice = first(answers())
        self._serving.pop(request.request_id, None)
        if choice.child is not None:
            self._serving[request.request_id] = choice.child
        return choice.tokens, choice.is_async

    def update_state_after_alloc(
        self, request: Request, blocks: Blocks, num_external_tokens: int
    ) -> None:
        """The serving child loads; the others learn of the blocks, so that they can store them."""
        serving = self._serving.get(request.request_id)
        for index, child in enumerate(self.children):
            tokens = num_external_tokens if index == serving else 0
            child.update_state_after_alloc(request, blocks, tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> MultiConnectorMetadata:
        """All children's orders, and, once, the saves to wait for."""
        saves, self._extra_async_saves = self._extra_async_saves, {}
        metadata = tuple(child.build_connector_meta(scheduler_output) for child in self.children)
        return MultiConnectorMetadata(metadata, saves)

    def update_connector_output(self, connector_output: ConnectorOutput) -> None:
        """Show each child its own metadata only; the output is as it was afterwards."""
        whole = connector_output.kv_connector_worker_meta
        parts = whole.metadata if isinstance(whole, MultiWorkerMetadata) else ()
        try:
            for index, child in enumerate(self.children):
                connector_output.kv_connector_worker_meta = parts[index] if parts else None
                child.update_connector_output(connector_output)
        finally:
            connector_output.kv_connector_worker_meta = whole

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Tell every child; the request's blocks stay while any of them is saving it."""
        saving = 0
        merged: dict[str, Any] | None = None
        for child in self.children:
            is_saving, params = child.request_finished(request, block_ids)
            saving += is_saving
            if params is not None:
                merged = _merge(merged or {}, params)
        if saving > 1:
            self._extra_async_saves[request.request_id] = saving - 1
        self._serving.pop(request.request_id, None)
        return saving > 0, merged

    def set_xfer_handshake_metadata(self, metadata: Mapping[Any, Any]) -> None:
        """Give each child what its own workers said."""
        for index, child in enumerate(self.children):
            said = {
                worker: whole.metadata[index]
                for worker, whole in metadata.items()
                if isinstance(whole, MultiHandshakeMetadata) and whole.metadata[index] is not None
            }
            if said:
                child.set_xfer_handshake_metadata(said)

    def has_pending_push_work(self) -> bool:
        """Whether any child needs steps."""
        return any(child.has_pending_push_work() for child in self.children)

    # -- worker ------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Every child takes the same paged KV."""
        for child in self.children:
            child.register_kv_caches(kv_caches)

    def get_handshake_metadata(self) -> MultiHandshakeMetadata:
        """What all children say."""
        return MultiHandshakeMetadata(tuple(c.get_handshake_metadata() for c in self.children))

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Give each child its orders."""
        assert isinstance(connector_metadata, MultiConnectorMetadata), "another connector's orders"
        self._extra_async_saves.update(connector_metadata.extra_async_saves)
        for child, orders in zip(self.children, connector_metadata.metadata, strict=True):
            child.bind_connector_metadata(orders)
        super().bind_connector_metadata(connector_metadata)

    def clear_connector_metadata(self) -> None:
        """The step is over for every child."""
        for child in self.children:
            child.clear_connector_metadata()
        super().clear_connector_metadata()

    def handle_preemptions(self, kv_connector_metadata: MultiConnectorMetadata) -> None:
        """Every child fences, before blocks are overwritten."""
        for child, orders in zip(self.children, kv_connector_metadata.metadata, strict=True):
            child.handle_preemptions(orders)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin every child's loads."""
        for child in self.children:
            child.start_load_kv(forward_context, **kwargs)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for every child."""
        for child in self.children:
            child.wait_for_layer_load(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """A save goes to all."""
        for child in self.children:
            child.save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)

    def wait_for_save(self) -> None:
        """Begin every child's stores."""
        for child in self.children:
            child.wait_for_save()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Loads that ended; saves that ended on every child that was saving."""
        sent: set[str] = set()
        received: set[str] = set()
        for child in self.children:
            child_sent, child_received = child.get_finished(finished_req_ids)
            received |= child_received or set()
            sent |= {r for r in child_sent or () if self._is_last_save(r)}
        return sent or None, received or None

    def _is_last_save(self, request_id: str) -> bool:
        left = self._extra_async_saves.pop(request_id, 0)
        if left > 1:
            self._extra_async_saves[request_id] = left - 1
        return left == 0

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that any child failed to load."""
        return set().union(*(c.get_block_ids_with_load_errors() for c in self.children))

    def build_connector_worker_meta(self) -> MultiWorkerMetadata | None:
        """What every child finished; None: nothing."""
        metadata = tuple(child.build_connector_worker_meta() for child in self.children)
        return MultiWorkerMetadata(metadata) if any(m is not None for m in metadata) else None


def _merge(params: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    clash = params.keys() & more.keys()
    if clash:
        _clash(clash)
    return params | more


def _clash(keys: set[str]) -> NoReturn:
    raise RuntimeError(f"several tiers set the transfer parameter {', '.join(sorted(keys))}")
