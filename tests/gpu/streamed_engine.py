"""A replay engine over a modelled CUDA device: its forward is queued, as vLLM's is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from spec.chain import ChainSpec
from tests.gpu.cuda_model import LateThreads, Mark, Model
from tests.support.clock import Clock
from tests.support.replay_chains import MODEL, total
from tiers.connector.worker import host_slots, loading, offloading_worker
from tiers.gpu import cuda
from tiers.gpu.pages import PageCopies
from tiers.lab.replay import ReplayEngine
from tiers.lab.replay import engine as replay_engine
from tiers.lab.replay.model import kv_of, states
from tiers.lab.replay.requests import ReplayRequest, Step, StepOutput, Work
from tiers.lab.replay.worker import LocalWorker

ORDERS: dict[str, Sequence[str]] = {
    "V1 and V2": ("fence", "zero", "bind", "forward", "load", "save", "results"),
    "loads first": ("fence", "zero", "bind", "load", "forward", "save", "results"),
    "V1 with a drafter, V2 of 0.33 too": (
        *("fence", "zero", "bind", "forward", "load", "results", "save"),
    ),
}
"""What vLLM's model runners do in a step: `fence` is `handle_preemptions`, `zero` what they do to
blocks that they take."""
STREAMS = ("packing", "leaving", "arriving", "unpacking")
"""The copier's, in the order in which it makes them."""
WAVE_ROWS = 2


class StreamedWorker(LocalWorker):
    """Queues a step's forward on the device, and says at once what it must come to. `wrong`: what
    the device read, where that differed. `computed`: forwards of requests that it has run."""

    requests: dict[str, ReplayRequest]
    model: Model
    order: Sequence[str]

    def start(self, model: Model, order: Sequence[str], requests: dict[str, ReplayRequest]) -> None:
        """Begin to serve; `requests` are the scheduler's."""
        self.model, self.order, self.requests = model, order, requests
        self.wrong: list[str] = []
        self.computed = 0

    def execute(self, step: Step) -> StepOutput:
        connector = self.connector
        assert connector is not None
        output = StepOutput()
        acts: dict[str, Callable[[], object]] = {
            "fence": lambda: connector.handle_preemptions(step.kv_connector_metadata),
            "zero": lambda: self._queue_zeroing(step),
            "bind": lambda: connector.bind_connector_metadata(step.kv_connector_metadata),
            "load": lambda: connector.start_load_kv(None),
            "save": connector.wait_for_save,
        }
        for act in self.order:
            if act == "forward":
                output.sums = {work.request_id: self._queue(work) for work in step.work}
            elif act == "results":
                output = replace(self._take_results(step.finished_req_ids), sums=output.sums)
            else:
                acts[act]()
        connector.clear_connector_metadata()
        return output

    def _queue_zeroing(self, step: Step) -> None:
        """Engines zero blocks that they take for some models, those to be loaded too."""
        orders = [one for one in step.kv_connector_metadata.metadata if one is not None]
        jobs = [job for one in orders for job in one.reqs_to_load]
        taken = [item.target for job in jobs for item in job.items]
        for layer in self.kv.values():
            self.model.compute.put(partial(layer.index_fill_, 0, torch.tensor(taken).long(), 0))

    def _queue(self, work: Work) -> int:
        known = states(self.requests[work.request_id].tokens[: work.start + len(work.tokens)])
        layers = range(self._model.layers)
        expected = sum(int(kv_of(self._model, known, i, self._rank).sum()) for i in layers)

        def forward() -> None:
            self.computed += 1
            if self._compute(work, moves_states=False) != expected and work.samples:
                self.wrong.append(work.request_id)

        self.model.compute.put(forward)
        return expected


class StreamedCopier(cuda.CudaCopier):
    """The CUDA copier, over slots that no device has to pin."""

    pin = False


class StreamedEngine(ReplayEngine):
    """See the module. `threads`: what the connectors' threads have not come to yet."""

    def __init__(
        self,
        chain: ChainSpec,
        model: Model,
        order: Sequence[str],
        patch: pytest.MonkeyPatch,
        tells_of_sleep: bool = True,
        **options: Any,
    ) -> None:
        self.device, self.threads, self.clock = model, LateThreads(model), Clock()
        model.install(patch)
        patch.setattr(cuda, "WAVE_BYTES", WAVE_ROWS * 4096)
        patch.setattr(cuda, "open_copies", PageCopies)
        patch.setattr(loading, "WAVE_BYTES", 2 * WAVE_ROWS * 4096)
        patch.setattr(loading, "READ_BYTES", 2 * WAVE_ROWS * 4096)
        for module in (cuda, loading, offloading_worker, host_slots):
            patch.setattr(module, "io_executor", self.threads.executor)
        patch.setattr(loading, "wait_a_moment", lambda futures: None)
        for module in (cuda, loading, offloading_worker, host_slots):
            patch.setattr(module, "wait", self.threads.wait)
        patch.setattr(replay_engine, "LocalWorker", StreamedWorker)
        self.tells_of_sleep = tells_of_sleep
        opener = partial(StreamedCopier, in_step=not tells_of_sleep)
        super().__init__(chain, MODEL, open_copier=opener, now=self.clock, **options)
        (only,) = self.workers
        assert isinstance(only, StreamedWorker) and only.connector is not None
        self.worker = only
        only.start(model, order, self.scheduler.requests)
        self.host = only.connector.children[0]._host  # type: ignore[attr-defined]
        self.host.now = self.clock

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
        connector = self.worker.connector
        assert connector is not None
        if self.tells_of_sleep:
            # Engines wait for the device before; what the copier has queued by then is of no
            # account.
            Mark(self.device.compute).reach()
            connector.unregister_kv_caches()
        else:
            self.device.drain()
        for layer in self.worker.kv.values():
            layer.fill_(-7)
        # What was allocated beside it goes with it, as vLLM's pool of memory has it.
        copier = self.host.copier
        assert isinstance(copier, StreamedCopier)
        for ring in (copier._in, copier._out):
            for wave in ring._waves:
                wave.rows.fill_(0xEE)
        self.scheduler.pool.forget_all()
        if self.tells_of_sleep:
            connector.restore_kv_caches()

    def settle(self, but: str = "") -> None:
        """Let all threads, but those named so, end what they do."""
        while self.threads.run(but) or self.step():
            pass

    def check(self) -> None:
        """Run what is queued. Whatever the device read must have been right, and nothing lost."""
        self.settle()
        self.device.drain()
        assert not self.worker.wrong, f"wrong KV under {self.worker.wrong}"
        for counter in ("store_failures", "damaged_blocks"):
            assert total(self, counter) == 0, counter
