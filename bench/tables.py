"""The table of docs/benchmarks.md, made from the results that are committed.

    python -m bench.tables

writes it between the two markers. Results are `bench/results/<date>-<hardware>.json`, as
`python -m bench all --json` writes them; of each hardware the newest is a column. The rows are
those of `SHOWN`; a result has all others.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from bench.report import Row, number, read_json, times

CHECKOUT = Path(__file__).parents[1]
RESULTS = CHECKOUT / "bench" / "results"
PAGE = CHECKOUT / "docs" / "benchmarks.md"
BEGIN, END = "<!-- measured: python -m bench.tables -->", "<!-- /measured -->"
_DATE = len("2026-01-01-")
SHOWN = {
    "cpu: gather, beside memcpy": ("cpu", "gather *"),
    "cpu: scatter, beside memcpy": ("cpu", "scatter *"),
    "cpu: load end to end, beside the gather": ("cpu", "CPU tier load *"),
    "decide 8,192 blocks in cpu, p99": ("scheduler", "decide *, in cpu, *: p99"),
    "decide 8,192 blocks on disk, p99": ("scheduler", "decide *, on disk, * p99"),
    "look 8,192 blocks up remotely: begin and poll": ("scheduler", "look *"),
    "scheduler's step, 8 encrypted ranks, 50,000 stores": ("steps", "scheduler, 8 *, encrypted*"),
    "disk: store, buffered, beside memcpy": ("disk", "store, buffered, *"),
    "disk: warm load, beside memcpy": ("disk", "warm load, buffered, *"),
    "disk: store beside a file per block": ("disk", "store, buffered beside *"),
    "disk: warm load beside a file per block": ("disk", "warm load beside file *"),
    "disk: store beside vLLM's fs tier": ("disk", "store beside vLLM*"),
    "disk: warm load beside vLLM's fs tier": ("disk", "warm load beside vLLM*"),
    "disk: direct store beside a raw loop": ("disk", "store, direct, *"),
    "disk: direct load beside a raw loop": ("disk", "load, direct, *"),
    "disk: random load, more than memory": ("disk", "random load, more than memory, *"),
    "TTFT, cpu, beside the engine's own cache": ("e2e", "TTFT, 1000 tokens from cpu *"),
    "TTFT, disk, beside the engine's own cache": ("e2e", "TTFT, 1000 tokens from disk *"),
    "throughput without hits, beside no connector": ("e2e", "throughput, * no connector"),
    "redis: store beside a raw socket": ("remote", "store 64 blocks of 2048 KiB"),
    "redis: load beside a raw socket": ("remote", "load 64 blocks of 2048 KiB"),
    "redis: load beside LMCache": ("remote", "load 64 blocks of 2048 KiB, LMCache"),
    "redis: load of 64 KiB beside LMCache": ("remote", "load 64 blocks of 64 KiB, LMCache"),
    "shared: load beside plain reads": ("objects", "shared: load blocks of 2048 KiB, *"),
    "object: load beside plain reads": ("objects", "load blocks of 2048 KiB, *"),
}
"""What the table calls a row, and its suite and case in a result (`*` stands for anything)."""


def newest(folder: Path = RESULTS) -> list[Path]:
    """The newest result of each hardware."""
    found = {path.stem[_DATE:]: path for path in sorted(folder.glob("*-*-*-*.json"))}
    return list(found.values())


def section(results: Sequence[Path]) -> str:
    """What belongs between the markers, for these results."""
    heads = [f"[{path.stem}](../bench/results/{path.name})" for path in results]
    measured = [read_json(path)[1] for path in results]
    lines = [["case", "target", *heads], ["---"] * (2 + len(heads))]
    for name in SHOWN:
        found = [row_of(name, rows) for rows in measured]
        if known := [row for row in found if row is not None]:
            cells = ("" if row is None else _cell(row) for row in found)
            lines.append([name, _target(known[-1]), *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def row_of(name: str, rows: Sequence[Row]) -> Row | None:
    """The row that the table calls so, if it has a target and was measured."""
    suite, case = SHOWN[name]
    aimed = (row for row in rows if row.target is not None and row.ours is not None)
    return next((r for r in aimed if r.suite == suite and fnmatchcase(r.case, case)), None)


def _cell(row: Row) -> str:
    """The ratio, where the target is one, and the figure."""
    missed = ", missed" if row.met is False else ""
    figure = f"{number(row.ours)} {row.unit}"
    if row.of == "ours":
        return f"{figure}{missed}"
    return f"{times(row.of_peer if row.of == 'peer' else row.of_limit)}{missed} ({figure})"


def _target(row: Row) -> str:
    """A ratio, or a figure in the case's unit."""
    if row.of != "ours":
        return f"{row.target:.2g}"
    return f"{row.target:.3g} {row.unit}"


def put_in(text: str, new: str, begin: str = BEGIN, end: str = END) -> str:
    """A page with this between its markers. Raises ValueError when it lacks them."""
    head, begun, rest = text.partition(begin)
    _, ended, tail = rest.partition(end)
    if not begun or not ended:
        raise ValueError(f"there is no {begin} ... {end}")
    return f"{head}{begin}\n{new}\n{end}{tail}"


def main() -> int:
    """The command."""
    PAGE.write_text(put_in(PAGE.read_text(), section(newest())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
