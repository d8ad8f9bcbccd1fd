"""The replay engine's worker: paged KV, the model's work on it, the connector's worker half."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from tiers.contract.connector import WorkerConnector
from tiers.lab.replay.model import ReplayModel, kv_of, states
from tiers.lab.replay.requests import Step, StepOutput, Work


class Worker(Protocol):
    """All ranks, wherever they run."""

    def handshakes(self) -> Mapping[int, Any]:
        """The reports of each rank's connector about itself."""

    def begin(self, step: Step) -> None:
        """Start a step."""

    def end(self, step: Step) -> StepOutput:
        """Wait for a step that was begun."""

    def close(self) -> None:
        """Shut the connectors down."""


class LocalWorker:
    """The only rank, in this process."""

    def __init__(self, model: ReplayModel, num_blocks: int, connector: WorkerConnector) -> None:
        self._model = model
        self.kv = model.allocate(num_blocks)
        self.connector = connector
        self.connector.register_kv_caches(self.kv)

    def handshakes(self) -> Mapping[int, Any]:
        return {0: self.connector.get_handshake_metadata()}

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
        return {work.request_id: self._compute(work) for work in step.work}

    def _compute(self, work: Work) -> int:
        """Write the KV of a request's next tokens; the sum over all KV it sees, if it samples."""
        index = self._index(work.tables[0], range(work.start + len(work.tokens)))
        layers = [cache.view(-1, self._model.width) for cache in self.kv.values()]
        before = int(layers[0][index[work.start - 1], 0]) if work.start else 0
        fresh, total = states(work.tokens, before), 0
        for layer, flat in enumerate(layers):
            flat[index[work.start :]] = kv_of(self._model, fresh, layer)
            total += int(flat[index].sum()) if work.samples else 0
        return total

    def _index(self, table: list[int], positions: range) -> torch.Tensor:
        where = torch.tensor(list(positions), dtype=torch.int64)
        size = self._model.block_tokens
        return torch.tensor(table)[where // size] * size + where % size

    def close(self) -> None:
        self.connector.shutdown()
