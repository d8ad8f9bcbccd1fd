"""The soak: some seconds of it here, half a minute under `make faults`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SOAK = [sys.executable, "-m", "tests.soak.run"]


def soak(report: Path, *options: str) -> dict[str, int]:
    command = [*SOAK, "--json", str(report), *options]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    found: dict[str, int] = json.loads(report.read_text())
    return found


def assert_clean(report: dict[str, int]) -> None:
    assert set(report) == {
        *("requests", "faults", "changes", "wrong_blocks", "stuck_requests"),
        *("leaked_slots", "leaked_fds", "rss_growth_bytes"),
    }
    assert report["requests"] > 0 and report["faults"] > 0
    bad = ("wrong_blocks", "stuck_requests", "leaked_slots", "leaked_fds")
    assert [report[name] for name in bad] == [0, 0, 0, 0]


@pytest.mark.fault
@pytest.mark.parametrize("prompts", ["made up", "trace"])
def test_some_seconds(tmp_path: Path, prompts: str) -> None:
    options = ["--minutes", "0.05", "--every", "0.2"]
    if prompts == "trace":
        trace = tmp_path / "trace.jsonl"
        size = {"timestamp": 0, "input_length": 11 * 512, "output_length": 1}
        ids = [[*range(n % 20 * 10, n % 20 * 10 + 10), 1000 + n] for n in range(300)]
        lines = [json.dumps({**size, "hash_ids": one}) for one in ids]
        trace.write_text("\n".join(lines))
        options += ["--trace", str(trace)]
    assert_clean(soak(tmp_path / "report.json", *options))


@pytest.mark.faults
@pytest.mark.timeout(700)
@pytest.mark.fault
def test_half_a_minute(tmp_path: Path) -> None:
    report = soak(tmp_path / "report.json", "--minutes", "0.5", "--every", "0.5")
    assert_clean(report)
    assert report["changes"] > 0
    assert report["rss_growth_bytes"] < 64 << 20
