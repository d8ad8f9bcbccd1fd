"""The benchmarks of two checkouts in turn: what a change gained, on one machine within an hour.

    python -m bench.turns ../before cpu disk remote --turns 3 --json result.json

Each turn is `python -m bench` of the other checkout and then of this one, each in a process of its
own. Of a case that both have, the table shows medians over the turns. The ratio to the limit or
peer is of the same turn, so it is better evidence than the rates where the machine is not steady.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench.report import COMPARED, Row, compared, machine, read_json

CHECKOUT = Path(__file__).parents[1]


def run(checkout: Path, suites: Sequence[str], rounds: int, json_file: Path) -> list[Row]:
    """Run the benchmarks of a checkout. Raises subprocess.CalledProcessError."""
    path = os.pathsep.join(filter(None, [str(checkout), os.environ.get("PYTHONPATH")]))
    options = ["--rounds", str(rounds), "--json", str(json_file)]
    command = [sys.executable, "-m", "bench", *suites, *options]
    subprocess.run(command, cwd=checkout, env={**os.environ, "PYTHONPATH": path}, check=True)
    return read_json(json_file)[1]


def medians(turns: Sequence[Sequence[Row]]) -> list[Row]:
    """Rows with the medians of the turns' figures and ratios; `spread` is of ours over the turns.
    A case that one turn lacks is left out."""
    by_case = [{(row.suite, row.case): row for row in rows} for rows in turns]
    found = []
    for key, row in by_case[-1].items():
        same = [rows[key] for rows in by_case if key in rows]
        if len(same) == len(turns) and row.ours is not None:
            found.append(_median(same))
    return found


def _median(same: Sequence[Row]) -> Row:
    def middle(name: str) -> float | None:
        figures = [getattr(row, name) for row in same]
        return None if None in figures else statistics.median(figures)

    ours = [row.ours for row in same if row.ours is not None]
    names = ("ours", "limit", "peer", "of_limit", "of_peer")
    spread = (max(ours) - min(ours)) / statistics.median(ours)
    return replace(same[-1], **{name: middle(name) for name in names}, spread=spread)  # type: ignore[arg-type]


def commit(checkout: Path) -> str:
    """The commit that a checkout has."""
    command = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def measure(other: Path, suites: Sequence[str], turns: int, rounds: int) -> dict[str, Any]:
    """`{"machine", "turns", "suites", "then": {"commit", "rows"}, "now": {"commit", "rows"}}`."""
    sides: dict[Path, list[list[Row]]] = {other.resolve(): [], CHECKOUT: []}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(turns):
            for checkout, rows in sides.items():
                rows.append(run(checkout, suites, rounds, Path(folder) / "turn.json"))
    then, now = (
        {"commit": commit(checkout), "rows": [asdict(row) for row in medians(rows)]}
        for checkout, rows in sides.items()
    )
    return {"machine": machine(), "turns": turns, "suites": suites, "then": then, "now": now}


def lines(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """The rows of a result as text, under `COMPARED`."""
    return compared(*_sides(result))


def _sides(result: dict[str, Any]) -> tuple[list[Row], list[Row]]:
    then, now = ([Row(**row) for row in result[side]["rows"]] for side in ("then", "now"))
    return then, now


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("other", type=Path, help="the other checkout, measured first")
    parser.add_argument("suites", nargs="+")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    result = measure(args.other, args.suites, args.turns, args.rounds)
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    for line in (COMPARED, *lines(result)):
        print(" | ".join(line))
    return 0


if __name__ == "__main__":
    sys.exit(main())
