"""The generated pages of docs/ say what the code says."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from docs import compatibility
from docs.reference import PAGES
from spec.schema import chain_schema
from tests.support import compatibility as support


@pytest.mark.parametrize(("page", "make"), PAGES.items(), ids=lambda one: getattr(one, "stem", ""))
def test_a_page_is_as_it_is_generated(page: Path, make: Callable[[], str]) -> None:
    assert page.read_text() == make(), "run python -m docs.reference"


def test_every_part_that_the_schema_refers_to_is_there() -> None:
    schema = chain_schema()
    names = set(re.findall(r'"#/\$defs/([^"]+)"', json.dumps(schema)))
    assert names and names <= set(schema["$defs"])


def test_the_compatibility_page_shows_what_was_measured_and_what_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = next(iter(compatibility.SERVED))
    monkeypatch.setattr(support, "engine_version", lambda: compatibility.VERSIONS[0])
    monkeypatch.setattr(compatibility, "RECORD", tmp_path / "record.json")
    cells = support.Cells(compatibility.RECORD)
    cells.loaded(kind, "TP 1", {"cpu": 1728.0, "disk": 64})
    cells.refused(kind, "it is odd", "TP 2")
    cells.refused("odd layers", "they are odd")
    *_, page = compatibility.page().split(f"## vLLM {compatibility.VERSIONS[0]}\n")
    assert "| 1,728 | 64 | not run | refused | refused | refused |" in page
    assert page.count("| odd layers |") == 1
    assert f"| odd layers | {compatibility.VERSIONS[0]} | they are odd |" in page


@pytest.mark.parametrize("tokens", [{}, {"cpu": 0}])
def test_a_cell_without_a_load_is_no_cell(tmp_path: Path, tokens: dict[str, float]) -> None:
    with pytest.raises(AssertionError):
        support.Cells(tmp_path / "record.json").loaded("full attention", "TP 1", tokens)


def test_all_that_was_recorded_is_shown() -> None:
    found = compatibility.record()
    columns = {f"{tier}, {r}" for tier in compatibility.TIERS for r in compatibility.RANKS}
    assert found.keys() <= set(compatibility.VERSIONS)
    for kinds in found.values():
        for kind, cells in kinds.items():
            measured = {name for name, value in cells.items() if isinstance(value, int)}
            if kind == "conversations":
                assert measured == {"prompts", "ours", "theirs"}
                continue
            assert measured <= columns and (not measured or kind in compatibility.SERVED), kind
