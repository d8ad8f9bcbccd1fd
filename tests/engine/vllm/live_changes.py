"""Changes of a running vLLM engine's chain, asked for beside its requests, in the process of a job
of `vllm_child`."""

from __future__ import annotations

import json
import statistics
import threading
import time
from pathlib import Path
from typing import Any

from spec.load import load_chain
from tiers.control.ask_engines import ask

_running: list[Changer] = []


class Changer:
    """Asks an engine of this process for one chain after the other, round by round, as the command
    does; notes what came of each, and how long the engine's steps took."""

    def __init__(self, llm: Any, folder: str, chains: list[dict[str, Any]]) -> None:
        self._folder, self._chains = Path(folder), chains
        self.outcomes: list[list[str]] = []
        """Of each round, why each change was refused; empty: it is in effect."""
        self.steps: list[tuple[float, float]] = []
        """When each step began, and its seconds."""
        self.changed: list[tuple[float, float]] = []
        """When each change was asked for, and when it was over."""
        self._stop = threading.Event()
        core = llm.llm_engine.engine_core.engine_core
        step = core.step_fn

        def timed() -> Any:
            began = time.perf_counter()
            answer = step()
            self.steps.append((began, time.perf_counter() - began))
            return answer

        core.step_fn = timed
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            self.outcomes.append([self._change(chain) for chain in self._chains])

    def _change(self, chain: dict[str, Any]) -> str:
        dumped = load_chain(chain).model_dump(mode="json")
        began = time.perf_counter()
        ((_, answer),) = ask(self._folder, "apply", {"chain": dumped})
        while not answer["over"]:
            time.sleep(0.002)
            ((_, found),) = ask(self._folder, "change", {"change": answer["change"]})
            answer |= found
        self.changed.append((began, time.perf_counter()))
        time.sleep(0.05)
        return str(answer["why"])

    def end(self) -> None:
        """Let the round end, which needs steps."""
        self._stop.set()

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def report(self) -> dict[str, Any]:
        """What came of it; seconds of the steps while a change was in flight, and of the others."""
        inside = [s for at, s in self.steps if any(a <= at <= b for a, b in self.changed)]
        outside = [s for at, s in self.steps if not any(a <= at <= b for a, b in self.changed)]
        return {
            "outcomes": self.outcomes,
            "seconds": [b - a for a, b in self.changed],
            "during": _percentiles(inside),
            "else": _percentiles(outside),
        }


def _percentiles(seconds: list[float]) -> dict[str, float]:
    if not seconds:
        return {}
    by_size = sorted(seconds)
    return {
        "count": len(by_size),
        "median": statistics.median(by_size),
        "p99": by_size[int(0.99 * (len(by_size) - 1))],
        "max": by_size[-1],
    }


def begin_changes(llm: Any, folder: str, chains: list[dict[str, Any]]) -> None:
    _running.append(Changer(llm, folder, chains))


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
