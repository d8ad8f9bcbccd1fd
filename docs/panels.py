"""Draw the panels of the Grafana dashboard from what a Prometheus answers: docs/dashboard.png.

`python -m docs.panels http://localhost:9090 --minutes 5`. A query is asked as Grafana asks it; the
look is matplotlib's.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot
from PIL import Image

ROOT = Path(__file__).parent.parent
BOARD = ROOT / "deploy" / "grafana" / "kvtiers.json"
COLUMNS = 3
STEPS = 120
"""Points of a series."""
MOST_LINES = 6
"""Of a legend; the rest is drawn without a name."""
FORMATS = {
    "percentunit": lambda value, _: f"{value:.0%}",
    "s": lambda value, _: f"{value:,.3g} s" if value >= 1 else f"{value * 1e3:,.3g} ms",
    "bytes": lambda value, _: f"{value / (1 << 20):,.3g} MiB",
    "Bps": lambda value, _: f"{value / (1 << 20):,.3g} MiB/s",
    "short": lambda value, _: f"{value:,.3g}",
}


def series(prometheus: str, query: str, end: float, minutes: float) -> list[dict[str, Any]]:
    """What a range query answers: labels and points of each series."""
    asked = {"query": query, "start": end - 60 * minutes, "end": end, "step": minutes * 60 / STEPS}
    url = f"{prometheus}/api/v1/query_range?{urllib.parse.urlencode(asked)}"
    with urllib.request.urlopen(url, timeout=60) as answer:
        found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
    return found


def named(legend: str, labels: dict[str, str]) -> str:
    """A legend as Grafana fills it in."""
    for label in ("alertname", "instance", "engine", "tier", "state", "tenant"):
        legend = legend.replace("{{" + label + "}}", labels.get(label, ""))
    return " ".join(legend.split())


def draw(prometheus: str, minutes: float, out: Path) -> None:
    """Draw all panels. `prometheus`: its URL. `minutes`: how far back."""
    panels = json.loads(BOARD.read_text())["panels"]
    rows = math.ceil(len(panels) / COLUMNS)
    figure, axes = pyplot.subplots(rows, COLUMNS, figsize=(15, 2.1 * rows), layout="constrained")
    now = time.time()
    for axis, panel in zip(axes.flat, panels, strict=False):
        _panel(axis, panel, prometheus, now, minutes)
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    picture = io.BytesIO()
    figure.savefig(picture, dpi=64)
    Image.open(picture).convert("RGB").quantize(64).save(out, optimize=True)


def _panel(axis: Any, panel: dict[str, Any], prometheus: str, now: float, minutes: float) -> None:
    chosen = {"$__rate_interval": "30s", "$model": ".*", "$instance": ".*", "$tier": ".*"}
    lines: list[tuple[str, list[float], list[float]]] = []
    for target in panel["targets"]:
        query = target["expr"]
        for variable, value in chosen.items():
            query = query.replace(variable, value)
        for one in series(prometheus, query, now, minutes):
            times = [at - now for at, _ in one["values"]]
            values = [float(value) for _, value in one["values"]]
            lines.append((named(target["legendFormat"], one["metric"]), times, values))
    axis.set_title(panel["title"], fontsize=10, loc="left")
    axis.tick_params(labelsize=7)
    axis.set_xlim(-60 * minutes, 0)
    axis.set_xticks([-60 * minutes * part / 4 for part in range(5)])
    axis.xaxis.set_major_formatter(lambda at, _: f"{at + 0.0:.0f} s")
    if panel["type"] == "state-timeline":
        _timeline(axis, sorted(lines))
        return
    drawn = panel["fieldConfig"]["defaults"]["custom"]
    if drawn.get("stacking"):
        _stack(axis, lines)
    else:
        for place, (name, times, values) in enumerate(lines):
            axis.plot(times, values, linewidth=1, label=name if place < MOST_LINES else None)
    if drawn.get("scaleDistribution"):
        axis.set_yscale("log")
    elif axis.get_ylim()[0] > 0:
        axis.set_ylim(bottom=0)
    axis.yaxis.set_major_formatter(FORMATS[panel["fieldConfig"]["defaults"]["unit"]])
    if lines:
        axis.legend(fontsize=6, loc="upper left", ncols=2, frameon=False)


def _timeline(axis: Any, lines: list[tuple[str, list[float], list[float]]]) -> None:
    for place, (_, times, _) in enumerate(lines):
        axis.plot(times, [place] * len(times), "s", markersize=4)
    axis.set_yticks(range(len(lines)), [name for name, _, _ in lines], fontsize=6)
    axis.set_ylim(-1, len(lines))


def _stack(axis: Any, lines: list[tuple[str, list[float], list[float]]]) -> None:
    times = sorted({at for _, each, _ in lines for at in each})
    below = [0.0] * len(times)
    for name, each, values in lines:
        there = dict(zip(each, values, strict=True))
        top = [low + there.get(at, 0.0) for low, at in zip(below, times, strict=True)]
        axis.fill_between(times, below, top, alpha=0.5, label=name)
        below = top


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prometheus")
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "dashboard.png")
    options = parser.parse_args()
    draw(options.prometheus, options.minutes, options.out)
