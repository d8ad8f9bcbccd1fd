"""vLLM's Model Runner V2, its default on GPUs: tests of real engines again, on the CPU."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import jobs
from tests.engine.conftest import runs
from tests.engine.vllm.test_states import (
    run_states,
    test_states_and_attention_come_back_from_every_tier,
)
from tests.engine.vllm.tiny_vllm import Run
from tests.support.compatibility import engine_version

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
