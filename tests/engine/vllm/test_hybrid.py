"""Models with attention windows in a real vLLM: the same tokens, and no block of use is missed."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.vllm.tiny_vllm import (
    GEMMA,
    GEMMA_4,
    MISTRAL,
    WINDOW,
    Run,
    documents,
    hosted,
    under_own_spec,
)
from tiers.remote.packs.bucket import is_mark

pytestmark = pytest.mark.vllm

CPU = {"type": "cpu", "capacity": "64MiB"}
LONG = [[(prompt, 8)] for prompt in documents(3, 600)]
SHARED = documents(3, 300)
CONCURRENT = [(SHARED[i % 3] + [i + 3] * 40, 40) for i in range(16)]
BLOCKS = 18
"""Full blocks of a long prompt."""


@pytest.fixture(scope="module")
def run_windowed(
    run_vllm: Callable[..., Run], tiny_model: Callable[..., Path]
) -> Callable[..., Run]:
    """Run an engine of a model, in chunks that are about as long as its windows."""

    def run(model: dict[str, Any], batches: Any, tiers: Any = None, **more: Any) -> Run:
        options = {
            "max_model_len": 704,
            "max_num_batched_tokens": 128,
            "num_gpu_blocks_override": 80,
            "env": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
            **more,
        }
        return run_vllm(batches, tiers, model=str(tiny_model(model)), **options)

    return run


@pytest.fixture(scope="module")
def answers(run_windowed: Callable[..., Run]) -> list[list[list[int]]]:
    """What Gemma answers without a chain."""
    return run_windowed(GEMMA, [*LONG, *([one] for one in CONCURRENT)]).tokens


def test_several_groups_come_back_from_every_tier(
    run_windowed: Callable[..., Run], answers: list[list[list[int]]], tmp_path: Path
) -> None:
    """Windowed layers are stored and loaded only at a prefix's end."""
    tiers = [CPU, disk(tmp_path)]
    first = run_windowed(GEMMA, LONG * 2, tiers, enable_prefix_caching=False, settled=True)
    assert first.tokens == answers[:3] * 2
    assert first.loaded() == {"cpu": len(LONG) * BLOCKS * 32}
    in_windows = -(-(WINDOW - 1) // 32)
    assert first.count("disk", "stored_blocks") == len(LONG) * (BLOCKS + 2 * in_windows)
    assert first.count("cpu", "loaded_blocks") == len(LONG) * (BLOCKS + 2 * in_windows)

    damage_some(tmp_path)
    rounds = [*LONG, CONCURRENT, CONCURRENT]
    restarted = run_windowed(GEMMA, rounds, tiers, settled=True, steps_in_flight=2)
    assert restarted.tokens[:3] == answers[:3]
    assert restarted.count("disk", "load_failures") > 0, restarted.tiers
    expected = [batch[0] for batch in answers[3:]]
    assert restarted.tokens[3:] == [expected, expected]
    assert sum(restarted.loaded().values()) > 0


def test_several_groups_come_back_from_packs(
    run_windowed: Callable[..., Run], answers: list[list[list[int]]], tmp_path: Path
) -> None:
    tmp_path.chmod(0o700)
    tiers = [{"type": "shared", "path": str(tmp_path)}]
    assert run_windowed(GEMMA, LONG, tiers).tokens == answers[:3]
    restarted = run_windowed(GEMMA, LONG, tiers)
    assert restarted.tokens == answers[:3]
    assert restarted.loaded() == {"shared": len(LONG) * BLOCKS * 32}
    packs = [pack for pack in tmp_path.glob("?" * 32 + "/*/*") if not is_mark(str(pack))]
    steps = -(-600 // 128)
    at_end = 2  # of them reach the windows before the prompt's end
    assert len(packs) == len(LONG) * (steps + 2 * at_end), "of each group and step a pack"


@pytest.mark.faults
def test_requests_are_preempted_and_aborted_in_too_little_kv(
    run_windowed: Callable[..., Run], answers: list[list[list[int]]], tmp_path: Path
) -> None:
    tiers = [{"type": "cpu", "capacity": "2MiB"}, disk(tmp_path)]
    few = {"num_gpu_blocks_override": 56, "abort": 30, "steps_in_flight": 2}
    run = run_windowed(GEMMA, [CONCURRENT * 6], tiers, load_policy="stitched", **few)
    assert run.preemptions > 0
    assert sum(run.loaded().values()) > 0
    for number, tokens in enumerate(run.tokens[0]):
        (expected,) = answers[3 + number % len(CONCURRENT)]
        assert tokens == expected[: len(tokens)], f"request {number}"


@pytest.mark.timeout(120)
@pytest.mark.faults
def test_loads_fail_where_another_comes_first_in_too_little_kv(
    run_windowed: Callable[..., Run], tmp_path: Path
) -> None:
    """vLLM keeps room free for one whose load has failed, also where one of a higher priority is to
    load, finds none therefore, and is asked again and again."""
    rng = random.Random(5)
    shared = documents(2, 200)
    ranked = []
    for number in range(12):
        prompt = shared[number % 2][: rng.choice([100, 200])] + [number + 3] * 20
        ranked.append((prompt, 8, {"priority": rng.randrange(3)}))
    pool = {"max_num_seqs": 4, "num_gpu_blocks_override": 28, "max_num_batched_tokens": 256}
    few = {"scheduling_policy": "priority", "max_model_len": 240, **pool}
    expected = run_windowed(GEMMA, [[one[:2]] for one in ranked], **few).tokens
    more = {"abort": 2, "before": {"1": ["read_nothing"]}}
    run = run_windowed(GEMMA, [ranked, ranked * 2], [disk(tmp_path)], **few, **more)
    for batch in run.tokens:
        for number, tokens in enumerate(batch):
            assert tokens == expected[number % 12][0][: len(tokens)], f"request {number}"
    assert run.count("disk", "load_failures") > 0


HELD = ((320, 128), (576, 20), (576, 20))
"""Tokens of each prompt of a burst that were asked before, and that are left to compute."""
BURST = [([*LONG[i][0][0][:held], *[7] * left], 8) for i, (held, left) in enumerate(HELD)]
FEW = {"num_gpu_blocks_override": 72, "enable_prefix_caching": False}


@pytest.fixture(scope="module")
def of_burst(run_windowed: Callable[..., Run]) -> list[list[int]]:
    """What it is answered, one by one, without a chain."""
    return [said for (said,) in run_windowed(GEMMA, [[one] for one in BURST], **FEW).tokens]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["chain", "hosted", "store"])
def test_a_burst_loads_no_more_than_leaves_room_to_compute(
    run_windowed: Callable[..., Run], of_burst: list[list[int]], tmp_path: Path, kind: str
) -> None:
    """vLLM keeps no room free for what layers with windows need next: the first to load has 128
    tokens left, for which the others, who are to be run behind it, would leave too few blocks."""
    leading = [[(LONG[i][0][0][: held + 1], 8)] for i, (held, _) in enumerate(HELD)]
    chains: dict[str, dict[str, Any]] = {
        "chain": {"tiers": [CPU]},
        "hosted": {"kv_transfer_config": hosted(CPU)},
        "store": {"kv_transfer_config": under_own_spec(disk(tmp_path), 64 << 20)},
    }
    run = run_windowed(GEMMA, [*leading, BURST], settled=True, **FEW, **chains[kind])
    assert run.tokens[-1] == of_burst
    assert run.external_hits == 320 + 2 * 576
    assert run.loaded() == ({"cpu": 320 + 2 * 576} if kind == "chain" else {})
    told = [attempt for one in run.explained for attempt in one["attempts"]]
    assert any("waited_for" in attempt for attempt in told) is (kind == "chain")


@pytest.mark.faults
def test_windows_only(run_windowed: Callable[..., Run], tmp_path: Path) -> None:
    plain = run_windowed(MISTRAL, LONG)
    more = {"enable_prefix_caching": False, "settled": True}
    run = run_windowed(MISTRAL, LONG * 2, [CPU, disk(tmp_path)], **more)
    assert run.tokens == plain.tokens * 2
    assert run.loaded() == {"cpu": len(LONG) * BLOCKS * 32}
    assert run.count("cpu", "loaded_blocks") == len(LONG) * -(-(WINDOW - 1) // 32)


@pytest.mark.faults
def test_layers_of_two_sizes_some_of_which_share_kv(
    run_windowed: Callable[..., Run], tmp_path: Path
) -> None:
    plain = run_windowed(GEMMA_4, LONG)
    assert len({tuple(answer) for (answer,) in plain.tokens}) == len(LONG)
    run = run_windowed(GEMMA_4, LONG, [disk(tmp_path)], steps_in_flight=2)
    again = run_windowed(GEMMA_4, LONG, [disk(tmp_path)])
    assert run.tokens == again.tokens == plain.tokens
    assert again.loaded() == {"disk": len(LONG) * BLOCKS * 32}


def disk(folder: Path) -> dict[str, Any]:
    return {"type": "disk", "path": str(folder / "disk"), "capacity": "64MiB"}


def damage_some(folder: Path) -> None:
    """Change some bytes in the middle of what the disk tier holds: 6 MB of its capacity."""
    for slab in (folder / "disk").glob("slab-*"):
        with slab.open("r+b") as file:
            for position in range(500_000, 2_500_000, 30_000):
                file.seek(position)
                file.write(b"\xff\xee\xdd")
