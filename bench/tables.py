"""The tables of docs/benchmarks.md, made from the results that are committed.

    python -m bench.tables

writes them between the two markers. Results are `bench/results/<date>-<hardware>.json`, as
`kvtiers bench all --json` writes them; of each hardware the newest counts. A picture of the same
name (`python -m bench.plot RESULT --png`) is shown below its tables. What `kvtiers bench disk
--blocks N` wrote is `bench/results/index/<date>-<hardware>-<N>.json`, and what `python -m
bench.turns` wrote is `bench/results/turns/<date>-<hardware>.json`; both get tables of their own.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from bench.report import COMPARED, LESS_IS_BETTER, Row, number, read_json, times
from bench.turns import aimed

CHECKOUT = Path(__file__).parents[1]
RESULTS = CHECKOUT / "bench" / "results"
PAGE = CHECKOUT / "docs" / "benchmarks.md"
BEGIN, END = "<!-- measured: python -m bench.tables -->", "<!-- /measured -->"
INDEX = "<!-- index: python -m bench.tables -->", "<!-- /index -->"
TURNS = "<!-- turns: python -m bench.tables -->", "<!-- /turns -->"
_DATE = len("2026-01-01-")
_HEAD = """\
| case | ours | beside | ratio | target | verdict | spread | what it spent |
|---|---|---|---|---|---|---|---|"""
_TOLD = 0.05
"""A smaller part of a row's time is not told."""


def newest(folder: Path = RESULTS) -> list[Path]:
    """The newest result of each hardware."""
    found = {path.stem[_DATE:]: path for path in sorted(folder.glob("*-*-*-*.json"))}
    return list(found.values())


def section(results: Sequence[Path]) -> str:
    """What belongs between the markers, for these results."""
    return "\n\n".join(_of_one(path) for path in results) or "No result is committed yet."


def _of_one(path: Path) -> str:
    machine, rows = read_json(path)
    aimed = [row for row in rows if row.target is not None]
    measured = [row for row in aimed if row.ours is not None]
    parts = [_headline(path, machine)]
    for suite, of_suite in groupby(measured, key=lambda row: row.suite):
        lines = "\n".join(map(_line, of_suite))
        parts.append(f"#### {suite}\n\n{_HEAD}\n{lines}")
    absent = [row for row in aimed if row.ours is None]
    if absent:
        lines = "\n".join(f"- {row.suite}: {row.case}: {row.why}." for row in absent)
        parts.append(f"#### Not measured there\n\n{lines}")
    picture = path.with_suffix(".png")
    if picture.exists():
        parts.append(f"![{path.stem}](../bench/results/{picture.name})")
    return "\n\n".join(parts)


def index_section(folder: Path = RESULTS / "index") -> str:
    """What belongs between the markers of the index: a column for each number of blocks."""
    found: dict[str, dict[int, Path]] = {}
    for path in sorted(folder.glob("*-*-*-*.json")):
        hardware, _, blocks = path.stem[_DATE:].rpartition("-")
        found.setdefault(hardware, {})[int(blocks)] = path
    return "\n\n".join(_of_sizes(sizes) for sizes in found.values())


def _of_sizes(sizes: dict[int, Path]) -> str:
    columns, heads = [], []
    for blocks, path in sorted(sizes.items()):
        machine, rows = read_json(path)
        heads.append(f"[{blocks:,}](../bench/results/index/{path.name})")
        columns.append({row.case.replace(f"{blocks:,} ", ""): _cell(row) for row in rows})
    lines = [
        f"| {' | '.join((case, *(column.get(case, '') for column in columns)))} |"
        for case in columns[-1]
    ]
    head = f"| | {' | '.join(heads)} |\n|---{'|---' * len(heads)}|"
    told = f"{machine['cpu']}, {machine['cores']} cores, load {machine['load']}, {machine['date']}:"
    return "\n".join((told, "", head, *lines))


def turns_section(folder: Path = RESULTS / "turns") -> str:
    """What belongs between the markers of the turns: cases that have a target, then and now."""
    return "\n\n".join(map(_of_turns, newest(folder)))


def _of_turns(path: Path) -> str:
    result = json.loads(path.read_text())
    machine, then, now = result["machine"], result["then"], result["now"]
    told = (
        f"[{path.stem}](../bench/results/turns/{path.name}): {machine['cpu']}, {machine['cores']} "
        f"cores, {machine['date']}; {then['commit']} then and {now['commit']} now, "
        f"{result['turns']} turns."
    )
    lines = [COMPARED, ("---",) * len(COMPARED), *aimed(result)]
    return "\n".join((told, "", *(f"| {' | '.join(line)} |" for line in lines)))


def _cell(row: Row) -> str:
    beside = f" ({row.peer_name} {number(row.peer)})" if row.peer else ""
    beside += f" (limit {number(row.limit)})" if row.limit else ""
    return f"{number(row.ours)} {row.unit}{beside}"


def _headline(path: Path, machine: dict[str, Any]) -> str:
    chip = machine["gpu"] or machine["cpu"]
    link = f"[{path.stem}](../bench/results/{path.name})"
    return (
        f"### {path.stem}\n\n"
        f"{chip}, {machine['cores']} cores, load {machine['load']}, {machine['date']}: {link}."
    )


def _line(row: Row) -> str:
    beside, ratio = _beside(row)
    cells = (
        row.case,
        f"{number(row.ours)} {row.unit}",
        beside,
        ratio,
        _target(row),
        {True: "met", False: "missed", None: "not compared"}[row.met],
        "" if row.spread is None else f"{row.spread:.0%}",
        ", ".join(f"{kind} {part:.0%}" for kind, part in row.spent.items() if part >= _TOLD),
    )
    return f"| {' | '.join(cells)} |"


def _beside(row: Row) -> tuple[str, str]:
    if row.of == "ours":
        return "", ""
    if row.of == "peer":
        return f"{row.peer_name} {number(row.peer)}".strip(), times(row.of_peer)
    peer = f"; {row.peer_name} {number(row.peer)} ({times(row.of_peer)})" if row.peer else ""
    return f"limit {number(row.limit)}{peer}", times(row.of_limit)


def _target(row: Row) -> str:
    """A ratio, or a figure in the case's unit."""
    if row.of != "ours":
        return f"{row.target:.3g}"
    bound = "at most" if row.unit in LESS_IS_BETTER else "at least"
    return f"{bound} {row.target:.3g} {row.unit}"


def put_in(text: str, new: str, begin: str = BEGIN, end: str = END) -> str:
    """A page with this between its markers. Raises ValueError when it lacks them."""
    head, begun, rest = text.partition(begin)
    _, ended, tail = rest.partition(end)
    if not begun or not ended:
        raise ValueError(f"there is no {begin} ... {end}")
    return f"{head}{begin}\n{new}\n{end}{tail}"


def main() -> int:
    """The command."""
    text = put_in(PAGE.read_text(), section(newest()))
    text = put_in(text, index_section(), *INDEX)
    PAGE.write_text(put_in(text, turns_section(), *TURNS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
