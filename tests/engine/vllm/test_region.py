"""The name of a hosted engine's host memory goes with its engine, and never before."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tiers.engine import vllm_region
from tiers.engine.vllm_region import NamedRegion


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(vllm_region, "FOLDER", tmp_path)
    return tmp_path


def make_memory(folder: Path, engine: str) -> Path:
    """As vLLM does."""
    file = folder / f"vllm_offload_{engine}.mmap"
    file.write_bytes(b"KV")
    return file


def test_another_engine_leaves_what_a_living_one_still_opens(folder: Path) -> None:
    first = NamedRegion("kvtiers_one")
    file = make_memory(folder, "kvtiers_one")
    worker = NamedRegion("kvtiers_one")  # of the same engine
    NamedRegion("kvtiers_other").remove()
    assert file.exists()
    first.remove()
    worker.remove()
    assert not list(folder.iterdir())


@pytest.mark.fault
def test_what_a_killed_engine_leaves_is_removed_and_nobody_elses(folder: Path) -> None:
    upstream = make_memory(folder, "0b5c")
    process = os.fork()
    if not process:
        NamedRegion("kvtiers_killed")
        make_memory(folder, "kvtiers_killed")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(process, 0)
    assert len(list(folder.iterdir())) == 3
    NamedRegion("kvtiers_next").remove()
    assert list(folder.iterdir()) == [upstream]
