"""An engine that fails ends the demo with the end of its log, and nothing stays behind."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from bench.demo import run_demo
from bench.demo.demo_plan import DemoPlan, EngineRun

VLLM = """
class SamplingParams: pass

class LLM:
    def __init__(self, model, **_):
        raise OSError(f"{model} is no folder")
"""
"""An engine that has no such model; the real one takes some seconds until it says so."""


def test_an_engine_that_fails_to_start_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm.py").write_text(VLLM)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    chain = tmp_path / "chain.yaml"
    plan = DemoPlan((EngineRun("first engine", chain, ("cold",)),), {}, {})
    shown: list[str] = []
    with pytest.raises(run_demo.EngineFailed, match="no-such-model"):
        run_demo.run(plan, str(tmp_path / "no-such-model"), {}, tmp_path, shown.append)
    assert shown == ["first engine starts"]
    assert len(shown) < run_demo.steps(plan)
