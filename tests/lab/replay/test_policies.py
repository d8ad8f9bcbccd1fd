"""Load policies over real tiers: several tiers load for one request, and every answer is right."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from pydantic import PrivateAttr

from spec.chain import LOAD_POLICIES, ChainSpec, LoadPolicy
from spec.offloading import StoreContext, StoreSpec
from tests.support.replay import ReplayEngine, ReplayRequest, answer
from tests.support.replay_chains import (
    MODEL,
    SLOT,
    chain_of,
    cpu,
    crowded,
    damage_disk,
    disk,
    drive,
    drop_from_disk,
    measured,
    names,
    redis,
    scheduler_of,
)
from tests.support.servers import RedisServer
from tiers.disk.spec import DiskSpec
from tiers.gpu.copier import CpuCopier
from tiers.lab.replay.requests import Status
from tiers.remote.redis.redis_store import RedisStore
from tiers.store import Block

PROMPT = list(range(50))
"""Twelve full blocks, and two tokens more."""
EVEN = range(0, 12, 2)
ODD = range(1, 12, 2)
RANKS = [(1, False), (2, False), pytest.param(2, True, marks=pytest.mark.faults)]
IDS = ["one rank", "two ranks", "two processes"]

MakeEngine = Callable[..., ReplayEngine]


def fill(made: ReplayEngine) -> list[bytes]:
    """Compute the prompt once, so that all tiers hold it; its block hashes."""
    request = made.generate(PROMPT, 1)
    made.settle()
    return request.block_hashes[:12]


def ask_again(made: ReplayEngine, world_size: int = 1, **options: Any) -> ReplayRequest:
    """Ask for the prompt again, which must be answered rightly."""
    request = made.generate(PROMPT, 3, **options)
    assert request.output == answer(MODEL, PROMPT, 3, world_size)
    made.settle()
    return request


def loaded(made: ReplayEngine) -> dict[str, float]:
    """Blocks of use that each tier has loaded, for the first time or again."""
    counted = {
        name: sum(measured(made, f"{kind}_tokens", name) for kind in ("loaded", "reloaded")) / 4
        for name in made.stats.data
    }
    return {name: blocks for name, blocks in counted.items() if blocks}


def pick(hashes: Sequence[bytes], blocks: Sequence[int]) -> list[bytes]:
    return [hashes[block] for block in blocks]


@pytest.mark.parametrize(("world_size", "processes"), RANKS, ids=IDS)
def test_two_tiers_fill_each_others_gaps(
    engine: MakeEngine, tmp_path: Path, world_size: int, processes: bool
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    chain = chain_of(disk(one), disk(two), load_policy="stitched")
    made = engine(chain, prefix_caching=False, world_size=world_size, processes=processes)
    hashes = fill(made)
    drop_from_disk(one, names(made, pick(hashes, ODD)))
    drop_from_disk(two, names(made, pick(hashes, EVEN)))
    assert ask_again(made, world_size).loaded_tokens == 48
    assert loaded(made) == {"disk": 6, "disk-2": 6}


@pytest.mark.parametrize(("world_size", "processes"), RANKS, ids=IDS)
def test_a_small_cpu_tier_over_disk_over_redis(
    engine: MakeEngine,
    tmp_path: Path,
    shared_server: RedisServer,
    world_size: int,
    processes: bool,
) -> None:
    chain = chain_of(
        cpu(4 * world_size), disk(tmp_path), redis(shared_server, tmp_path), load_policy="stitched"
    )
    made = engine(chain, prefix_caching=False, world_size=world_size, processes=processes)
    hashes = fill(made)
    drop_from_disk(tmp_path, names(made, pick(hashes, [6, 9, 10])))
    assert ask_again(made, world_size).loaded_tokens == 48
    counted = loaded(made)
    assert set(counted) == {"cpu", "disk", "redis"}
    assert sum(counted.values()) == 12
    assert counted["redis"] <= 3, "redis loads only what the tiers above it lack"


@pytest.mark.parametrize("late", range(3), ids=["rank 0", "rank 1", "scheduler"])
def test_what_is_computed_first_is_stored_however_late_a_server_answers_at_the_start(
    engine: MakeEngine,
    tmp_path: Path,
    shared_server: RedisServer,
    monkeypatch: pytest.MonkeyPatch,
    late: int,
) -> None:
    """By engines of tests: others go on without the tier, and store nothing in it so far."""
    opened = itertools.count()

    def reach(store: RedisStore, at_once: Callable[[RedisStore], None] = RedisStore.reach) -> None:
        time.sleep(0.5 * (next(opened) == late))  # more than a start waits elsewhere
        at_once(store)

    monkeypatch.setattr(RedisStore, "reach", reach)
    made = engine(chain_of(redis(shared_server, tmp_path)), prefix_caching=False, world_size=2)
    fill(made)
    assert ask_again(made, 2).loaded_tokens == 48


@pytest.mark.parametrize(("load", "expected"), [("first", 4), ("longest", 48), ("stitched", 48)])
def test_a_short_prefix_above_hides_a_longer_one_only_from_first(
    engine: MakeEngine, tmp_path: Path, load: LoadPolicy, expected: int
) -> None:
    one = tmp_path / "one"
    made = engine(
        chain_of(disk(one), disk(tmp_path / "two"), load_policy=load), prefix_caching=False
    )
    drop_from_disk(one, names(made, fill(made)[1:]))
    assert ask_again(made).loaded_tokens == expected


@pytest.mark.parametrize("damaged", ["one", "two"])
@pytest.mark.parametrize(("world_size", "processes"), RANKS, ids=IDS)
def test_a_block_that_fails_in_one_of_two_tiers_truncates_what_both_load(
    engine: MakeEngine, tmp_path: Path, damaged: str, world_size: int, processes: bool
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    chain = chain_of(disk(one), disk(two), load_policy="stitched")
    made = engine(chain, prefix_caching=False, world_size=world_size, processes=processes)
    hashes = fill(made)
    drop_from_disk(one, names(made, pick(hashes, [0, 1, 2, 8, 9, 10, 11])))
    damage_disk(tmp_path / damaged)
    request = ask_again(made, world_size)
    if damaged == "one":
        assert loaded(made) == {"disk-2": 3}, "its blocks behind the gap are of no use"
    else:
        # With nothing usable the request starts again, and the tier that is left has no prefix.
        assert loaded(made) == {}
    assert request.loaded_tokens == (48 if damaged == "one" else 0)
    assert measured(made, "load_failures", "disk" if damaged == "one" else "disk-2") > 0


@pytest.mark.parametrize("load", LOAD_POLICIES)
def test_a_request_ends_when_every_tier_fails_to_load_it(
    engine: MakeEngine, tmp_path: Path, load: LoadPolicy
) -> None:
    folders = [tmp_path / name for name in ("one", "two", "three")]
    made = engine(chain_of(*map(disk, folders), load_policy=load), prefix_caching=False)
    fill(made)
    for folder in folders:
        damage_disk(folder)
    ask_again(made)
    assert loaded(made) == {}
    for tier in ("disk", "disk-2", "disk-3"):
        assert measured(made, "load_failures", tier) <= 12, "each tier fails it once at most"
    again = made.generate(PROMPT, 3)
    assert again.output == answer(MODEL, PROMPT, 3)


class LyingStore:
    """A store that says it has everything, also after it could not load it."""

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        return [True] * len(keys)

    peek = has

    def put(self, blocks: Sequence[Block]) -> list[bool]:
        return [True] * len(blocks)

    def get(self, blocks: Sequence[Block]) -> list[bool]:
        return [False] * len(blocks)

    def drop(self, keys: Sequence[bytes]) -> None:
        pass

    def close(self) -> None:
        pass


class LyingSpec(StoreSpec):
    is_prompt: ClassVar[bool] = True

    def open(self, site: StoreContext) -> LyingStore:
        return LyingStore()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("load", ["first", "longest", "stitched"])  # all prefer upper tiers
def test_tiers_that_never_load_what_they_promise_are_each_tried_once(
    engine: MakeEngine, tmp_path: Path, load: LoadPolicy, world_size: int
) -> None:
    tiers = [LyingSpec(type="lying", name="a"), LyingSpec(type="lying", name="b")]
    honest = DiskSpec(type="disk", path=tmp_path, capacity=1 << 20)
    chain = ChainSpec(
        version=1, load_when="always", staging=64 * SLOT, load_policy=load, tiers=(*tiers, honest)
    )
    made = engine(chain, prefix_caching=False, world_size=world_size)
    fill(made)
    request = ask_again(made, world_size)
    assert request.loaded_tokens == 48
    assert loaded(made) == {"disk": 12}, "the tier that can serves in the end"
    for tier in ("a", "b"):
        assert measured(made, "load_failures", tier) == 2 * 12 * world_size, "once per request"


class SlowScatters(CpuCopier):
    """Loads that end long after others of the same request."""

    def scatter(self, *args: Any) -> Any:
        time.sleep(random.random() * 0.01)
        return super().scatter(*args)


@pytest.mark.parametrize(("seed", "world_size"), [(0, 1), (1, 2), (2, 1)])
def test_aborts_and_preemptions_in_the_middle_of_shared_loads(
    engine: MakeEngine, tmp_path: Path, shared_server: RedisServer, seed: int, world_size: int
) -> None:
    made = engine(
        crowded(tmp_path, shared_server, world_size, cpu_blocks=6, load_policy="stitched"),
        num_blocks=24,
        prefix_caching=False,
        world_size=world_size,
        open_copier=SlowScatters,
    )
    drive(made, seed, world_size=world_size)
    drive(made, seed, abort=0.4, world_size=world_size)
    assert len(loaded(made)) > 1


def test_an_aborted_request_keeps_its_blocks_until_the_last_tier_has_ended(
    engine: MakeEngine, tmp_path: Path
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    made = engine(
        chain_of(disk(one), disk(two), load_policy="stitched"),
        prefix_caching=False,
        open_copier=SlowScatters,
    )
    drop_from_disk(one, names(made, fill(made)[6:]))
    request = made.add(PROMPT)
    made.step()
    assert request.status is Status.LOADING
    blocks = request.get_block_ids()[0]
    made.scheduler.abort(request.request_id)
    tiers = [scheduler_of(made, place) for place in range(2)]
    while request.request_id in made.scheduler.requests:
        assert made.scheduler.pool.num_free == made.num_blocks - len(blocks)
        made.step()
    assert not any(tier._jobs.any_loading for tier in tiers)
    ask_again(made)


def test_preempted_requests_are_loaded_from_several_tiers_again_and_again(
    engine: MakeEngine, tmp_path: Path
) -> None:
    chain = chain_of(cpu(30), disk(tmp_path), load_policy="stitched")
    made = engine(chain, num_blocks=24, prefix_caching=False)
    prompts = [[n] * 20 for n in range(8)]
    requests = [made.add(prompt, 40) for prompt in prompts]
    made.run()
    assert made.scheduler.preemptions > 0
    assert set(loaded(made)) == {"cpu", "disk"}
    for request, prompt in zip(requests, prompts, strict=True):
        assert request.output == answer(MODEL, prompt, 40)


class SilentStore:
    """A store that does not answer until it is told to."""

    def __init__(self) -> None:
        self.speak = threading.Event()

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        self.speak.wait()
        return [False] * len(keys)

    def put(self, blocks: Sequence[Block]) -> list[bool]:
        return [False] * len(blocks)

    def get(self, blocks: Sequence[Block]) -> list[bool]:
        return [False] * len(blocks)

    def drop(self, keys: Sequence[bytes]) -> None:
        pass

    def close(self) -> None:
        self.speak.set()


class SilentSpec(StoreSpec):
    _store: SilentStore = PrivateAttr(default_factory=SilentStore)

    def open(self, site: StoreContext) -> SilentStore:
        return self._store


@pytest.mark.parametrize("load", ["longest", "stitched"])
def test_a_tier_that_is_looking_delays_nobody_once_the_others_have_all(
    engine: MakeEngine, tmp_path: Path, load: LoadPolicy
) -> None:
    silent = SilentSpec(type="silent")
    speak = silent._store.speak
    chain = ChainSpec(
        version=1,
        load_when="always",
        staging=64 * SLOT,
        load_policy=load,
        tiers=(silent, DiskSpec(type="disk", path=tmp_path, capacity=1 << 20)),
    )
    made = engine(chain, prefix_caching=False)
    request = made.add(PROMPT, 1)
    for _ in range(20):
        made.step()
    assert request.status is Status.WAITING, "nobody has it yet: the silent tier might"
    speak.set()
    made.run()
    made.settle()
    speak.clear()
    assert ask_again(made).loaded_tokens == 48
    speak.set()


@pytest.mark.parametrize("load", LOAD_POLICIES)
def test_a_request_limits_its_own_loading(
    engine: MakeEngine, tmp_path: Path, load: LoadPolicy
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    made = engine(chain_of(disk(one), disk(two), load_policy=load), prefix_caching=False)
    drop_from_disk(one, names(made, fill(made)[2:]))

    def load_with(**limits: Any) -> int:
        # A salt of its own would change the blocks: so nothing is stored, and one keeps its gap.
        params = {"kvtiers": {"store": False, **limits}}
        return ask_again(made, kv_transfer_params=params).loaded_tokens

    assert load_with() == (8 if load == "first" else 48)
    assert load_with(max_load_tokens=7) == 4
    assert load_with(max_load_tokens=3) == load_with(max_load_tokens=0) == 0
    assert load_with(max_load_tokens=20) == (8 if load == "first" else 20)
    assert load_with(tiers=["disk"]) == 8
    assert load_with(tiers=["disk-2"]) == 48
    assert load_with(tiers=[]) == load_with(tiers=["tape"]) == 0


def test_a_request_keeps_its_blocks_out_of_the_tiers(engine: MakeEngine, tmp_path: Path) -> None:
    made = engine(chain_of(cpu(), disk(tmp_path)), prefix_caching=False)
    ask_again(made, kv_transfer_params={"kvtiers": {"store": False}})
    assert not any(c.get("stored_blocks") for c in made.stats.data.values())
    assert ask_again(made).loaded_tokens == 0


def test_malformed_limits_are_said_once_and_ignored(
    engine: MakeEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = engine(chain_of(cpu(), disk(tmp_path)), prefix_caching=False)
    fill(made)
    request = ask_again(made, kv_transfer_params={"kvtiers": {"max_load_token": 4}})
    assert request.loaded_tokens == 48
    said = [r.getMessage() for r in caplog.records if request.request_id in r.getMessage()]
    assert len(said) == 1 and "max_load_token" in said[0]
    caplog.clear()
    ask_again(made, kv_transfer_params={"kvtiers": {"max_load_token": 4}})
    assert caplog.messages == [], "a client that goes on does not fill the log"
