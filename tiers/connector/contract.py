"""The members an engine may call on a connector; the defaults are those of one with no work."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch

from tiers.connector.base import Blocks, ConnectorOutput, Request, Role, SchedulerOutput
from tiers.connector.stats import TierStats


class Connector(ABC):
    """One connector in one role. Names, arguments and results are those of the engine's contract.

    The engine calls every member from one thread. Metadata is bound around each step.
    """

    def __init__(self, role: Role) -> None:
        self.role = role
        self._metadata: Any = None

    # -- both roles --------------------------------------------------------------------------

    @abstractmethod
    def shutdown(self) -> None:
        """Finish what is under way, in bounded time, and release everything."""

    def get_kv_connector_stats(self) -> TierStats | None:
        """Counters since the last call; None: nothing was counted."""
        return None

    # -- scheduler ---------------------------------------------------------------------------

    @abstractmethod
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens beyond the computed ones that can be loaded, and whether beside the steps.

        None: not known yet, ask again in a later step. Has no effect on the request.
        """

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
        """Note that a request ended.

        True: its blocks must stay until it is reported as sent. Also parameters for its output.
        """
        return False, None

    def set_xfer_handshake_metadata(self, metadata: Mapping[Any, Any]) -> None:
        """Take what each worker's `get_handshake_metadata` said, before the first request."""

    def has_pending_push_work(self) -> bool:
        """Whether the engine must go on stepping although no request runs."""
        return False

    # -- worker ------------------------------------------------------------------------------

    @abstractmethod
    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Take the engine's paged KV: layer name to tensor, owned by the engine."""

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
        """Return once blocks that this step overwrites are no longer read."""

    @abstractmethod
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin the step's loads."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return once a layer is loaded; loads beside the steps need no waiting."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """A layer's KV is computed; blocks are stored after the step, all layers together."""

    @abstractmethod
    def wait_for_save(self) -> None:
        """The step is computed: begin its stores."""

    @abstractmethod
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose (saves, loads) ended since the last call."""

    @abstractmethod
    def get_block_ids_with_load_errors(self) -> set[int]:
        """Paged blocks whose load failed since the last call; the engine recomputes them."""

    @abstractmethod
    def build_connector_worker_meta(self) -> Any:
        """What this worker finished, for the scheduler half; None: nothing."""
