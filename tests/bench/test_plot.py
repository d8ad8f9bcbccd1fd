"""Curves of a result, as the terminal shows them."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.plot import in_terminal, lines, main
from bench.report import Case, Point, Row, measure, write_json


def rows() -> list[Row]:
    sizes = (1 << 16, 1 << 20, 1 << 23)
    points = [
        ("store", name, size, size / 2**20 * factor)
        for name, factor in (("cpu", 2.0), ("disk", 1.0))
        for size in sizes
    ]
    points.append(("ttft", "cpu", 1000, 90.0))
    cases = [
        Case("s", f"{plot} {name} {x}", "", lambda y=y: y, point=Point(plot, name, x))  # type: ignore[misc]
        for plot, name, x, y in points
    ]
    absent = Case("s", "not here", "", None, point=Point("store", "gpu", 1 << 20))
    return [measure(case, 0) for case in [*cases, absent]]


def test_the_terminal_shows_each_line_with_its_mark() -> None:
    text = in_terminal(rows())
    assert "Stores, by block size" in text
    assert "64 KiB" in text
    assert "8 MiB" in text
    assert "o cpu  x disk" in text
    assert "gpu" not in text, "it was not measured"
    top = next(line for line in text.splitlines() if "16 |" in line)
    assert top.rstrip().endswith("o"), "the largest store of the fastest tier is in its corner"


def test_a_result_that_was_written_can_be_plotted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = tmp_path / "out.json"
    write_json(result, rows())
    assert main([str(result)]) == 0
    assert "Time to the first token" in capsys.readouterr().out
    assert lines(rows(), "store")["cpu"][0] == (1 << 16, 0.125)
    assert main([str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err
