"""The benches of what tuning simulates run over a few requests of made-up agents."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import agreement, links, regret, traffic
from spec.chain import LOAD_POLICIES


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(f"{json.dumps(one)}\n" for one in traffic.agents(8)))
    return file


def test_a_simulation_beside_real_stores(trace: Path, tmp_path: Path) -> None:
    agreement.main([str(trace), "--requests", "4", "--json", str(tmp_path / "rows")])
    rows = json.loads((tmp_path / "rows").read_text())["rows"]
    assert [(row["world"], row["policy"]) for row in rows] == [
        (world, policy) for world in agreement.WORLDS for policy in LOAD_POLICIES
    ]
    for row in rows:
        assert row["hits"]["own"][0] == row["hits"]["own"][1] > 0, "few enough for the engine's own"


def test_policies_over_links(trace: Path, tmp_path: Path) -> None:
    cases = [name for name, case in links.CASES.items() if not case.is_agentic]  # those make more
    for asked in (["--case", *cases], ["--case", "NVMe", "--real", "NVMe"]):
        links.main([str(trace), *asked, "--requests", "4", "--json", str(tmp_path / "rows")])
        rows = json.loads((tmp_path / "rows").read_text())
        assert {row["case"] for row in rows} == {name for name in asked if name in links.CASES}
        assert all(min(row["seconds"].values()) > 0 for row in rows)


def test_what_is_chosen_beside_chains_by_hand(trace: Path, tmp_path: Path) -> None:
    few = ["--chains", "4", "--processes", "1", "--json", str(tmp_path / "rows")]
    assert regret.main([str(trace), *few]) == 0
    rows = json.loads((tmp_path / "rows").read_text())["rows"]
    assert {row["profile"] for row in rows} == {*regret.PROFILES}
    assert all(row["ttft_mean"] > 0 for row in rows)
