"""Changes of a running vLLM engine's chain, asked for beside its requests, in the process of a job
of `vllm_child`, and how long the engine's steps take meanwhile."""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from spec.load import load_chain
from tiers.control.ask_engines import ask

_running: list[Changer] = []


BESIDE_S = 0.2
"""After each change, and between two, for steps that show what a change leaves to be done, or what
is as usual."""


class Step(NamedTuple):
    """A step of the engine: when it began and ended, how many seconds of these its thread waited
    for a core of the machine, and the tokens of its batch."""

    began: float
    ended: float
    queued: float
    tokens: int

    @property
    def seconds(self) -> float:
        """Without the wait for a core, which depends on what else the machine does."""
        return self.ended - self.began - self.queued

    @property
    def kind(self) -> int:
        """The same for steps with about as many tokens, within a factor of two."""
        return self.tokens.bit_length()


class Change(NamedTuple):
    """A change that was asked for: its number in the round, when the engine took the question,
    when it was over, and after how many steps of the engine it was in effect; None: it was
    refused, or that is not known."""

    number: int
    asked: float
    over: float
    effect: int | None


class Changer:
    """Asks an engine of this process for one chain after the other, round by round, as the command
    does; notes what came of each, and how long the engine's steps took."""

    def __init__(self, llm: Any, folder: str, chains: list[dict[str, Any]]) -> None:
        self._folder, self._chains = Path(folder), chains
        self.outcomes: list[list[str]] = []
        """Of each round, why each change was refused; empty: it is in effect."""
        self.steps: list[Step] = []
        self.changes: list[Change] = []
        self.between: list[tuple[float, float]] = []
        """Spans in which nothing changed."""
        self._effects: list[int] = []
        """The number of steps after which each change was in effect."""
        self._asked = 0.0
        self._stop = threading.Event()
        core = llm.llm_engine.engine_core.engine_core
        self._live = core.scheduler.connector.changes
        self._live.request = self._noting(self._live.request)
        core.step_fn = self._timed(core.scheduler, core.step_fn)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _timed(self, scheduler: Any, step: Callable[[], Any]) -> Callable[[], Any]:
        schedule, tokens, chain = scheduler.schedule, 0, self._live.chain

        def counting(*args: Any, **more: Any) -> Any:
            nonlocal tokens
            output = schedule(*args, **more)
            tokens = output.total_num_scheduled_tokens
            return output

        def timed() -> Any:
            nonlocal chain
            began, queued = time.perf_counter(), _queued()
            answer = step()
            self.steps.append(Step(began, time.perf_counter(), _queued() - queued, tokens))
            if self._live.chain is not chain:
                chain = self._live.chain
                self._effects.append(len(self.steps))
            return answer

        scheduler.schedule = counting
        return timed

    def _noting(self, request: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*args: Any) -> Any:
            self._asked = time.perf_counter()
            return request(*args)

        return noting

    def _run(self) -> None:
        while not self._stop.is_set():
            self.outcomes.append([self._change(*one) for one in enumerate(self._chains)])

    def _change(self, number: int, chain: dict[str, Any]) -> str:
        dumped = load_chain(chain).model_dump(mode="json")
        began = time.perf_counter()
        time.sleep(BESIDE_S)
        self.between.append((began, time.perf_counter()))
        effects = len(self._effects)
        ((_, answer),) = ask(self._folder, "apply", {"chain": dumped})
        asked = self._asked
        while not answer["over"]:
            time.sleep(0.002)
            ((_, found),) = ask(self._folder, "change", {"change": answer["change"]})
            answer |= found
        time.sleep(BESIDE_S)
        # A long step may not have ended yet: what it brought is not measured then.
        last = self._effects[effects:][-1:]
        effect = last[0] if last and not answer["why"] else None
        self.changes.append(Change(number, asked, time.perf_counter(), effect))
        return str(answer["why"])

    def end(self) -> None:
        """Let the round end, which needs steps."""
        self._stop.set()

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def report(self) -> dict[str, Any]:
        """What came of it: how many changes; by their number in a round in how many steps, and
        milliseconds, each was in effect; and the steps beside changes, and between them."""
        effects: dict[int, list[tuple[int, float]]] = defaultdict(list)
        for one in self.changes:
            if one.effect is not None:
                before = sum(step.ended <= one.asked for step in self.steps)
                waited = self.steps[one.effect - 1].ended - one.asked
                effects[one.number].append((one.effect - before, round(1e3 * waited, 1)))
        return {
            "outcomes": self.outcomes,
            "changes": len(self.changes),
            "to_effect": dict(effects),
            "beside": self._described([(one.asked, one.over) for one in self.changes]),
            "between": self._described(self.between),
        }

    def _described(self, spans: Sequence[tuple[float, float]]) -> dict[str, Any]:
        """The steps in these spans, and how many times the median of their kind they took."""
        alike: dict[int, list[float]] = defaultdict(list)
        for step in self.steps:
            alike[step.kind].append(step.seconds)
        medians = {kind: statistics.median(seconds) for kind, seconds in alike.items()}
        times = sorted(
            (round(step.seconds / medians[step.kind], 2), step)
            for step in self.steps
            if any(a <= step.ended and step.began <= b for a, b in spans)
        )
        return {
            "steps": len(times),
            "longer_than_twice": sum(of > 2 for of, _ in times),
            "longest": [(of, round(1e3 * step.seconds, 1), step.tokens) for of, step in times[-6:]],
            "median_ms": 1e3 * statistics.median([step.seconds for _, step in times] or [0.0]),
            "queued": sum(step.queued for _, step in times),
        }


def _queued() -> float:
    """Seconds that this thread has waited for a core so far."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def begin_changes(llm: Any, folder: str, chains: list[dict[str, Any]], memory: str) -> None:
    """`memory`: a folder with the /proc that the last rank sees when it looks for memory."""
    llm.collective_rpc(see_memory, args=(memory,))
    _running.append(Changer(llm, folder, chains))


def see_memory(worker: Any, folder: str) -> None:
    """On a worker: if it is the last one, take the machine's memory from other files."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    if worker.rank == worker.parallel_config.world_size - 1:
        for tier in get_kv_transfer_group().children:
            tier._host._root = Path(folder)


def end_changes(llm: Any, result: str) -> None:
    """End them, with steps of a small request, and write what came of them."""
    from vllm import SamplingParams, TokensPrompt

    changer = _running.pop()
    report = changer.report()  # of the time under load
    changer.end()
    nothing = SamplingParams(max_tokens=2, detokenize=False, ignore_eos=True)
    while not changer.is_over:
        llm.generate([TokensPrompt(prompt_token_ids=[3])], [nothing], use_tqdm=False)
    Path(result).write_text(json.dumps({**report, "outcomes": changer.outcomes}))
