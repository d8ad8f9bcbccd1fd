"""Compute that races with copies: on a device, where its streams run as they do, and on the CPU.

The engine's thread launches forwards and goes on: what they read is summed on the device, and
looked at when all is over. Each begins with a pause, so that a copy which does not wait wins.
`test_streams.py` has every wait and order in the model; here are those waits that a pause shows.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from spec.chain import ChainSpec
from tests.gpu.cuda_model import Site, comes_from
from tests.gpu.streamed_engine import RUNNERS, Runner, StreamedWorker
from tests.gpu.test_copier import DEVICES, needs_cuda
from tests.gpu.test_streams import ROOT, prompts, waits
from tests.support.replay import ReplayEngine
from tests.support.replay.model import kv_of
from tests.support.replay.tables import STATE
from tests.support.replay_chains import MODEL, SLOT
from tiers.cpu.spec import CpuSpec
from tiers.gpu import cuda
from tiers.gpu.pages import Copies
from tiers.lab.replay.model import states
from tiers.lab.replay.requests import Step, Work
from tiers.testing import GivenSpec, MemoryStore

PAUSE = 20_000_000
"""Cycles, of about 10 ms, before each forward."""
RACED = {
    "ring.filling.wait_event(after)": "V1 and V2",
    "fence.wait()  # without": "V1 and V2",
    "gather.hold_engine()": "states on V2",
}
"""Waits that a device can't do without once compute is late, and the runner that shows it. Of the
last it is the copy that has to be late."""


class RacingWorker(StreamedWorker):
    """Launches a step's work, and keeps what it read on the device."""

    sums: list[tuple[str, torch.Tensor, int]]

    def _on(self, layer: torch.Tensor, values: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """Numbers beside a layer, for which nobody waits."""
        made = torch.as_tensor(values, dtype=torch.int64)
        return made.pin_memory().to(layer.device, non_blocking=True) if layer.is_cuda else made

    def _queue_zeroing(self, step: Step) -> None:
        taken = self._taken(step)
        for layer in self.kv.values():
            if taken:
                layer.index_fill_(0, self._on(layer, taken), 0)

    def _queue_moves(self, step: Step) -> None:
        for work in step.work:
            last, after = self._places(work)
            for table, window in zip(work.tables, self._model.windows, strict=True):
                if window == STATE and work.start and last != after:
                    for layer in self.kv.values():
                        layer[table[after]].copy_(layer[table[last]])
                        layer[table[last]].fill_(-1)

    def _queue(self, work: Work) -> int:
        tokens = self.requests[work.request_id].tokens[: work.start + len(work.tokens)]
        known, whole = states(tokens), 0
        for group, table in enumerate(work.tables):
            for i, layer in enumerate(self.kv.values()):
                if layer.is_cuda and not i and not group:
                    torch.cuda._sleep(PAUSE)
                number = group * self._model.layers + i
                rows = kv_of(self._model, known, number, self._rank)
                is_state = self._model.windows[group] == STATE
                launch = self._launch_state if is_state else self._launch_tokens
                total, expected = launch(work, table, layer, rows)
                self.sums.append((work.request_id, total, expected))
                whole += int(rows[-1].sum() if is_state else rows.sum())
        return whole

    def _launch_tokens(
        self, work: Work, table: list[int], layer: torch.Tensor, rows: torch.Tensor
    ) -> tuple[torch.Tensor, int]:
        """Write the KV of the next tokens, and sum up that of all."""
        flat = layer.view(-1, self._model.width)
        index = self._on(layer, self._index(table, range(len(rows))))
        flat.index_copy_(0, index[work.start :], self._on(layer, rows[work.start :]))
        return flat.index_select(0, index).sum(), int(rows.sum())

    def _launch_state(
        self, work: Work, table: list[int], layer: torch.Tensor, rows: torch.Tensor
    ) -> tuple[torch.Tensor, int]:
        """Read the state before the next tokens, where it was moved, and write the next."""
        _, after = self._places(work)
        place, expected = layer[table[after], 0], int(rows[work.start - 1].sum())
        before = place.sum() if work.start else torch.zeros_like(place[0])
        place.copy_(self._on(layer, rows[-1]))
        return before, expected if work.start else 0

    def misread(self) -> set[str]:
        """Requests under which the device has read other KV than was computed."""
        return {name for name, total, expected in self.sums if int(total) != expected}


def race(device: str, runner: Runner) -> set[str]:
    """Requests that were computed with wrong KV, of some that share prefixes, more than the engine
    has room for."""
    plain = runner.model is MODEL
    slots = 12 if plain else 48
    store = GivenSpec(type="given", name="store").over(MemoryStore())
    tiers = CpuSpec(type="cpu", capacity=slots * SLOT), store
    staging = 2 * slots * SLOT
    chain = ChainSpec(version=1, load_when="always", staging=staging, tiers=tiers)
    model = replace(runner.model, device=device)
    options: Any = {"num_blocks": 20 if plain else 44, "prefix_caching": plain}
    engine = ReplayEngine(chain, model, batch_tokens=64, make_worker=RacingWorker, **options)
    (worker,) = engine.workers
    assert isinstance(worker, RacingWorker)
    worker.runner, worker.requests, worker.sums = runner, engine.scheduler.requests, []
    host = worker.connector.children[0]._host  # type: ignore[attr-defined]
    host.engine = replace(host.engine, overwrites_early=runner.overwrites_early)
    rng = random.Random(3)
    for prompt, max_tokens in prompts(rng, 40):
        engine.add(prompt, max_tokens)
        for _ in range(rng.randrange(6)):
            engine.step()
    engine.run()
    engine.settle()
    wrong = worker.misread()
    engine.close()
    return wrong


@pytest.mark.parametrize("runner", ["V1 and V2", "states on V1", "states on V2"])
@pytest.mark.parametrize("device", DEVICES)
def test_compute_that_waits_for_nobody_reads_what_was_stored(device: str, runner: str) -> None:
    if device == "cpu" and RUNNERS[runner].overwrites_early:
        pytest.skip("the CPU has no such runner, and no order of its own")
    assert race(device, RUNNERS[runner]) == set()


@needs_cuda
@pytest.mark.parametrize("wait", RACED)
def test_a_wait_that_is_taken_away_is_missed(wait: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _take_away(site_of(wait), monkeypatch)
    if wait == "gather.hold_engine()":
        _delay_gathers(monkeypatch)
    assert race("cuda", RUNNERS[RACED[wait]])


def _delay_gathers(patch: pytest.MonkeyPatch) -> None:
    """Let the device pause before it reads a gather's blocks."""
    really = cuda.open_copies

    def made(pages: Sequence[torch.Tensor]) -> Copies:
        copies = really(pages)
        copy: Any = copies.copy

        def late(*args: Any, to_rows: bool) -> None:
            if to_rows:
                torch.cuda._sleep(5 * PAUSE)
            copy(*args, to_rows=to_rows)

        patch.setattr(copies, "copy", late)
        return copies

    patch.setattr(cuda, "open_copies", made)


def _take_away(site: Site, patch: pytest.MonkeyPatch) -> None:
    """Let a device not wait where this line of code leads to it."""

    def unless(really: Callable[..., object]) -> Callable[..., None]:
        def call(*args: Any) -> None:
            if not comes_from(site):
                really(*args)

        return call

    for cls, name in ((torch.cuda.Stream, "wait_event"), (torch.cuda.Event, "synchronize")):
        patch.setattr(cls, name, unless(getattr(cls, name)))


def site_of(wait: str) -> Site:
    """The line that such a wait begins."""
    sites: list[Site] = [param.values[0] for param in waits()]
    (found,) = {site for site in sites if _line(site).startswith(wait)}
    return found


def _line(site: Site) -> str:
    path, number = site
    return (ROOT / path).read_text().splitlines()[number - 1].strip()


def test_the_waits_that_a_device_shows_are_there() -> None:
    assert len({site_of(wait) for wait in RACED}) == len(RACED)
