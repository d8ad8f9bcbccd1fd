"""The demo's results: a table, a JSON document, and faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from statistics import median
from typing import Any

from bench.demo.demo_engine import Answered
from bench.demo.demo_plan import SCENES
from spec.text import aligned

_COLUMNS = ("phase", "what happened", "prompt", "loaded", "from", "TTFT", "faster", "tokens")


@dataclass(frozen=True)
class PhaseResult:
    """A phase over its prompts: sums of tokens, the median time to first token in seconds, how
    many times faster than `cold` that is, and whether every answer is cold's."""

    name: str
    prompt_tokens: int
    loaded_tokens: int
    by_tier: dict[str, int]
    ttft_s: float
    speedup: float
    identical: bool


def summarise(answered: Sequence[Answered]) -> list[PhaseResult]:
    """Sum up the measured requests by phase; the first phase is cold."""
    phases = [(name, list(group)) for name, group in groupby(answered, lambda a: a["phase"])]
    (_, cold), *_ = phases
    return [_summarise(name, requests, cold) for name, requests in phases]


def _summarise(name: str, requests: list[Answered], cold: list[Answered]) -> PhaseResult:
    by_tier = sum((Counter(request["by_tier"]) for request in requests), Counter[str]())
    ttft = median(request["ttft_s"] for request in requests)
    return PhaseResult(
        name=name,
        prompt_tokens=sum(request["prompt_tokens"] for request in requests),
        loaded_tokens=sum(by_tier.values()),
        by_tier=dict(by_tier),
        ttft_s=ttft,
        speedup=median(request["ttft_s"] for request in cold) / ttft,
        identical=[r["tokens"] for r in requests] == [c["tokens"] for c in cold],
    )


def faults(results: Sequence[PhaseResult], serving: Mapping[str, frozenset[str]]) -> dict[str, str]:
    """A line for each phase that its tiers did not serve, or that changed a token.
    `serving`: see `DemoPlan`."""
    found = {}
    for result in results:
        tiers = serving.get(result.name, frozenset())
        wrong = []
        if tiers and not any(result.by_tier.get(tier) for tier in tiers):
            wrong.append(f"nothing was loaded from {' or '.join(sorted(tiers))}")
        if not result.identical:
            wrong.append("the generated tokens differ from cold's")
        if wrong:
            found[result.name] = " and ".join(wrong)
    return found


def to_json(results: Sequence[PhaseResult]) -> dict[str, Any]:
    """The results as the JSON document of `--json`."""
    return {"phases": [asdict(result) for result in results]}


def table(results: Sequence[PhaseResult]) -> str:
    """The results for a terminal of 80 columns."""
    rows = [
        (
            result.name,
            SCENES[result.name],
            str(result.prompt_tokens),
            f"{result.loaded_tokens} ({result.loaded_tokens / result.prompt_tokens:.0%})",
            _tiers(result.by_tier),
            f"{result.ttft_s:.3f} s",
            f"{result.speedup:.1f}x",
            "identical" if result.identical else "changed",
        )
        for result in results
    ]
    return "\n".join(aligned([_COLUMNS, *rows], left=2))


def _tiers(by_tier: Mapping[str, int]) -> str:
    if len(by_tier) == 1:
        return next(iter(by_tier))
    return ", ".join(f"{tier} {tokens}" for tier, tokens in by_tier.items()) or "-"
