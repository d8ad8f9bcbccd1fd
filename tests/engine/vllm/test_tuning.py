"""A real engine's traffic is recorded, replayed and explained, and all agree with its counts."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from spec.chain import shown_chain
from spec.load import load_chain
from tests.engine.vllm.tiny_vllm import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    TOKEN_BYTES,
    Batch,
    Run,
    documents,
)
from tests.engine.vllm.vllm_chains import IN_PROCESS
from tests.support.explaining import check_sums
from tiers.cli.main import app
from tiers.control.engine_status import EngineStatus, RunningChain

pytestmark = pytest.mark.vllm

OWN_BLOCKS = 40
"""Of the engine, which uses one of them for nothing."""
CHATS = 6


def conversations(turns: int, seed: int) -> list[Batch]:
    """Turns of conversations, one at a time, so that no time decides who is there at once. A long
    one begins anew from a part of what it had; some answers fill a block."""
    rng = random.Random(seed)
    chats = documents(CHATS, 300, seed)
    batches: list[Batch] = []
    for turn in range(turns):
        chat = rng.randrange(CHATS)
        if len(chats[chat]) > 560:
            chats[chat] = chats[chat][: rng.randrange(100, 300)]
        said = documents(1, rng.randrange(1, 90), rng.randrange(1 << 30))[0]
        chats[chat] = chats[chat] + said
        batches.append([(list(chats[chat]), 34 if turn % 10 == 4 else 1)])
    return batches


def replayed(trace: Path, folder: Path, chain: dict[str, Any], *how: str) -> dict[str, Any]:
    """The report of `kvtiers replay`."""
    link = {"load_bandwidth": "1GB/s", "store_bandwidth": "1GB/s"}
    machine = {
        "kv_bytes_per_token": TOKEN_BYTES,
        "engine_cache": (OWN_BLOCKS - 1) * BLOCK_BYTES,
        "prefill_rate": 20000,
        "tiers": {tier["type"]: link for tier in chain["tiers"]},
    }
    files = [folder / name for name in ("chain.yaml", "machine.yaml", "told.json")]
    files[0].write_text(yaml.safe_dump(chain))
    files[1].write_text(yaml.safe_dump(machine))
    options = ["--chain", files[0], "--profile", files[1], *how, "--json", files[2]]
    done = CliRunner().invoke(app, ["replay", str(trace), *map(str, options)])
    assert done.exit_code == 0, done.output
    return dict(json.loads(files[2].read_text()))


def check_status(run: Run, prompt_tokens: int) -> None:
    """The engine's status has the counts of its metrics."""
    status = EngineStatus.model_validate(run.status)
    assert [(tier.name, tier.type, tier.state) for tier in status.tiers] == [
        ("cpu", "cpu", "open"),
        ("disk", "disk", "open"),
    ]
    for tier in status.tiers:
        counted = run.tiers[tier.name]
        assert tier.sums == {name: counted[name] for name in tier.sums}
        assert tier.sums["loaded_tokens"] > 0 and tier.load_seconds is not None
        # A busy machine's store is asked seldom how much it holds.
        assert (tier.name == "disk" or tier.used_bytes > 0) and (
            tier.used_bytes <= tier.capacity_bytes
        )
    # Requests that only keep the engine stepping have a token each.
    assert prompt_tokens <= status.prompt_tokens <= prompt_tokens + 1000
    shares = [tier.token_share or 0.0 for tier in status.tiers]
    assert min(shares) > 0 and sum(shares) < 1


def check_running(run: Run) -> None:
    """The engine says what `kvtiers recommend` needs."""
    running = RunningChain.model_validate(run.running)
    assert running.block_tokens == BLOCK_TOKENS
    assert running.kv_bytes_per_token == TOKEN_BYTES
    assert running.cache_tokens == OWN_BLOCKS * BLOCK_TOKENS
    assert running.store_bytes_per_second["disk"] > 0
    assert [tier["type"] for tier in running.chain["tiers"]] == ["cpu", "disk"]
    assert shown_chain(load_chain(Path(running.file or ""))) == running.chain


def test_recorded_replayed_and_explained(run_vllm: Callable[..., Run], tmp_path: Path) -> None:
    """The replays' hit tokens are those that the engine counted, of its own cache and of all tiers,
    within 1%; every request is explained, and what is told adds up to the counts.

    A server goes on stepping until it has heard of what it stored in host memory. `LLM` stops with
    the last answer, and would ask for the next prompt first, in a tier that has not evicted yet:
    `settled` makes up for that."""
    trace, batches = tmp_path / "trace", conversations(30, seed=1)
    tiers = [
        {"type": "cpu", "capacity": 60 * BLOCK_BYTES},
        {"type": "disk", "capacity": "64MiB", "path": str(tmp_path / "disk")},
    ]
    stitched: dict[str, Any] = {"load_policy": "stitched"}
    options = {"num_gpu_blocks_override": OWN_BLOCKS, "settled": True, **stitched, **IN_PROCESS}
    run = run_vllm(batches, tiers, record=trace, **options)
    asked = [request for batch in batches for request in batch]
    check_sums(run.explained, run.external_hits)
    prompts = sorted(one["prompt_tokens"] for one in run.explained if one["prompt_tokens"] > 1)
    assert prompts == sorted(len(prompt) for prompt, *_ in asked), "each is explained"
    counted = {name: int(run.count(name, "hit_tokens")) for name in ("cpu", "disk")}
    assert sum(counted.values()) == run.external_hits
    assert min(counted.values()) > 1000, "both tiers serve"
    check_running(run)
    check_status(run, sum(len(prompt) for prompt, *_ in asked))
    own = sum(map(sum, run.cached)) - int(run.external_hits)
    chain = {"version": 1, "load_when": "always", "staging": "64MiB", "tiers": tiers, **stitched}
    for how in ([], ["--real"]):
        told = replayed(trace, tmp_path, chain, *how)
        near = told["prompt_tokens"] / 100
        hits = {tier["name"]: tier["hit_tokens"] for tier in told["tiers"]}
        assert sum(hits.values()) == pytest.approx(sum(counted.values()), abs=near)
        # Which of the two serves a block depends on the moment at which the first has evicted it:
        # alone they differ by up to 3%, and by 6% were seen on a machine that has more to do.
        assert hits == pytest.approx(counted, abs=8 * near)
        assert told["engine_hit_tokens"] == pytest.approx(own, abs=near)
