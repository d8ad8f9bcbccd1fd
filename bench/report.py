"""What a benchmark measures and how it is told: our figure beside the limit's and the peer's."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.sampling import Sampler
from tiers.timed import timed

Measure = Callable[[], float]
"""Runs once and says how fast it was, in the case's unit."""


def rate(num_bytes: int, move: Callable[[], object], before: Callable[[], object] = int) -> Measure:
    """GB/s of what moves so many bytes; `before` is not timed."""

    def run() -> float:
        before()
        return num_bytes / timed(move)[0] / 1e9

    return run


@dataclass(frozen=True)
class Case:
    """One comparison. `ours`, `limit` and `peer` run in turn, in the same process.

    `ours`: None where it is not measured; `why` says why.
    `unit`: of all three figures; more is better, unless it is one of `LESS_IS_BETTER`.
    `limit`: what the hardware does with the same bytes; `peer`: what a user would take instead.
    `target`: the ratio aimed at, to the limit (`of`: "limit"), to the peer (`of`: "peer"), or the
    figure itself (`of`: "ours"). `rounds`: how many are enough, for one that takes long.
    """

    suite: str
    case: str
    unit: str
    ours: Measure | None
    limit: Measure | None = None
    peer: Measure | None = None
    peer_name: str = ""
    target: float | None = None
    of: str = "limit"
    why: str = ""
    rounds: int = 99


LESS_IS_BETTER = ("ms", "us", "us/block", "s", "bytes/block", "tables", "of capacity")


@dataclass(frozen=True)
class Row:
    """A case as measured: medians over the rounds, and the spread of ours (max-min over median).

    `met` is None where there is no target, or nothing to hold against it. `spent`: of a row off its
    target, what part of one more round each kind of work took, the largest first (see `Sampler`).
    """

    suite: str
    case: str
    unit: str
    ours: float | None
    limit: float | None
    peer: float | None
    peer_name: str
    of_limit: float | None
    of_peer: float | None
    spread: float | None
    target: float | None
    of: str
    met: bool | None
    why: str
    spent: Mapping[str, float] = field(default_factory=dict)


def measure(case: Case, rounds: int) -> Row:
    """Run the case's parts in turn, `rounds` times after one unmeasured; ratios are of medians.
    No rounds: once, and that is measured. A round more shows what a row off its target does.

    A ratio is how much better we are: ours over theirs, or theirs over ours where less is better.
    """
    figures: dict[str, list[float]] = {name: [] for name in ("ours", "limit", "peer")}
    rounds = min(rounds, case.rounds)
    for round_ in range(rounds + 1 if case.ours else 0):
        for name, part in (("ours", case.ours), ("limit", case.limit), ("peer", case.peer)):
            if part is not None:
                figure = part()
                if round_ or not rounds:
                    figures[name].append(figure)
    middle = {name: statistics.median(values) for name, values in figures.items() if values}
    ours = middle.get("ours")
    ratios = {name: _ratio(case.unit, ours, middle.get(name)) for name in ("limit", "peer")}
    met = _met(case, ours, ratios)
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
        spread=(max(figures["ours"]) - min(figures["ours"])) / ours if ours else None,
        target=case.target,
        of=case.of,
        met=met,
        why=case.why,
        spent=_spent(case.ours) if case.ours is not None and met is False else {},
    )


def _spent(ours: Measure) -> dict[str, float]:
    with Sampler() as sampler:
        ours()
    return sampler.shares()


def _ratio(unit: str, ours: float | None, theirs: float | None) -> float | None:
    if not ours or not theirs:
        return None
    return theirs / ours if unit in LESS_IS_BETTER else ours / theirs


def _met(case: Case, ours: float | None, ratios: dict[str, float | None]) -> bool | None:
    if case.target is None or ours is None:
        return None
    if case.of == "ours":
        return ours <= case.target if case.unit in LESS_IS_BETTER else ours >= case.target
    ratio = ratios[case.of]
    return None if ratio is None else ratio >= case.target


def machine() -> dict[str, Any]:
    """What the figures were measured on, when, and the load of its last quarter of an hour."""
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
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "load": round(os.getloadavg()[2], 2),
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def write_json(path: Path, rows: Iterable[Row]) -> None:
    """Write the rows for `read_json`, a line each: {"machine": {...}, "rows": [...]}."""
    path.write_text(in_lines({"machine": machine()}, map(asdict, rows)))


def in_lines(head: Mapping[str, Any], rows: Iterable[Mapping[str, Any]]) -> str:
    """The JSON of `head` with these `rows`, each on a line of its own."""
    lines = ",\n".join(map(json.dumps, rows))
    return f'{json.dumps(head)[:-1]},\n"rows": [\n{lines}\n]}}\n'


def read_json(path: Path) -> tuple[dict[str, Any], list[Row]]:
    """The machine and the rows of such a file. Raises OSError, ValueError or TypeError."""
    whole = json.loads(path.read_text())
    known = Row.__dataclass_fields__.keys()  # earlier results have more
    rows = [Row(**{key: row[key] for key in known & row.keys()}) for row in whole["rows"]]
    return whole["machine"], rows


HEAD = ("suite", "case", "ours", "limit", "of limit", "peer", "of peer", "target", "spread")


def table(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """The rows as text, under `HEAD`."""
    return [
        (
            row.suite,
            row.case,
            f"{number(row.ours)} {row.unit}" if row.ours is not None else "",
            number(row.limit),
            times(row.of_limit),
            f"{number(row.peer)} {row.peer_name}".strip(),
            times(row.of_peer),
            target(row),
            "" if row.spread is None else f"{row.spread:.0%}",
        )
        for row in rows
    ]


def spent(row: Row) -> str:
    """What a row off its target did with its time, in words."""
    parts = [f"{part:.0%} {kind}" for kind, part in row.spent.items() if part >= 0.02]
    return f"of one round's time {', '.join(parts)}"


COMPARED = ("suite", "case", "then", "now", "better by", "of limit or peer, then", "now", "spread")


def compared(then: Sequence[Row], now: Sequence[Row]) -> list[tuple[str, ...]]:
    """Rows that both runs have, as text, under `COMPARED`. The fifth column says how many times as
    good ours is now; where the machine was faster, the ratios beside it are better evidence."""
    before = {(row.suite, row.case): row for row in then}
    lines: list[tuple[str, ...]] = []
    for row in now:
        old = before.get((row.suite, row.case))
        if old is None or row.ours is None or old.ours is None or old.of != row.of:
            continue
        lines.append(
            (
                row.suite,
                row.case,
                f"{number(old.ours)} {row.unit}",
                f"{number(row.ours)} {row.unit}",
                times(_ratio(row.unit, row.ours, old.ours)),
                times(old.of_limit or _of_same_peer(old, row)),
                times(row.of_limit or _of_same_peer(row, old)),
                f"{max(old.spread or 0, row.spread or 0):.0%}",
            )
        )
    return lines


def _of_same_peer(row: Row, other: Row) -> float | None:
    return row.of_peer if row.peer_name == other.peer_name else None


def number(value: float | None) -> str:
    """Three digits of a figure; nothing for none."""
    return "" if value is None else f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def times(ratio: float | None) -> str:
    """A ratio, rounded down: one just below its target must not look as if it met it."""
    return "" if ratio is None else f"{math.floor(100 * ratio) / 100:.2f}"


def target(row: Row) -> str:
    """What was aimed at, and whether it was reached."""
    if row.target is None:
        return ""
    verdict = {True: "met", False: "missed", None: "not measured"}[row.met]
    return f"{row.target:.3g} {verdict}"
