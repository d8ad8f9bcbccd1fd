"""The README's table of measurements, made from the results that are committed.

    python -m bench.readme

writes it between the two markers. Results are `bench/results/<date>-<hardware>.json`, as
`kvtiers bench all --json` writes them; of each hardware the newest counts. A picture of the same
name (`python -m bench.plot RESULT --png`) is shown below its table.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.report import Row, number, read_json, target, times

CHECKOUT = Path(__file__).parents[1]
RESULTS = CHECKOUT / "bench" / "results"
README = CHECKOUT / "README.md"
BEGIN, END = "<!-- measured: python -m bench.readme -->", "<!-- /measured -->"
_DATE = len("2026-01-01-")


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
    parts = [_headline(path, machine), _table(measured)]
    missed = [row for row in measured if row.met is False and row.why]
    if missed:
        parts.append("Missed:\n\n" + "\n".join(f"- {_name(row)}: {row.why}." for row in missed))
    absent = [row for row in aimed if row.ours is None]
    if absent:
        lines = "\n".join(f"- {_name(row)}: {row.why}." for row in absent)
        parts.append(f"Not measured there:\n\n{lines}")
    picture = path.with_suffix(".png")
    if picture.exists():
        parts.append(f"![{path.stem}](bench/results/{picture.name})")
    return "\n\n".join(parts)


def _headline(path: Path, machine: dict[str, Any]) -> str:
    chip = machine["gpu"] or machine["cpu"]
    link = f"[{path.stem}](bench/results/{path.name})"
    return (
        f"{chip}, {machine['cores']} cores, load {machine['load']}: {link}, {machine['date']}. "
        "Figures are medians; `of` is how much of the limit's or times the peer's."
    )


def _table(rows: Sequence[Row]) -> str:
    lines = ["| what | ours | beside | of | target |", "|---|---|---|---|---|"]
    for row in rows:
        beside, ratio = _beside(row)
        ours = f"{number(row.ours)} {row.unit}"
        lines.append(f"| {_name(row)} | {ours} | {beside} | {ratio} | {_verdict(row)} |")
    return "\n".join(lines)


def _name(row: Row) -> str:
    return f"{row.suite}: {row.case}"


def _beside(row: Row) -> tuple[str, str]:
    if row.of == "ours":
        return "", ""
    if row.of == "peer":
        return f"{row.peer_name} {number(row.peer)}".strip(), times(row.of_peer)
    return number(row.limit), times(row.of_limit)


def _verdict(row: Row) -> str:
    """An absolute target has the figure's unit."""
    return target(row) if row.of != "ours" else target(row).replace(" ", f" {row.unit} ", 1)


def put_in(text: str, new: str) -> str:
    """A README with this between its markers. Raises ValueError when it lacks them."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"there is no {BEGIN} ... {END}")
    return f"{head}{BEGIN}\n{new}\n{END}{tail}"


def main() -> int:
    """The command."""
    README.write_text(put_in(README.read_text(), section(newest())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
