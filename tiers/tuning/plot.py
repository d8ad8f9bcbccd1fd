"""Curves as a plot in the terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 64, 16
"""Of a plot in the terminal, in characters."""
SIGNS = "ox+*#@%&"
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Plot:
    """Lines over a logarithmic x, with y from 0 up."""

    title: str
    x_name: str
    lines: Mapping[str, Points]
    x_text: Callable[[float], str]
    """How to write an x."""
    y_text: Callable[[float], str]
    marks: Mapping[str, float]
    """Values of x to show, by name."""


def in_terminal(plot: Plot) -> str:
    """The plot as text: each line with a sign of its own, each mark as a column of `|`."""
    xs = sorted({x for points in plot.lines.values() for x, _ in points} | set(plot.marks.values()))
    high = max((y for points in plot.lines.values() for _, y in points), default=0.0)
    canvas = [[" "] * WIDTH for _ in range(HEIGHT)]

    def column(x: float) -> int:
        return round(_place(math.log(x), math.log(xs[0]), math.log(xs[-1])) * (WIDTH - 1))

    for x in plot.marks.values():
        for row in canvas:
            row[column(x)] = "|"
    for sign, points in reversed(list(zip(SIGNS, plot.lines.values(), strict=False))):
        for x, y in points:
            canvas[HEIGHT - 1 - round(_place(y, 0, high) * (HEIGHT - 1))][column(x)] = sign
    sides = {0: plot.y_text(high), HEIGHT - 1: plot.y_text(0)}
    body = [f"{sides.get(i, ''):>7} |{''.join(row).rstrip()}" for i, row in enumerate(canvas)]
    first, last = plot.x_text(xs[0]), plot.x_text(xs[-1])
    axis = f"{'':8}{first}{plot.x_name:^{WIDTH - len(first) - len(last)}}{last}"
    legend = "  ".join(f"{sign} {name}" for sign, name in zip(SIGNS, plot.lines, strict=False))
    marks = "".join(f"  | {name} {plot.x_text(x)}" for name, x in plot.marks.items())
    return "\n".join([plot.title, *body, axis, f"{'':8}{legend}{marks}"])


def _place(value: float, low: float, high: float) -> float:
    """Where between them, 0 to 1."""
    return (value - low) / (high - low) if high > low else 0.0
