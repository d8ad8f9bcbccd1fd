"""What several tests of real vLLM engines compare with."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.engine.vllm.tiny_vllm import Run
from tests.engine.vllm.vllm_chains import IN_PROCESS, ONE_BY_ONE


@pytest.fixture(scope="session")
def answers(run_vllm: Callable[..., Run]) -> list[list[list[int]]]:
    """The answers to the prompts, one by one, without any connector."""
    return run_vllm(ONE_BY_ONE, **IN_PROCESS).tokens
