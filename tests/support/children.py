"""Children of a MultiConnector that answer as a test says and write down what they are told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spec.chain import LoadPolicy
from tests.support.clock import Clock
from tiers.connector.multi.multi_scheduler import MultiScheduler, MultiSettings
from tiers.connector.policy.request_table import RequestTable
from tiers.contract.connector import SchedulerConnector, WorkerConnector
from tiers.contract.messages import (
    NO_LOOKUP_TIMES,
    LoadJob,
    LookupTimes,
    OffloadingConnectorMetadata,
    TransferResults,
)
from tiers.loading.load_cost import LoadCost


class Child(SchedulerConnector, WorkerConnector):
    """Answers as it is told to, in both roles, and writes down each call."""

    def __init__(self, name: str, calls: list[Any]) -> None:
        self.name = name
        self.calls = calls
        self.tokens: int | None = 0
        self.finished = TransferResults()
        self.saving: tuple[bool, dict[str, Any] | None] = (False, None)
        self.error: Exception | None = None
        self.meta: Any = None
        self.errors: set[int] = set()

    def _note(self, what: str, *args: Any) -> None:
        self.calls.append((self.name, what, *args))
        if self.error is not None:
            raise self.error

    def shutdown(self) -> None:
        self._note("shutdown")

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        self._note("match", num_computed_tokens)
        return self.tokens, bool(self.tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, tokens: int) -> None:
        self._note("alloc", blocks, tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return f"orders of {self.name}"

    def update_connector_output(self, connector_output: Any) -> None:
        self._note("output", connector_output.kv_connector_worker_meta)

    def request_finished(self, request: Any, block_ids: list[int]) -> Any:
        self._note("finished", block_ids)
        return self.saving

    def set_xfer_handshake_metadata(self, metadata: Any) -> None:
        self._note("handshake", dict(metadata))

    def register_kv_caches(self, kv_caches: Any) -> None:
        self._note("register")

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        self._note("preempt", kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._note("load", self._metadata)

    def wait_for_save(self) -> None:
        self._note("save", self._metadata)

    def get_transfer_results(self, finished_req_ids: set[str]) -> TransferResults:
        return self.finished

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.errors

    def build_connector_worker_meta(self) -> Any:
        return self.meta


class Tier:
    """A child that can load the blocks marked x; writes down what it is told to load."""

    def __init__(self, held: str | None = "", tokens: int | None = 0) -> None:
        self.held = held
        self.tokens = tokens
        self.loads: list[Any] = []
        self.ended: set[str] = set()
        self.orders: list[LoadJob] = []

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> Any:
        return self.tokens, bool(self.tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, tokens: int) -> None:
        self.loads.append(tokens)

    def build_connector_meta(self, output: Any) -> Any:
        return None

    def bind_connector_metadata(self, metadata: Any) -> None:
        pass

    def start_load_kv(self, forward_context: Any) -> None:
        pass

    def request_finished(self, request: Any, block_ids: list[int]) -> Any:
        return False, None

    def get_transfer_results(self, finished: set[str]) -> TransferResults:
        ended, self.ended = self.ended, set()
        return TransferResults(finished_recving=ended)


class BlockTier(Tier):
    """One that our load policies may ask for any block."""

    def __init__(self, held: str | None = "", tokens: int | None = 0) -> None:
        super().__init__(held, tokens)
        self.load_cost = LoadCost(Clock())

    def count(self, **measures: float) -> None: ...

    def why_nothing(self, request: Any) -> str:
        return ""

    def lookup_times(self, request: Any) -> LookupTimes:
        return NO_LOOKUP_TIMES

    def build_connector_meta(self, output: Any) -> Any:
        orders, self.orders = self.orders, []
        return OffloadingConnectorMetadata(orders)

    def coverage(self, state: Any, blocks: range) -> list[bool] | None:
        return None if self.held is None else [self.held[b : b + 1] == "x" for b in blocks]

    def version(self, state: Any) -> int | None:
        return None

    def missed(self, steps: object) -> None:
        raise AssertionError("no step was missed")

    def load_blocks(self, state: Any, ranges: Sequence[range], shared: Any) -> None:
        self.loads.append(list(ranges))
        self.orders.append(LoadJob(len(self.loads), state.request.request_id, []))


def chain(*children: Any, load: LoadPolicy = "stitched") -> MultiScheduler:
    """The scheduler half of a chain with blocks of four tokens."""
    return MultiScheduler(children, MultiSettings(RequestTable.of_connectors(4), load))
