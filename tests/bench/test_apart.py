"""The bench of prefill and decode apart runs, and says whether answers are equal."""

from __future__ import annotations

import subprocess

import pytest

from bench import serve
from bench.apart import SAID, measure
from tests.engine.vllm.imported import programs

pytestmark = [pytest.mark.vllm, pytest.mark.faults]

pytest.importorskip("nixl_cu12", reason="NIXL is not installed")


@pytest.mark.timeout(900)
def test_the_second_turn_finds_the_first_in_a_tier(
    vllm_jobs: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "subprocess", programs(vllm_jobs))
    for _ in range(3):  # on a busy machine a put may come too late for the other engine
        result = measure(conversations=2, turns=2, smoke=True)
        assert result["equal"]
        first, second = result["rows"]
        assert first["cached"] == 0
        assert first["nixl_pulled"] > 0, "NIXL alone moves all that the decode engine has not"
        assert all(row["ratio"] == row["chain"] / row["nixl"] for row in result["rows"])
        pulls_less = all(row["chain_pulled"] < row["nixl_pulled"] for row in result["rows"])
        if pulls_less and second["cached"] > SAID - 32:
            return
    pytest.fail("a tier has it")
