"""An engine with an EAGLE or MTP drafter computes the last block of each prefix that it finds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from spec.chain import LOAD_POLICIES
from tests.lab.replay.shared_prefix import PREFIX, add, ended, fill, hits
from tests.support.replay import ReplayEngine, ReplayModel, answer
from tests.support.replay_chains import DENSE, SLOT, chain_of, cpu, disk, drop_from_disk, names
from tiers.lab.replay.requests import Status

MakeEngine = Callable[..., ReplayEngine]
MODELS = [
    ReplayModel(),
    ReplayModel(windows=(None, 14, 7)),
    ReplayModel(windows=(14,)),
]


@pytest.fixture(params=MODELS, ids=["plain", "hybrid", "windows"])
def drafting(
    request: pytest.FixtureRequest, engine: MakeEngine, tmp_path: Path
) -> Callable[..., ReplayEngine]:
    """Makes an engine with a drafter, of a model."""
    model: ReplayModel = request.param

    def make(load: str) -> ReplayEngine:
        tiers = [cpu(20), disk(tmp_path, "8MiB")]
        chain = chain_of(*tiers, load_policy=load, staging=400 * SLOT)
        return engine(chain, model=model, num_blocks=600, drops_last=True)

    return make


@pytest.mark.parametrize("prompt", [[*PREFIX, 1], PREFIX], ids=["more", "full blocks"])
def test_a_block_that_the_engine_leaves_out_of_its_own_hits_is_not_loaded_back(
    drafting: Callable[..., ReplayEngine], prompt: list[int]
) -> None:
    made = drafting("stitched")
    made.generate(prompt, 2)
    made.settle()
    warm = made.generate(prompt, 2)
    assert warm.output == answer(made.model, prompt, 2)
    assert warm.loaded_tokens == 0
    assert hits(made) == 0


@pytest.mark.parametrize("load", LOAD_POLICIES)
def test_what_is_loaded_ends_one_block_before_what_a_tier_has(
    drafting: Callable[..., ReplayEngine], load: str
) -> None:
    made = drafting(load)
    fill(made)
    request = add(made, 1)
    ended(made, [request])
    assert request.loaded_tokens == len(PREFIX) - made.model.block_tokens


def test_windows_are_whole_before_the_block_that_is_left_out(
    engine: MakeEngine, tmp_path: Path
) -> None:
    """Block 11 of 16 has lost a windowed part, which a load that ends with block 14 reaches."""
    chain = chain_of(disk(tmp_path, "8MiB"), staging=400 * SLOT)
    one = engine(chain, model=DENSE, num_blocks=600, drops_last=True)
    hashes = fill(one).block_hashes
    gone = names(one, [hashes[11]], group=1)
    one.close()
    drop_from_disk(tmp_path, gone)
    two = engine(chain, model=DENSE, num_blocks=600, drops_last=True)
    request = add(two, 1)
    ended(two, [request])
    assert request.loaded_tokens == 10 * DENSE.block_tokens


def test_requests_at_once_do_not_wait_for_what_they_then_load_themselves(
    drafting: Callable[..., ReplayEngine],
) -> None:
    made = drafting("first")
    fill(made)
    requests = [add(made, n) for n in range(8)]
    made.step()
    loading = sum(request.status is Status.LOADING for request in requests)
    ended(made, requests)
    if made.model.windows == (None,):
        assert loading == 1 and 15 <= hits(made) <= 15 + 7, "a block each, at most"
    else:
        assert loading == 8, "its windows end where the load does, one block too late"
