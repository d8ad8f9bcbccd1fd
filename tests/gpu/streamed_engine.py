"""A replay engine over a modelled CUDA device: its forward is queued, as vLLM's is."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch

from spec.chain import ChainSpec
from tests.gpu.cuda_model import LateThreads, Mark, Model
from tests.support.clock import Clock
from tests.support.replay import ReplayEngine, ReplayModel, ReplayRequest
from tests.support.replay.model import kv_of
from tests.support.replay.tables import STATE
from tests.support.replay.worker import LocalRank
from tests.support.replay_chains import MODEL, RECURRENT, total
from tiers.connector.worker import checksums, host_slots, loading, offloading_worker
from tiers.gpu import cuda
from tiers.gpu.pages import PageCopies
from tiers.lab.replay.engine import sampled
from tiers.lab.replay.model import states
from tiers.lab.replay.requests import Step, StepOutput, Work


class Runner(NamedTuple):
    """What one of vLLM's model runners does in a step: `fence` is `handle_preemptions`, `zero` what
    it does to blocks that it takes, `move` to states that go on in the next block. `ahead`: steps
    that are in flight when the next is planned, as with async scheduling."""

    acts: str
    model: ReplayModel = MODEL
    ahead: int = 0

    @property
    def overwrites_early(self) -> bool:
        """As an engine tells its connector."""
        before = self.acts.partition("fence")[0]
        return "zero" in before or "move" in before


RUNNERS = {
    "V1 and V2": Runner("fence zero bind forward load save results"),
    "loads first": Runner("fence zero bind load forward save results"),
    "V1 with a drafter, V2 of 0.33 too": Runner("fence zero bind forward load results save"),
    "async": Runner("fence zero bind forward load save results", ahead=1),
    "several precisions on V2": Runner("zero fence bind forward load save results"),
    "states on V1": Runner("fence zero move bind forward load save results", RECURRENT),
    "states on V2": Runner("zero move fence bind forward load save results", RECURRENT),
    "states on V2, async, with a drafter": Runner(
        "zero move fence bind forward load results save", RECURRENT, ahead=1
    ),
}
STREAMS = ("packing", "leaving", "arriving", "unpacking")
"""The copier's, in the order in which it makes them."""
WAVE_ROWS = 2


class StreamedWorker(LocalRank):
    """Queues a step's forward on the device, and says at once what it must come to. `wrong`: what
    the device read, where that differed. `computed`: forwards of requests that it has run."""

    requests: dict[str, ReplayRequest]
    model: Model
    runner: Runner

    def start(self, model: Model, runner: Runner, requests: dict[str, ReplayRequest]) -> None:
        """Begin to serve; `requests` are the scheduler's."""
        self.model, self.runner, self.requests = model, runner, requests
        self.wrong: list[str] = []
        self.computed = 0

    def end(self, step: Step) -> StepOutput:
        connector = self.connector
        assert connector is not None
        output = StepOutput()
        acts: dict[str, Callable[[], object]] = {
            "fence": lambda: connector.handle_preemptions(step.kv_connector_metadata),
            "zero": lambda: self._queue_zeroing(step),
            "move": lambda: self._queue_moves(step),
            "bind": lambda: connector.bind_connector_metadata(step.kv_connector_metadata),
            "load": lambda: connector.start_load_kv(None),
            "save": connector.wait_for_save,
        }
        for act in self.runner.acts.split():
            if act == "forward":
                output.sums = {work.request_id: self._queue(work) for work in step.work}
            elif act == "results":
                output = replace(self._take_results(step.finished_req_ids), sums=output.sums)
            else:
                acts[act]()
        connector.clear_connector_metadata()
        return output

    def _queue_zeroing(self, step: Step) -> None:
        """Engines zero blocks that they take for some models, those to be loaded too, but for
        those of states."""
        taken = self._taken(step)
        for layer in self.kv.values():
            self.model.compute.put(partial(layer.index_fill_, 0, torch.tensor(taken).long(), 0))

    def _taken(self, step: Step) -> list[int]:
        orders = [one for one in step.kv_connector_metadata.metadata if one is not None]
        jobs = [job for one in orders for job in one.reqs_to_load]
        taken = [item.target for job in jobs for item in job.items]
        if STATE in self._model.windows or self.runner.overwrites_early:
            taken += [block for work in step.work for block in self._fresh(work)]
        return taken

    def _fresh(self, work: Work) -> list[int]:
        """The blocks of attention that a request gets in a step, to compute into."""
        size = self._model.block_tokens
        first, last = -(-work.start // size), -(-(work.start + len(work.tokens)) // size)
        groups = zip(work.tables, self._model.windows, strict=True)
        return [b for table, window in groups if window != STATE for b in table[first:last]]

    def _queue_moves(self, step: Step) -> None:
        """A request's states go on in the block of its next tokens; where they were there is
        nothing left of them."""
        for work in step.work:
            last, after = self._places(work)
            for table, window in zip(work.tables, self._model.windows, strict=True):
                if window == STATE and work.start and last != after:
                    for layer in self.kv.values():
                        self.model.compute.put(partial(_move, layer, table[last], table[after]))

    def _places(self, work: Work) -> tuple[int, int]:
        """Where in a table of states the last one is, and the next."""
        size = self._model.block_tokens
        return (work.start - 1) // size, (work.start + len(work.tokens) - 1) // size

    def _compute_states(self, work: Work, table: list[int], group: int, moves_states: bool) -> int:
        if work.start:
            last, after = self._places(work)
            table = list(table)
            table[last] = table[after]
        return super()._compute_states(work, table, group, moves_states)

    def _queue(self, work: Work) -> int:
        known = states(self.requests[work.request_id].tokens[: work.start + len(work.tokens)])
        expected = 0
        for layer in range(self._model.layers * len(self._model.windows)):
            is_state = self._model.windows[layer // self._model.layers] == STATE
            seen = known[-1:] if is_state else known
            expected += int(kv_of(self._model, seen, layer, self._rank).sum())

        def forward() -> None:
            self.computed += 1
            if self._compute(work, moves_states=False) != expected and work.samples:
                self.wrong.append(work.request_id)

        self.model.compute.put(forward)
        return expected


def _move(layer: torch.Tensor, source: int, target: int) -> None:
    layer[target] = layer[source]
    layer[source] = -1


class StreamedCopier(cuda.CudaCopier):
    """The CUDA copier, over slots that no device has to pin."""

    pin = False


class StreamedEngine(ReplayEngine):
    """See the module. `threads`: what the connectors' threads have not come to yet."""

    def __init__(
        self,
        chain: ChainSpec,
        model: Model,
        runner: Runner,
        patch: pytest.MonkeyPatch,
        **options: Any,
    ) -> None:
        self.device, self.threads, self.clock = model, LateThreads(model), Clock()
        model.install(patch)
        patch.setattr(cuda, "WAVE_BYTES", WAVE_ROWS * 4096)
        patch.setattr(cuda, "open_copies", PageCopies)
        patch.setattr(loading, "WAVE_BYTES", 2 * WAVE_ROWS * 4096)
        patch.setattr(loading, "READ_BYTES", 2 * WAVE_ROWS * 4096)
        for module in (cuda, loading, offloading_worker, host_slots, checksums):
            patch.setattr(module, "IoExecutor", self.threads.executor)
        patch.setattr(loading, "wait_a_moment", lambda futures: None)
        for module in (loading, offloading_worker, checksums):
            patch.setattr(module, "wait", self.threads.wait)
        options |= {"open_copier": StreamedCopier, "make_worker": StreamedWorker, "now": self.clock}
        super().__init__(chain, runner.model, **options)
        (only,) = self.workers
        assert isinstance(only, StreamedWorker) and only.connector is not None
        self.rank = only
        only.start(model, runner, self.scheduler.requests)
        self.host = only.connector.children[0]._host  # type: ignore[attr-defined]
        self.host.now = self.clock
        early = runner.overwrites_early
        self.host.engine = replace(self.host.engine, overwrites_early=early)
        self._executing: deque[tuple[Step, StepOutput]] = deque()

    def step(self) -> bool:
        """Begin a step, and end the one before it that is not to be in flight any more."""
        step = self.scheduler.plan()
        self.scheduler.give_orders(step)
        self._executing.append((step, self.rank.end(step)))
        while len(self._executing) > (self.rank.runner.ahead if step.work else 0):
            self._end_oldest()
        self.take_stats()
        return bool(step.work)

    def _end_oldest(self) -> None:
        step, output = self._executing.popleft()
        self.scheduler.end_step(step, sampled(step, output.sums))
        self.scheduler.end_transfers(output)

    def run(self, but: str = "") -> None:
        """Run all requests to their ends; threads, those named `but` aside, get on where the engine
        has nothing to do."""
        idle = 0
        while self.scheduler.busy:
            idle = 0 if self.step() or self.threads.run(but) else idle + 1
            assert idle < 100, "the engine is stuck"

    def sleep(self) -> None:
        """End all requests, give the paged KV away, as an engine that sleeps does, and take it
        back."""
        while self.scheduler.requests:  # not for stores: engines don't
            if not self.step():
                self.threads.run()
        connector = self.rank.connector
        assert connector is not None
        # Engines wait for the device before; what the copier has queued by then is of no account.
        Mark(self.device.compute).reach()
        connector.unregister_kv_caches()
        for layer in self.rank.kv.values():
            layer.fill_(-7)
        # What was allocated beside it goes with it, as vLLM's pool of memory has it.
        copier = self.host.copier
        assert isinstance(copier, StreamedCopier)
        for ring in (copier._in, copier._out):
            for wave in ring._waves:
                wave.rows.fill_(0xEE)
        self.scheduler.pool.forget_all()
        assert self.connector is not None
        self.connector._requests.cache_emptied()  # engines reset their own cache before
        connector.restore_kv_caches()

    def settle(self, but: str = "") -> None:
        """Let all threads, but those named so, end what they do."""
        while self.threads.run(but) or self.step():
            pass

    def check(self) -> None:
        """Run what is queued. Whatever the device read must have been right, and nothing lost."""
        self.settle()
        self.device.drain()
        assert not self.rank.wrong, f"wrong KV under {self.rank.wrong}"
        for counter in ("store_failures", "damaged_blocks"):
            assert total(self, counter) == 0, counter
