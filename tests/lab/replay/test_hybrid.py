"""Models with attention windows in the replay engine, whose answers show every byte of their KV."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.faulty_stores import Pace, SlowStore
from tests.support.replay import ReplayEngine, ReplayModel, answer
from tests.support.replay_chains import (
    DENSE,
    HYBRID,
    SLOT,
    WINDOWS,
    chain_of,
    cpu,
    damage_disk,
    disk,
    drop_from_disk,
    measured,
    names,
)
from tiers.connector.scheduler.jobs import Jobs, Pending, PendingLoad
from tiers.testing import GivenSpec, MemoryStore

PROMPT = list(range(50))
"""Twelve full blocks of four tokens; what can be loaded of them ends with the twelfth."""
STAGING = 256 * SLOT
REACH = 4
"""Blocks at the end of a prefix that a window of 14 tokens reaches into."""


def expect(engine: ReplayEngine, loaded: int, model: ReplayModel = HYBRID) -> None:
    request = engine.generate(PROMPT)
    assert request.output == answer(model, PROMPT, 4)
    assert request.loaded_tokens == loaded


@pytest.mark.parametrize("model", [DENSE, WINDOWS])
def test_only_what_windows_reach_is_loaded(
    engine: Callable[..., ReplayEngine], model: ReplayModel
) -> None:
    one = engine(chain_of(cpu()), model=model, prefix_caching=False)
    expect(one, 0, model)
    expect(one, 48, model)
    full = model.windows.count(None)
    assert measured(one, "stored_blocks", "cpu") == len(model.windows) * 13, "the answer fills one"
    # Of the group with the shorter window the engine has a place for two blocks only.
    kept = {14: REACH, 7: 2}
    reached = sum(kept[window] for window in model.windows if window is not None)
    assert measured(one, "loaded_blocks", "cpu") == full * 12 + reached


def test_what_windows_reach_is_kept_of_prompts_before_the_ends_of_prefixes(
    engine: Callable[..., ReplayEngine],
) -> None:
    """Where a prompt ends, and where it parts from one that was stored: the third that begins alike
    loads what the first two have in common. Of answers all is kept."""
    one = engine(chain_of(cpu(128)), model=HYBRID, prefix_caching=False)
    expect(one, 0)
    one.settle()
    stored = 13 + 2 * (REACH + 1)  # windows before the prompt's end, and of the answer
    assert measured(one, "stored_blocks", "cpu") == stored
    expect(one, 48)
    loaded = []
    for token in range(3):
        prompt = [*PROMPT[:24], *[token] * 26]
        request = one.generate(prompt)
        assert request.output == answer(HYBRID, prompt, 4)
        loaded.append(request.loaded_tokens)
        one.settle()
        stored += 7 + 2 * (REACH + 1) + 2 * REACH * (token == 0)
        assert measured(one, "stored_blocks", "cpu") == stored
    assert loaded == [0, 24, 24]
    turn = [*PROMPT, *answer(HYBRID, PROMPT, 4), 7]
    assert one.generate(turn).loaded_tokens == 52
    one.generate(PROMPT[1:49])
    assert one.generate(PROMPT[1:49]).loaded_tokens == 44, "the last token is always computed"


@pytest.mark.parametrize(
    ("windows", "interval", "loaded", "stored"),
    [((None, 14), 32, 32, 36), ((None, 14), None, 40, 46), ((14,), 0, 40, 23)],
    ids=["every 32 tokens", "everywhere", "windows alone"],
)
def test_windows_may_be_kept_elsewhere_too(
    engine: Callable[..., ReplayEngine],
    windows: tuple[int | None, ...],
    interval: int | None,
    loaded: int,
    stored: int,
) -> None:
    model = replace(HYBRID, windows=windows, window_interval=interval)
    one = engine(chain_of(cpu(128)), model=model, prefix_caching=False)
    one.generate([*PROMPT, *PROMPT[:40]])
    one.settle()
    assert measured(one, "stored_blocks", "cpu") == stored
    assert one.generate([*PROMPT[:42], *[7] * 8]).loaded_tokens == loaded


def test_a_prompt_that_was_aborted_goes_on_from_where_it_ended(
    engine: Callable[..., ReplayEngine],
) -> None:
    """Who gives up before a long prompt is computed, again and again, has an answer in the end."""
    model = replace(HYBRID, windows=(None, 14))
    one = engine(chain_of(cpu(128)), model=model, prefix_caching=False, batch_tokens=8)
    loaded = []
    for _ in range(3):
        request = one.add(PROMPT)
        while request.num_computed_tokens < request.loaded_tokens + 16:
            one.step()
        one.scheduler.abort(request.request_id)
        one.run()
        one.settle()
        loaded.append(request.loaded_tokens)
    assert loaded == [0, 16, 32]
    expect(one, 48, model)
    one.settle()
    assert measured(one, "stored_blocks", "cpu") == 2 * 13, "each part once"


@pytest.mark.parametrize("windows", [(None,), (14,), (None, 14)])
def test_each_part_of_a_load_is_noted_by_its_block(
    engine: Callable[..., ReplayEngine],
    monkeypatch: pytest.MonkeyPatch,
    windows: tuple[int | None, ...],
) -> None:
    """By which it is said where a load has failed; of one group that has a window too, whose blocks
    before that have no place."""
    one = engine(chain_of(cpu()), model=replace(HYBRID, windows=windows), prefix_caching=False)
    loads: list[PendingLoad] = []
    begin = Jobs.begin

    def begun(self: Jobs, pending: Pending, step: int) -> None:
        loads.extend([pending] if isinstance(pending, PendingLoad) else [])
        begin(self, pending, step)

    monkeypatch.setattr(Jobs, "begin", begun)
    hashes = one.generate(PROMPT).block_hashes
    one.generate(PROMPT)
    (load,) = loads
    noted = zip(load.of_block, load.job.items, strict=True)
    assert all(item.key.startswith(hashes[block]) for block, item in noted)


def test_a_prefix_ends_before_a_windowed_part_that_is_gone(
    engine: Callable[..., ReplayEngine], tmp_path: Path
) -> None:
    """Blocks 3 and 11 of one windowed layer are gone: the first matters to nobody any more."""
    one = engine(chain_of(disk(tmp_path), staging=STAGING), model=DENSE)
    hashes = one.generate(PROMPT).block_hashes
    gone = names(one, [hashes[3], hashes[11]], group=1)
    one.settle()
    one.close()
    drop_from_disk(tmp_path, gone)
    expect(engine(chain_of(disk(tmp_path), staging=STAGING), model=DENSE), 44)


def test_a_request_whose_load_fails_is_recomputed_whole(
    engine: Callable[..., ReplayEngine], tmp_path: Path
) -> None:
    one = engine(chain_of(disk(tmp_path), staging=STAGING), model=HYBRID)
    one.generate(PROMPT)
    one.settle()
    one.close()
    damage_disk(tmp_path)
    again = engine(chain_of(disk(tmp_path), staging=STAGING), model=HYBRID)
    requests = [again.add(PROMPT), again.add([7] * 50), again.add([*PROMPT[:20], 7])]
    again.run()
    for request in requests:
        assert request.output == answer(HYBRID, request.prompt, 4)
    assert measured(again, "load_failures", "disk") > 0
    assert measured(again, "loaded_tokens", "disk") == 0, "of a failed load nothing is used"


def test_stitched_takes_full_layers_from_one_tier_and_windows_from_another(
    engine: Callable[..., ReplayEngine], tmp_path: Path
) -> None:
    fast, slow = disk(tmp_path / "fast", name="fast"), disk(tmp_path / "slow", name="slow")
    one = engine(chain_of(fast, slow, staging=STAGING), model=DENSE)
    hashes = one.generate(PROMPT).block_hashes
    window_parts = names(one, hashes, group=1)
    first_blocks = names(one, hashes[:6])
    one.settle()
    one.close()
    drop_from_disk(tmp_path / "fast", window_parts)
    drop_from_disk(tmp_path / "slow", first_blocks)
    two = engine(chain_of(fast, slow, load_policy="stitched", staging=STAGING), model=DENSE)
    expect(two, 48)
    tokens = {tier: measured(two, "loaded_tokens", tier) for tier in ("fast", "slow")}
    assert tokens == {"fast": (12 - REACH) * 4, "slow": REACH * 4}


def test_a_tier_may_have_nothing_to_load_of_its_part(
    engine: Callable[..., ReplayEngine], tmp_path: Path
) -> None:
    """Which no window reaches. Of a store that keeps prompts together; the other answers later."""
    head = {"type": "shared", "path": str(tmp_path), "paused": "writes"}
    pace = Pace(lambda verb, _: 0.3 if verb == "has" else 0.0)
    tail = GivenSpec(type="tail").over(SlowStore(MemoryStore(), pace, indexed=False))
    tmp_path.chmod(0o700)
    one = engine(chain_of({**head, "paused": None}, staging=STAGING), model=WINDOWS)
    one.generate(PROMPT[:16])
    one.settle()
    one.close()
    chain = chain_of(head, promote=False)
    two = engine(chain.model_copy(update={"tiers": (*chain.tiers, tail)}), model=WINDOWS)
    expect(two, 16, WINDOWS)
    two.settle()
    two.scheduler.pool.forget_all()
    expect(two, 48, WINDOWS)
    assert measured(two, "loaded_blocks", "tail") == REACH
    assert measured(two, "loaded_tokens", "shared") == 16 + 32


def test_a_limit_ends_the_prefix_at_whole_blocks(engine: Callable[..., ReplayEngine]) -> None:
    one = engine(chain_of(cpu()), model=DENSE, prefix_caching=False)
    expect(one, 0)
    limited = one.generate(PROMPT, kv_transfer_params={"kvtiers": {"max_load_tokens": 30}})
    assert limited.loaded_tokens == 28
    assert limited.output == answer(DENSE, PROMPT, 4)
    assert not measured(one, "load_failures", "cpu")
