"""The members an engine may call on a connector; the defaults are those of one with no work.

A connector has two halves: `SchedulerConnector` decides, in the scheduler's process, and
`WorkerConnector` moves bytes, in the process of each rank. Names, arguments and results are those
of the engine's contract.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from tiers.contract.messages import TransferResults
from tiers.contract.protocols import Blocks, ConnectorOutput, Request, SchedulerOutput


def do_nothing(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands for members of a connector that has no work."""


class Connector(ABC):
    """What both halves have. The engine calls every member of a half from one thread."""

    @abstractmethod
    def shutdown(self) -> None:
        """Finish what is in flight, in bounded time, and release everything."""

    def get_kv_connector_stats(self) -> Any:
        """Counters since the last call, in the connector's own form; None: nothing was counted."""
        return None


class SchedulerConnector(Connector):
    """The half that decides what is loaded and stored."""

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens beyond the computed ones that can be loaded, and whether beside the steps.

        None: not known yet, ask again in a later step. Has no effect on the request.
        """
        return 0, False

    @abstractmethod
    def update_state_after_alloc(
        self, request: Request, blocks: Blocks, num_external_tokens: int
    ) -> None:
        """Note that blocks were allocated, and load that many tokens into them."""

    @abstractmethod
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
        """Orders for the workers of this step; picklable."""

    @abstractmethod
    def update_connector_output(self, connector_output: ConnectorOutput) -> None:
        """Take in what the workers sent back."""

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished_all_groups`, from an engine with one KV cache group."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Note that a request ended, whose blocks of each KV cache group these are.

        True: they must stay until the request is reported as sent. Also parameters for its output.
        """
        return False, None

    def register_finished_partial_tail(
        self,
        request: Request,
        block_ids: tuple[list[int], ...],
        partial_tail_offloads: list[tuple[int, int, int]],
    ) -> bool:
        """Take a finished request's last, partial blocks; True: they must stay until sent."""
        return False

    def on_new_request(self, request: Request) -> None:
        """A request was queued; it has no blocks yet."""

    def set_xfer_handshake_metadata(self, metadata: Mapping[Any, Any]) -> None:
        """Take each worker's `get_handshake_metadata`, before the first request."""

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[Any, Any]) -> None:
        """The same, with workers named by (pipeline rank, tensor rank)."""
        self.set_xfer_handshake_metadata(metadata)

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """The engine's cache manager, for connectors that look into it."""

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """The engine's block pool, from engines that have no `bind_kv_cache_manager`."""

    def disable_store(self, request: Request) -> None:
        """Store nothing of this request: another connector loads it within its steps, and
        whether that worked is known only when its blocks would have been stored."""

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> Mapping[str, int]:
        """Where the tokens that this connector loads for a request come from, in the engine's
        words: host, disk, external_unspecified. Counts sum up to `num_external_tokens`."""
        return {"external_unspecified": num_external_tokens} if num_external_tokens else {}

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """KV cache groups that a load of the request brings; all of a model with one group."""
        return (0,)

    def take_events(self) -> Iterable[Any]:
        """Events since the last call."""
        return ()

    def reset_cache(self) -> bool | None:
        """Forget all blocks; False: it could not be done. Nothing stored before is loaded again."""
        return None

    def weights_changed(self) -> None:
        """Forget all blocks, like a reset that nobody asked for: the weights have changed."""

    def get_finished_count(self) -> int | None:
        """How many workers report each transfer; None: all of them."""
        return None

    def has_pending_push_work(self) -> bool:
        """Whether the engine must go on stepping although no request runs."""
        return False

    def has_pending_block_frees(self) -> bool:
        """Whether transfers in flight will soon give blocks back to the engine."""
        return False

    @property
    def requires_kv_delivery(self) -> bool:
        """Whether a save that is lost is worse than a later miss."""
        return False

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """Whether a load can bring recurrent state up to where full attention is."""
        return False


class WorkerConnector(Connector):
    """The half that moves bytes. The orders of a step are bound around it."""

    _metadata: Any = None

    @abstractmethod
    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Take the engine's paged KV: layer name to tensor, owned by the engine."""

    def unregister_kv_caches(self) -> None:
        """Return once nothing copies from or to the paged KV, whose memory goes away for a while.

        The engine may call it again before `restore_kv_caches`.
        """

    def restore_kv_caches(self) -> None:
        """The memory is back, at the same addresses and with other bytes."""

    def set_host_xfer_buffer_ops(self, copy_operation: Any) -> None:
        """The engine's own copy between device and host, for connectors without one."""

    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        """Where the engine should allocate its KV; None: where it likes."""
        return None

    def get_handshake_metadata(self) -> Any:
        """What the scheduler half must know of this worker; picklable."""
        return None

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Take the orders of the step that begins."""
        self._metadata = connector_metadata

    def clear_connector_metadata(self) -> None:
        """The step is over."""
        self._metadata = None

    def has_connector_metadata(self) -> bool:
        """Whether a step's orders are bound."""
        return self._metadata is not None

    @abstractmethod
    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Return once blocks that this step overwrites, by its orders, are no longer read."""

    @abstractmethod
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin the step's loads."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return once a layer is loaded; loads beside the steps need no waiting."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """A layer's KV is computed; blocks are stored after the step, all layers together."""

    def finish_forward(self) -> None:
        """The model no longer reads the step's KV."""

    def reset_capture_state(self) -> None:
        """Graphs are captured: forget what was done meanwhile."""

    @abstractmethod
    def wait_for_save(self) -> None:
        """The step is computed: begin its stores."""

    @abstractmethod
    def get_transfer_results(self, finished_req_ids: set[str]) -> TransferResults:
        """Requests whose saves and loads ended since the last call, and loads that failed whole."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """The same as (saves, loads), from engines that know no loads that fail whole."""
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending or None, results.finished_recving or None

    @abstractmethod
    def get_block_ids_with_load_errors(self) -> set[int]:
        """Paged blocks whose load failed since the last call; the engine recomputes them."""

    @abstractmethod
    def build_connector_worker_meta(self) -> Any:
        """What this worker finished, for the scheduler half; None: nothing."""

    def get_kv_connector_kv_cache_events(self) -> Any:
        """Events that this worker collected since the last call, in the engine's own form."""
        return None
