"""The replay engine's workers: paged KV, the model's work on it, the connector's worker half."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from tiers.contract.connector import WorkerConnector
from tiers.lab.replay.blocks import STATE
from tiers.lab.replay.model import ReplayModel, kv_of, states
from tiers.lab.replay.requests import Step, StepOutput, Work

OpenConnector = Callable[[int], WorkerConnector]
"""Makes the worker half for a rank, in that rank's process; picklable."""


class Worker(Protocol):
    """One rank, wherever it runs."""

    def handshake(self) -> Any:
        """The report of this rank's connector about itself."""

    def begin(self, step: Step) -> None:
        """Start a step."""

    def end(self, step: Step) -> StepOutput:
        """Wait for a step that was begun."""

    def close(self) -> None:
        """Shut the connector down."""


class LocalWorker:
    """A `Worker` in this process."""

    def __init__(
        self, model: ReplayModel, num_blocks: int, rank: int, open_connector: OpenConnector
    ) -> None:
        self._model = model
        self._rank = rank
        self.kv = model.allocate(num_blocks)
        self.connector = open_connector(rank)
        self.connector.register_kv_caches(self.kv)

    def handshake(self) -> Any:
        return self.connector.get_handshake_metadata()

    def begin(self, step: Step) -> None:
        """All is done at the end."""

    def end(self, step: Step) -> StepOutput:
        """Run a step, with the connector's members called in vLLM's order."""
        self.connector.handle_preemptions(step.kv_connector_metadata)
        self.connector.bind_connector_metadata(step.kv_connector_metadata)
        sums = self._forward(step)
        self.connector.start_load_kv(None)
        if step.work:
            # Without, some versions of vLLM don't, and connectors must not depend on it.
            self.connector.wait_for_save()
        output = self._take_results(step.finished_req_ids)
        output.sums = sums
        self.connector.clear_connector_metadata()
        return output

    def _take_results(self, finished: set[str]) -> StepOutput:
        """The ends of transfers since the last call; `finished`: requests that have ended."""
        results = self.connector.get_transfer_results(finished)
        return StepOutput(
            {},
            results.finished_recving,
            results.failed_recving,
            self.connector.get_block_ids_with_load_errors(),
            self.connector.build_connector_worker_meta(),
        )

    def _forward(self, step: Step) -> dict[str, int]:
        computed = {work.request_id: self._compute(work, step.moves_states) for work in step.work}
        if self._model.forward_seconds:
            time.sleep(self._model.forward_seconds * sum(len(work.tokens) for work in step.work))
        return computed

    def _compute(self, work: Work, moves_states: bool) -> int:
        """Write the KV of a request's next tokens; the sum over all KV it sees, if it samples."""
        before = 0
        if work.start:
            (last,) = self._index(work.tables[0], range(work.start - 1, work.start))
            if self._model.windows[0] == STATE:
                last -= last % self._model.block_tokens
            before = int(next(iter(self.kv.values())).view(-1, self._model.width)[last, 0])
        fresh = states(work.tokens, before)
        end = work.start + len(fresh)
        total = 0
        for group, window in enumerate(self._model.windows):
            table = work.tables[group]
            if window == STATE:
                total += self._compute_states(work, table, group, moves_states)
                continue
            index = self._index(table, range(work.start, end))
            seen = self._index(table, range(0 if window is None else max(0, end - window), end))
            for i, cache in enumerate(self.kv.values()):
                layer = group * self._model.layers + i
                flat = cache.view(-1, self._model.width)
                flat[index] = kv_of(self._model, fresh, layer, self._rank).to(flat.device)
                if work.samples:
                    total += int(flat[seen].sum())
        return total

    def _compute_states(self, work: Work, table: list[int], group: int, moves_states: bool) -> int:
        """Bring a group's states on by a request's next tokens; their sum, if it samples."""
        size = self._model.block_tokens
        last, after = (work.start - 1) // size, (work.start + len(work.tokens) - 1) // size
        total = 0
        for i, cache in enumerate(self.kv.values()):
            before = int(cache[table[last], 0, 0]) if work.start else 0
            if moves_states and work.start:
                cache[table[last]] = -1
            layer = group * self._model.layers + i
            (row,) = kv_of(self._model, states(work.tokens, before)[-1:], layer, self._rank)
            cache[table[after], 0] = row
            total += int(row.sum()) if work.samples else 0
        return total

    def _index(self, table: list[int], positions: range) -> torch.Tensor:
        """The places of these tokens in the paged KV."""
        where = torch.tensor(list(positions), dtype=torch.int64)
        size = self._model.block_tokens
        return torch.tensor(table)[where // size] * size + where % size

    def close(self) -> None:
        self.connector.shutdown()
