"""The points of a result as plots in the terminal.

python -m bench.plot RESULT.json
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.report import Row, number, read_json

WIDTH, HEIGHT = 64, 14
"""Of a plot in the terminal, in characters."""
MARKS = "ox+*#@%&"
Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Plot:
    """What a plot shows; both axes may be logarithmic. `x_text`: how to write an x."""

    title: str
    x_name: str
    y_name: str
    log_y: bool
    x_text: Callable[[float], str]


def _size(x: float) -> str:
    return f"{x / 2**20:g} MiB" if x >= 2**20 else f"{x / 2**10:g} KiB"


PLOTS = {
    "store": Plot("Stores, by block size", "block", "GB/s", False, _size),
    "load": Plot("Loads, by block size", "block", "GB/s", False, _size),
    "ttft": Plot("Time to the first token", "prompt tokens", "ms", True, "{:g}".format),
    "hits": Plot("Blocks served, by room", "% of all blocks", "% of blocks", False, "{:g}".format),
}


def lines(rows: Sequence[Row], plot: str) -> dict[str, Points]:
    """The points of one plot's lines, by x."""
    found: dict[str, Points] = {}
    for row in rows:
        if row.point is not None and row.point.plot == plot and row.ours is not None:
            found.setdefault(row.point.line, []).append((row.point.x, row.ours))
    return {name: sorted(points) for name, points in found.items()}


def in_terminal(rows: Sequence[Row]) -> str:
    """All plots that there are points for, as text."""
    found = [(plot, lines(rows, name)) for name, plot in PLOTS.items()]
    return "\n\n".join(_as_text(plot, curves) for plot, curves in found if curves)


def _as_text(plot: Plot, curves: dict[str, Points]) -> str:
    scale_y = math.log if plot.log_y else float
    xs = sorted({x for points in curves.values() for x, _ in points})
    ys = [y for points in curves.values() for _, y in points]
    low, high = (min(ys) if plot.log_y else 0.0), max(ys)
    canvas = [[" "] * WIDTH for _ in range(HEIGHT)]

    def column(x: float) -> int:
        return round(_place(math.log(x), math.log(xs[0]), math.log(xs[-1])) * (WIDTH - 1))

    for mark, points in zip(MARKS, curves.values(), strict=False):
        for x, y in points:
            up = round(_place(scale_y(y), scale_y(low), scale_y(high)) * (HEIGHT - 1))
            canvas[HEIGHT - 1 - up][column(x)] = mark
    sides = {0: number(high), HEIGHT - 1: number(low)}
    body = [f"{sides.get(i, ''):>7} |{''.join(line)}" for i, line in enumerate(canvas)]
    first, last = plot.x_text(xs[0]), plot.x_text(xs[-1])
    axis = f"{'':8}{first}{plot.x_name:^{WIDTH - len(first) - len(last)}}{last}"
    legend = "  ".join(f"{mark} {name}" for mark, name in zip(MARKS, curves, strict=False))
    return "\n".join([f"{plot.title}, {plot.y_name}", *body, axis, f"{'':8}{legend}"])


def _place(value: float, low: float, high: float) -> float:
    """Where between them, 0 to 1."""
    return (value - low) / (high - low) if high > low else 0.0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m bench.plot", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("result", type=Path, help="what python -m bench --json wrote")
    options = parser.parse_args(arguments)
    try:
        print(in_terminal(read_json(options.result)[1]))
    except (OSError, ValueError, TypeError, KeyError) as error:
        print(f"{options.result}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
