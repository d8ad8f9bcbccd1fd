"""Engines of one model with other numbers of ranks, on one tier: they share nothing and say so."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.clock import wait_for
from tests.support.replay import ReplayEngine, ReplayModel, answer
from tests.support.replay_chains import chain_of, disk, measured, redis
from tests.support.servers import RedisServer

MODEL = ReplayModel()
PROMPT = [*range(50)]


@pytest.mark.parametrize("kind", ["disk", "redis", "shared", "object"])
def test_the_second_is_told_once_by_name_with_the_cost(
    engine: Callable[..., ReplayEngine],
    shared_server: RedisServer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    kind: str,
) -> None:
    tier = {
        "disk": disk(tmp_path),
        "redis": redis(shared_server, tmp_path),
        "shared": {"type": "shared", "path": str(tmp_path)},
        "object": {"type": "object", "url": f"file://{tmp_path}"},
    }[kind]

    def ask(ranks: int) -> ReplayEngine:
        made = engine(chain_of(tier), model=MODEL, world_size=ranks, prefix_caching=False)
        for _ in range(2):
            assert made.generate(PROMPT, 2).output == answer(MODEL, PROMPT, 2, ranks)
            made.settle()
        return made

    def lines() -> list[str]:
        return [line for line in caplog.messages if "rank(s)" in line and "neither" in line]

    caplog.set_level(logging.WARNING)
    assert measured(ask(2), "loaded_tokens", kind) > 0
    assert lines() == []
    one = ask(1)
    wait_for(lambda: bool(lines()))
    (line,) = lines()
    assert "from engines of 2 rank(s), and this one has 1" in line
    assert "a token. Give all engines one tensor parallel size" in line
    assert measured(one, "loaded_blocks", kind) == measured(one, "stored_blocks", kind)
