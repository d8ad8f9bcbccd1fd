"""vLLM's Model Runner V2, its default on GPUs: tests of real engines again, on the CPU."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import jobs
from tests.engine.conftest import runs
from tests.engine.vllm import test_reset
from tests.engine.vllm.test_reset import AHEAD, IN_PROCESS
from tests.engine.vllm.test_states import (
    run_states,
    test_states_and_attention_come_back_from_every_tier,
)
from tests.engine.vllm.tiny_vllm import Run, documents, hosted
from tests.support.compatibility import engine_version
from tests.support.replay_chains import disk

__all__ = ["run_states", "test_states_and_attention_come_back_from_every_tier"]
pytestmark = [pytest.mark.vllm, pytest.mark.faults]

FOLDER = Path(__file__).parents[1] / "runner_v2"


@pytest.fixture(scope="module")
def jobs_v2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    yield from jobs(tmp_path_factory, FOLDER)


@pytest.fixture(scope="module")
def run_vllm(
    jobs_v2: subprocess.Popen[str], tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Run]:
    """That of all tests, with another runner."""
    if engine_version() < "0.32":
        pytest.skip("this vLLM has no Model Runner V2 on CPUs, or not all of it")
    run = runs(jobs_v2, tiny_llama, tmp_path_factory)

    def on_v2(*args: object, **options: object) -> Run:
        found = run(*args, **options)
        assert "Using V2 Model Runner" in found.log
        return found

    return on_v2


@pytest.mark.parametrize("host", ["chain", "hosted"])
def test_scales_of_loaded_blocks_are_not_overwritten_by_the_first_step(
    host: str, run_vllm: Callable[..., Run], tmp_path: Path
) -> None:
    tier = disk(tmp_path)
    chain = {"tiers": [tier]} if host == "chain" else {"kv_transfer_config": hosted(tier)}
    options = {
        **chain,
        "attention_config": {"backend": "TRITON_ATTN"},
        "kv_cache_dtype": "int8_per_token_head",
        "max_model_len": 128,
    }
    batch = [(prompt, 3) for prompt in documents(1, 40)]
    computed = run_vllm([batch], **options)
    restarted = run_vllm([batch], **options)
    assert (computed.cached, restarted.cached) == ([[0]], [[32]])
    assert restarted.tokens == computed.tokens


@pytest.mark.fault
@pytest.mark.parametrize("options", [IN_PROCESS, AHEAD], ids=["one step", "two steps"])
def test_a_load_begins_in_the_next_step_whose_own_raised(
    run_vllm: Callable[..., Run], options: dict[str, Any]
) -> None:
    """This runner begins it behind its forward, and leaves it out then."""
    test_reset.test_a_load_ends_whose_end_went_with_a_step_that_raised(run_vllm, options, "forward")
