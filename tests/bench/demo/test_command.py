"""The demo refuses what it can't run before any engine starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "bench.demo"]


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("engine_args", ["{", "[]", "dtype=float32"])
def test_engine_arguments_that_are_no_json_object_are_refused(engine_args: str) -> None:
    done = demo("--engine-args", engine_args)
    assert done.returncode == 2
    assert "--engine-args" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_chain_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    done = demo("--chain", str(tmp_path / "none.yaml"))
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "none.yaml" in line
