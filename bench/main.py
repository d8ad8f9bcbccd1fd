"""The benchmarks, by suite: see `python -m bench --help`."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

from bench.report import (
    COMPARED,
    HEAD,
    Case,
    Row,
    compared,
    measure,
    spent,
    table,
    write_json,
)
from tiers.errors import TierUnusable

SUITES = (
    "codec",
    "cpu",
    "gpu",
    "eviction",
    "scheduler",
    "steps",
    "disk",
    "inside",
    "e2e",
    "remote",
    "objects",
    "lookups",
    "data",
)


@dataclass(frozen=True)
class Scale:
    """How much a suite measures. `smoke`: only that everything runs, in seconds. `folder`: an
    empty one, for what suites write; each gets one of its own in it. `blocks`: of the suite disk
    only the index is measured, one of so many."""

    smoke: bool
    folder: Path
    rounds: int = 5
    blocks: int | None = None


REST = "the rest of the suite"
"""The case of a row about what a suite could not measure."""
Suite = Callable[[Scale, ExitStack], Generator[Case, None, None]]
"""What a suite's module has as `cases`; the stack ends what it starts."""


def run(
    names: Sequence[str], scale: Scale, note: Callable[[str], None], json_file: Path | None = None
) -> list[Row]:
    """Measure the suites' cases, one by one; the JSON is written after each suite, so that one that
    fails costs no other before it. What a suite can't measure here, since a package is missing or a
    tier can't be used, is a row that says why. Raises KeyError for a suite there is none of."""
    rows: list[Row] = []
    began = time.monotonic()
    for name in names:
        if name not in SUITES:
            raise KeyError(name)
        folder = scale.folder / name
        folder.mkdir()
        here = replace(scale, folder=folder)
        try:
            cases: Suite = import_module(f"bench.{name}").cases
            with ExitStack() as stack, closing(cases(here, stack)) as found:
                for case in found:
                    note(f"{time.monotonic() - began:4.0f} s  {case.suite}: {case.case}")
                    rows.append(measure(case, 0 if scale.smoke else scale.rounds))
        except (ModuleNotFoundError, TierUnusable) as error:
            note(f"{time.monotonic() - began:4.0f} s  {name}: {REST} can't be measured: {error}")
            rows.append(measure(Case(name, REST, "", None, why=str(error)), 0))
        if json_file is not None:
            write_json(json_file, rows)
    return rows


def show(rows: Sequence[Row], before: Sequence[Row] | None = None) -> None:
    """Print the table, what rows off their target did with their time, why others were not
    measured, and what has changed since the run `before`."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=180)
    tables: list[tuple[tuple[str, ...], list[tuple[str, ...]]]] = [(HEAD, table(rows))]
    if before is not None:
        tables.append((COMPARED, compared(before, rows)))
    for head, lines in tables:
        grid = Table(*head, box=None)
        for line in lines:
            grid.add_row(*line)
        console.print(grid)
    for row in rows:
        if row.ours is None:
            console.print(f"{row.suite}, {row.case}: not measured: {row.why}", soft_wrap=True)
        elif row.spent:
            console.print(f"{row.suite}, {row.case}: {spent(row)}", soft_wrap=True)
