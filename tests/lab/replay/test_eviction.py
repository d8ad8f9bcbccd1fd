"""What is left of a prefix when a tier runs out of room: its head, whatever steps stored it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from spec.chain import ChainSpec
from tests.support.replay import ReplayEngine, ReplayRequest, answer
from tests.support.replay_chains import (
    MODEL,
    SLOT,
    chain_of,
    coverage_of,
    cpu,
    disk,
    measured,
    scheduler_of,
)
from tests.support.slow_store import SlowSpec, TroubledStore
from tiers.connector.worker import loading
from tiers.cpu.spec import CpuSpec
from tiers.disk.disk_store import DiskStore
from tiers.disk.slab import slot_bytes

BLOCKS = 8
"""Blocks that each tier has room for, and that the prefix has."""
SIZE = MODEL.block_tokens
TIERS = ["lru", "arc", "disk"]


def tier(kind: str, folder: Path) -> dict[str, Any]:
    if kind == "disk":
        return disk(folder, f"{BLOCKS * slot_bytes(MODEL.payload_bytes)}B")
    return cpu(BLOCKS, eviction=kind)


def held(engine: ReplayEngine, tokens: Iterable[int]) -> list[bool]:
    """Which full blocks of these tokens the tier has."""
    probe = ReplayRequest("probe", [*tokens], 1, MODEL.block_tokens)
    return [bool(one) for one in coverage_of(engine, probe)]


def store(engine: ReplayEngine, tokens: Iterable[int], max_tokens: int = 1) -> list[int]:
    """Run a request until all it has is stored; the tokens that it computed."""
    request = engine.generate([*tokens], max_tokens)
    engine.settle()
    return request.tokens[:-1]


def others(engine: ReplayEngine, blocks: int) -> None:
    """Store so many blocks of prompts of two blocks each."""
    for number in range(blocks // 2):
        store(engine, range(900 + 10 * number, 908 + 10 * number))


@pytest.mark.parametrize("kind", TIERS)
@pytest.mark.parametrize("prompt", [8, 4], ids=["prompt in two steps", "prompt and answer"])
def test_a_prefix_stored_in_steps_is_evicted_from_its_tail(
    engine: Callable[..., ReplayEngine], tmp_path: Path, kind: str, prompt: int
) -> None:
    """Half of its blocks go for others; those that are left are the ones that can be loaded."""
    made = engine(chain_of(tier(kind, tmp_path)), num_blocks=24, batch_tokens=4 * SIZE)
    tokens = store(made, range(prompt * SIZE), (BLOCKS - prompt) * SIZE + 1)
    assert held(made, tokens) == [True] * BLOCKS
    others(made, 4)
    assert held(made, tokens) == [True] * 4 + [False] * 4


@pytest.mark.parametrize("kind", ["lru", "disk"])
def test_a_conversation_is_evicted_from_its_tail(
    engine: Callable[..., ReplayEngine], tmp_path: Path, kind: str
) -> None:
    """Each turn finds what was stored before in the tier, not in the engine, and adds to it."""
    made = engine(chain_of(tier(kind, tmp_path)), num_blocks=24, prefix_caching=False)
    tokens = list(range(2 * SIZE))
    for turn in range(3):
        tokens = store(made, [*tokens, *range(50 * turn, 50 * turn + SIZE)], SIZE + 1)
    assert measured(made, "loaded_tokens", kind if kind == "disk" else "cpu") == (4 + 6) * SIZE
    assert held(made, tokens) == [True] * BLOCKS
    others(made, 4)
    assert held(made, tokens) == [True] * 4 + [False] * 4


def test_a_prefix_loaded_in_waves_is_evicted_from_its_tail(
    engine: Callable[..., ReplayEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where what was loaded is not offered to the tiers, which would count it as used once more."""
    monkeypatch.setattr(loading, "READ_BYTES", 4 * SLOT)
    chain = chain_of(tier("disk", tmp_path), promote=False)
    made = engine(chain, num_blocks=24, prefix_caching=False)
    tokens = store(made, range(BLOCKS * SIZE))
    store(made, [*tokens, 1])
    assert measured(made, "loaded_tokens", "disk") == BLOCKS * SIZE
    others(made, 4)
    assert held(made, tokens) == [True] * 4 + [False] * 4


@pytest.mark.parametrize("kind", TIERS)
@pytest.mark.parametrize("again", [False, True])
def test_a_prefix_stored_in_batches_is_evicted_from_its_tail(
    engine: Callable[..., ReplayEngine],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    again: bool,
) -> None:
    """One step stores it, in more than one call of the store. `again`: a part was there before, so
    that the disk is told of all."""
    touched, plain = list[int](), DiskStore.touch

    def touch(self: DiskStore, keys: Sequence[bytes]) -> None:
        touched.append(len(keys))
        plain(self, keys)

    monkeypatch.setattr(DiskStore, "touch", touch)
    for user in ("worker.storing", "scheduler.tier_stores"):
        monkeypatch.setattr(f"tiers.connector.{user}.batch_blocks", lambda payload: 3)
    made = engine(chain_of(tier(kind, tmp_path)), num_blocks=24, prefix_caching=False)
    if again:
        store(made, range(2 * SIZE + 1))
    tokens = store(made, range(BLOCKS * SIZE))
    assert held(made, tokens) == [True] * BLOCKS
    assert (BLOCKS in touched) == (again and kind == "disk")
    others(made, 4)
    assert held(made, tokens) == [True] * 4 + [False] * 4


@pytest.mark.parametrize("kind", ["lru", "arc"])
def test_what_waited_for_a_store_goes_before_what_came_later(
    engine: Callable[..., ReplayEngine], store: TroubledStore, kind: str
) -> None:
    """A store that hangs reads the first prompt's slots while the third needs room. That is no use
    of them: when it ends they are the first to go, from their tail, and not the second prompt."""
    slow = SlowSpec(type="slow").model_copy(update={"max_inflight": 8 * MODEL.payload_bytes})
    above = CpuSpec.model_validate({"capacity": 12 * SLOT, "eviction": kind})
    chain = ChainSpec(version=1, load_when="always", tiers=(above, slow), staging=24 * SLOT)
    made = engine(chain, num_blocks=24, prefix_caching=False)
    store.pace.hang("put")
    prompts = [range(100 * n, 100 * n + blocks * SIZE) for n, blocks in enumerate((8, 4, 2, 2))]
    for prompt in prompts[:3]:
        made.generate(prompt, 1)
        while scheduler_of(made).jobs_in_flight:
            made.step()
    assert [sum(held(made, prompt)) for prompt in prompts] == [8, 2, 2, 0]
    store.pace.resume()
    made.settle()
    made.generate(prompts[3], 1)
    made.settle()
    assert held(made, prompts[0]) == [True] * 6 + [False] * 2
    assert [sum(held(made, prompt)) for prompt in prompts] == [6, 2, 2, 2]


def test_a_long_answer_counts_its_head_as_used_a_few_times_only(
    engine: Callable[..., ReplayEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for each of its blocks would take the scheduler time by the square of its length."""
    touched: list[int] = []

    plain = DiskStore.touch

    def touch(self: DiskStore, keys: Sequence[bytes]) -> None:
        touched.append(len(keys))
        plain(self, keys)

    monkeypatch.setattr(DiskStore, "touch", touch)
    made = engine(chain_of(disk(tmp_path)), num_blocks=100)
    blocks = 64
    store(made, range(SIZE), (blocks - 1) * SIZE + 1)
    assert touched and sum(touched) <= 3 * blocks


@pytest.mark.parametrize("kind", ["lru", "arc"])
def test_a_prompt_larger_than_the_tier_leaves_its_head(
    engine: Callable[..., ReplayEngine], tmp_path: Path, kind: str
) -> None:
    made = engine(chain_of(tier(kind, tmp_path)), num_blocks=24, batch_tokens=4 * SIZE)
    tokens = store(made, range(2 * BLOCKS * SIZE))
    assert held(made, tokens) == [True] * BLOCKS + [False] * BLOCKS


@pytest.mark.parametrize(
    ("chain", "request_says", "stored"),
    [
        ({}, None, 6),
        ({}, "prompt", 3),
        ({}, False, 0),
        ({"store": "prompt"}, None, 3),
        ({"store": "prompt"}, True, 6),
        ({"store": "prompt"}, False, 0),
        ({"store": "prompt"}, "computed", 6),
        ({"store": "computed"}, None, 6),
        ({"store": "computed"}, "prompt", 3),
    ],
)
def test_answers_are_stored_unless_the_chain_or_the_request_says_prompt(
    engine: Callable[..., ReplayEngine],
    chain: dict[str, Any],
    request_says: str | bool | None,
    stored: int,
) -> None:
    """Three blocks and a half of prompt, and as much of an answer."""
    made = engine(chain_of(cpu(BLOCKS), **chain), num_blocks=24, batch_tokens=2 * SIZE)
    params = None if request_says is None else {"kvtiers": {"store": request_says}}
    prompt = range(3 * SIZE + SIZE // 2)
    request = made.generate([*prompt], 3 * SIZE, kv_transfer_params=params)
    made.settle()
    assert request.output == answer(MODEL, [*prompt], 3 * SIZE)
    assert held(made, request.tokens) == [True] * stored + [False] * (6 - stored)


@pytest.mark.parametrize(("says", "stored"), [("computed", [False, True]), (True, [True, True])])
def test_what_the_engine_only_found_in_its_own_cache_may_be_left_out(
    engine: Callable[..., ReplayEngine], says: str | bool, stored: list[bool]
) -> None:
    """A whole block that nobody stored, then one more behind it."""
    made = engine(chain_of(cpu(BLOCKS)), num_blocks=24)
    made.generate([*range(SIZE + 1)], 1, kv_transfer_params={"kvtiers": {"store": False}})
    made.generate([*range(2 * SIZE)], 1, kv_transfer_params={"kvtiers": {"store": says}})
    made.settle()
    assert held(made, range(2 * SIZE)) == stored


def test_what_a_tier_loads_is_promoted_where_only_computed_blocks_are_stored(
    engine: Callable[..., ReplayEngine], tmp_path: Path
) -> None:
    chain = chain_of(cpu(4), disk(tmp_path), store="computed")
    made = engine(chain, num_blocks=12)
    tokens = store(made, range(4 * SIZE), 1)
    others(made, 12)
    assert measured(made, "loaded_tokens", "disk") == 0
    stored = measured(made, "stored_blocks", "cpu")
    assert store(made, tokens, 1) == tokens
    assert measured(made, "loaded_tokens", "disk") >= 3 * SIZE
    assert measured(made, "stored_blocks", "cpu") == stored + 4


def test_all_ranks_parts_of_a_block_go_together(
    engine: Callable[..., ReplayEngine], tmp_path: Path
) -> None:
    room = f"{2 * BLOCKS * slot_bytes(MODEL.payload_bytes)}B"
    chain = chain_of(disk(tmp_path, room))
    made = engine(chain, num_blocks=24, batch_tokens=4 * SIZE, world_size=2)
    tokens = store(made, range(BLOCKS * SIZE))
    others(made, 4)
    assert held(made, tokens) == [True] * 4 + [False] * 4
