"""The dashboard is what its script writes, and what Grafana's own model of a dashboard knows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from deploy.grafana.dashboard import FILE, text


def test_the_dashboard_is_written_anew_after_a_change() -> None:
    assert FILE.read_text() == text(), "python -m deploy.grafana.dashboard"


def test_panels_are_about_twenty_and_lie_beside_each_other() -> None:
    panels = json.loads(FILE.read_text())["panels"]
    places = [panel["gridPos"] for panel in panels]
    cells = {(x, y) for at in places for x in range(at["x"], at["x"] + at["w"]) for y in [at["y"]]}
    assert 18 <= len(panels) <= 24 and len(cells) == 8 * len(panels)
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_the_dashboard_keeps_to_grafanas_model() -> None:
    """By Grafana's Foundation SDK: what its model of a dashboard does not know, it drops."""
    cog = pytest.importorskip("grafana_foundation_sdk.cog.plugins")
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models.dashboard import Dashboard

    cog.register_default_plugins()
    board = json.loads(FILE.read_text())

    def kept(board: dict[str, Any]) -> Any:
        return json.loads(JSONEncoder(sort_keys=True).encode(Dashboard.from_json(board)))

    assert list(_lost(board, kept(board))) == []
    board["panels"][0]["options"]["shwoValue"] = "never"
    assert list(_lost(board, kept(board))) == [".panels[0].options.shwoValue"]


def _lost(written: Any, kept: Any, place: str = "") -> Iterator[str]:
    """Where `kept` is not what was `written`."""
    if isinstance(written, dict) and isinstance(kept, dict):
        for key, value in written.items():
            yield from _lost(value, kept.get(key), f"{place}.{key}")
    elif isinstance(written, list) and isinstance(kept, list) and len(written) == len(kept):
        for number, (before, after) in enumerate(zip(written, kept, strict=True)):
            yield from _lost(before, after, f"{place}[{number}]")
    elif written != kept:
        yield place
