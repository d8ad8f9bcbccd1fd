"""What a benchmark measures and how it is told: our figure beside the limit's and the peer's."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

Measure = Callable[[], float]
"""Runs once and says how fast it was, in the case's unit."""


@dataclass(frozen=True)
class Case:
    """One comparison. `ours`, `limit` and `peer` run in turn, in the same process.

    `unit`: of all three figures; more is better, unless it is one of `LESS_IS_BETTER`.
    `limit`: what the hardware does with the same bytes; `peer`: what a user would take instead.
    `target`: the ratio aimed at, to the limit (`of`: "limit"), to the peer (`of`: "peer"), or the
    figure itself (`of`: "ours"). `why`: what holds us off it, where something does.
    """

    suite: str
    case: str
    unit: str
    ours: Measure
    limit: Measure | None = None
    peer: Measure | None = None
    peer_name: str = ""
    target: float | None = None
    of: str = "limit"
    why: str = ""


LESS_IS_BETTER = ("ms", "us", "us/block", "s", "bytes/block")


@dataclass(frozen=True)
class Row:
    """A case as measured: medians over the rounds, and the spread of ours (max-min over median)."""

    suite: str
    case: str
    unit: str
    ours: float
    limit: float | None
    peer: float | None
    peer_name: str
    of_limit: float | None
    of_peer: float | None
    spread: float
    target: float | None
    of: str
    met: bool | None
    why: str


def measure(case: Case, rounds: int) -> Row:
    """Run the case's parts in turn, `rounds` times after one unmeasured; ratios are of medians.

    A ratio is how much better we are: ours over theirs, or theirs over ours where less is better.
    """
    parts = {"ours": case.ours, "limit": case.limit, "peer": case.peer}
    figures: dict[str, list[float]] = {name: [] for name, part in parts.items() if part}
    for round_ in range(rounds + 1):
        for name, part in parts.items():
            if part is not None:
                figure = part()
                if round_ or not rounds:
                    figures[name].append(figure)
    middle = {name: statistics.median(values) for name, values in figures.items()}
    ours = middle["ours"]
    ratios = {name: _ratio(case.unit, ours, middle.get(name)) for name in ("limit", "peer")}
    return Row(
        suite=case.suite,
        case=case.case,
        unit=case.unit,
        ours=ours,
        limit=middle.get("limit"),
        peer=middle.get("peer"),
        peer_name=case.peer_name,
        of_limit=ratios["limit"],
        of_peer=ratios["peer"],
        spread=(max(figures["ours"]) - min(figures["ours"])) / ours if ours else 0.0,
        target=case.target,
        of=case.of,
        met=_met(case, ours, ratios),
        why=case.why,
    )


def _ratio(unit: str, ours: float, theirs: float | None) -> float | None:
    if theirs is None or not ours or not theirs:
        return None
    return theirs / ours if unit in LESS_IS_BETTER else ours / theirs


def _met(case: Case, ours: float, ratios: dict[str, float | None]) -> bool | None:
    if case.target is None:
        return None
    if case.of == "ours":
        return ours <= case.target if case.unit in LESS_IS_BETTER else ours >= case.target
    ratio = ratios[case.of]
    return None if ratio is None else ratio >= case.target


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    import torch

    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": memory,
        "gpu": gpu,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def write_json(path: Path, rows: Iterable[Row]) -> None:
    """`{"machine": {...}, "rows": [...]}`."""
    whole = {"machine": machine(), "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(whole, indent=1) + "\n")


HEAD = ("suite", "case", "ours", "limit", "of limit", "peer", "of peer", "target", "spread")


def table(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """The rows as text, under `HEAD`."""
    return [
        (
            row.suite,
            row.case,
            f"{_number(row.ours)} {row.unit}",
            _number(row.limit),
            _times(row.of_limit),
            f"{_number(row.peer)} {row.peer_name}".strip(),
            _times(row.of_peer),
            _target(row),
            f"{row.spread:.0%}",
        )
        for row in rows
    ]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"


def _target(row: Row) -> str:
    if row.target is None:
        return ""
    verdict = {True: "met", False: "missed", None: "not measured"}[row.met]
    return f"{row.target:g} {verdict}"
