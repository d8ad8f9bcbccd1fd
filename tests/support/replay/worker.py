"""Ranks that hold a share of the KV each, of models with several KV cache groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from tests.support.replay.model import ReplayModel, kv_of
from tests.support.replay.tables import STATE
from tiers.contract.connector import WorkerConnector
from tiers.lab.replay.model import states
from tiers.lab.replay.requests import Step, StepOutput, Work
from tiers.lab.replay.worker import LocalWorker

OpenConnector = Callable[[int], WorkerConnector]
"""Makes the worker half for a rank, in that rank's process; picklable."""


class Rank(Protocol):
    """One rank, wherever it runs."""

    def handshake(self) -> Any:
        """The report of this rank's connector about itself."""

    def begin(self, step: Step) -> None:
        """Start a step."""

    def end(self, step: Step) -> StepOutput:
        """Wait for a step that was begun."""

    def close(self) -> None:
        """Shut the connector down."""


class Ranks:
    """A `Worker` of several ranks, whose outputs are merged, as an executor does."""

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self._ranks = ranks
        self._reported: Counter[str] = Counter()

    def handshakes(self) -> Mapping[int, Any]:
        return {number: rank.handshake() for number, rank in enumerate(self._ranks)}

    def begin(self, step: Step) -> None:
        for rank in self._ranks:
            rank.begin(step)

    def end(self, step: Step) -> StepOutput:
        """End a step on all ranks. A load ends once all have reported it."""
        whole, sums = StepOutput(), Counter[str]()
        for output in [rank.end(step) for rank in self._ranks]:
            sums.update(output.sums)
            whole.invalid_block_ids |= output.invalid_block_ids
            whole.failed_recving |= output.failed_recving
            self._reported.update(output.finished_recving)
            ours, theirs = whole.kv_connector_worker_meta, output.kv_connector_worker_meta
            both = ours is not None and theirs is not None
            whole.kv_connector_worker_meta = ours.aggregate(theirs) if both else ours or theirs
        ranks = len(self._ranks)
        whole.sums = dict(sums)
        whole.finished_recving = {name for name, done in self._reported.items() if done == ranks}
        for name in whole.finished_recving:
            del self._reported[name]
        return whole

    def close(self) -> None:
        for rank in self._ranks:
            rank.close()


class LocalRank(LocalWorker):
    """A `Rank` in this process."""

    _model: ReplayModel

    def __init__(
        self, model: ReplayModel, num_blocks: int, rank: int, open_connector: OpenConnector
    ) -> None:
        self._rank = rank
        super().__init__(model, num_blocks, open_connector(rank))

    def handshake(self) -> Any:
        return self.connector.get_handshake_metadata()

    def _forward(self, step: Step) -> dict[str, int]:
        moves = getattr(step, "moves_states", False)
        return {work.request_id: self._compute(work, moves) for work in step.work}

    def _compute(self, work: Work, moves_states: bool = False) -> int:
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
