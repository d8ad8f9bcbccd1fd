"""OffloadingConnector: one tier behind the connector contract."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tiers.connector.contract.connector import Connector
from tiers.connector.contract.engine import Role
from tiers.connector.contract.messages import (
    BlockEvent,
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
    TransferResults,
    WorkerHandshake,
)
from tiers.connector.contract.protocols import Blocks, ConnectorOutput, Request, SchedulerOutput
from tiers.connector.contract.stats import TierStats
from tiers.connector.policy.cheapest.load_cost import LoadCost
from tiers.connector.policy.shared_load import SharedLoad
from tiers.connector.scheduler.scheduler import OffloadingScheduler
from tiers.connector.worker.worker import OffloadingWorker


class OffloadingConnector(Connector):
    """One tier. Made by `tiers.connector.chain`, which shares the host pool among siblings."""

    def __init__(
        self,
        tier: str,
        scheduler: OffloadingScheduler | None = None,
        worker: OffloadingWorker | None = None,
        hit_source: str = "external_unspecified",
    ) -> None:
        super().__init__(Role.SCHEDULER if scheduler else Role.WORKER)
        self.tier = tier
        self._scheduler = scheduler
        self._worker = worker
        self._hit_source = hit_source

    @property
    def scheduler(self) -> OffloadingScheduler:
        """The deciding half; only in the SCHEDULER role."""
        assert self._scheduler is not None, "a worker's connector was asked to decide"
        return self._scheduler

    @property
    def worker(self) -> OffloadingWorker:
        """The moving half; only in the WORKER role."""
        assert self._worker is not None, "a scheduler's connector was asked to move bytes"
        return self._worker

    def shutdown(self) -> None:
        """Release the tier in this process."""
        (self._scheduler or self.worker).close()

    def get_kv_connector_stats(self) -> TierStats | None:
        """Counters of this tier; the workers' come through the scheduler half."""
        stats = self._scheduler.take_stats() if self._scheduler is not None else TierStats()
        return None if stats.is_empty() else stats

    # -- scheduler ---------------------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """The longest prefix this tier holds beyond the computed tokens, in whole blocks."""
        return self.scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: Blocks, num_external_tokens: int
    ) -> None:
        """Load into the allocated blocks."""
        self.scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def coverage(self, request: Request, blocks: range) -> Sequence[int] | None:
        """How much of each of these blocks this tier could load."""
        return self.scheduler.coverage(request, blocks)

    @property
    def load_cost(self) -> LoadCost:
        """How long this tier's loads take."""
        return self.scheduler.load_cost

    def note(self, **measures: float) -> None:
        """Count for this tier."""
        self.scheduler.stats.add(self.tier, **measures)

    def load_blocks(
        self, request: Request, blocks: Blocks, ranges: Sequence[range], shared: SharedLoad
    ) -> None:
        """Load this tier's part of a shared load."""
        self.scheduler.load_blocks(request, blocks, ranges, shared)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
        """This tier's loads and stores of the step."""
        self.scheduler.load_cost.stepped()
        return self.scheduler.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: ConnectorOutput) -> None:
        """Note ended transfers."""
        self.scheduler.update_connector_output(connector_output)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Never holds blocks back: the fence on reuse protects stores under way."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The same, with the blocks of each KV cache group."""
        self.scheduler.request_finished(request, block_ids)
        return False, None

    def set_xfer_handshake_metadata(self, metadata: Mapping[Any, Any]) -> None:
        """Open the tier with what its workers said; another connector's words are ignored."""
        handshakes = [
            handshake for handshake in metadata.values() if isinstance(handshake, WorkerHandshake)
        ]
        self.scheduler.register_workers({handshake.rank: handshake for handshake in handshakes})

    def on_new_request(self, request: Request) -> None:
        """Begin to look it up, where that takes time."""
        self.scheduler.on_new_request(request)

    def disable_store(self, request: Request) -> None:
        """Store nothing of it."""
        self.scheduler.disable_store(request)

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> Mapping[str, int]:
        """All from this tier."""
        return {self._hit_source: num_external_tokens} if num_external_tokens else {}

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """All: a load brings whatever the engine has a place for."""
        return self.scheduler.group_ids

    def take_events(self) -> list[BlockEvent]:
        """What the tier came to hold and lost."""
        return self.scheduler.take_events()

    def reset_cache(self) -> bool:
        """Begin a new generation of keys; False: loads of the one before are under way."""
        return self.scheduler.reset_cache()

    def has_pending_push_work(self) -> bool:
        """Whether a short transfer is about to end."""
        return self.scheduler.must_step()

    # -- worker ------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Open the tier over the engine's paged KV."""
        self.worker.register_kv_caches(kv_caches)

    def get_handshake_metadata(self) -> WorkerHandshake | None:
        """Who this worker is."""
        return None if self._worker is None else self._worker.handshake()

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Fence blocks that are about to be overwritten; all, where only requests are named."""
        if isinstance(kv_connector_metadata, OffloadingConnectorMetadata):
            self.worker.handle_preemptions(kv_connector_metadata)
        else:
            self.worker.fence_all()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin loads."""
        self.worker.start_load_kv(self._orders())

    def wait_for_save(self) -> None:
        """Begin stores."""
        self.worker.wait_for_save(self._orders())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Ended loads; saves hold nothing back and are not reported."""
        return None, self.worker.get_finished(self._orders()) or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> TransferResults:
        """The same, with requests that must be recomputed whole."""
        _, received = self.get_finished(finished_req_ids)
        failed = self.worker.get_requests_with_load_errors()
        return TransferResults(finished_recving=received or set(), failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks the engine must recompute."""
        return self.worker.get_block_ids_with_load_errors()

    def build_connector_worker_meta(self) -> OffloadingWorkerMetadata | None:
        """What ended on this worker."""
        return self.worker.build_connector_worker_meta()

    def _orders(self) -> OffloadingConnectorMetadata:
        assert isinstance(self._metadata, OffloadingConnectorMetadata), "no step is bound"
        return self._metadata
