"""What the tiers count of requests: each once, however often the engine asks about it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from spec.chain import LOAD_POLICIES, ChainSpec, LoadPolicy
from spec.offloading import StoreContext
from tests.support.changing import ask_for, change, finish, running
from tests.support.clock import Clock, wait_for
from tests.support.explaining import last_told, tier_of
from tests.support.replay import ReplayEngine, answer
from tests.support.replay_chains import (
    MODEL,
    SLOT,
    chain_of,
    cpu,
    disk,
    drive,
    measured,
    redis,
    scheduler_of,
)
from tests.support.servers import RedisServer
from tests.support.slow_store import SlowSpec, TroubledStore
from tiers.connector.scheduler.host_manager import HostManager
from tiers.connector.scheduler.lookup_queue import LookupQueue
from tiers.connector.scheduler.lookups import LookupPace
from tiers.connector.scheduler.store_manager import StoreManager
from tiers.disk.disk_store import DiskStore
from tiers.errors import TierUnavailable
from tiers.explain.accounts import lines

MakeEngine = Callable[..., ReplayEngine]
NO_LOAD = {"kvtiers": {"max_load_tokens": 0}}


def counted(made: ReplayEngine, name: str) -> float:
    """A counter over all tiers."""
    return sum(measures.get(name, 0) for measures in made.stats.data.values())  # type: ignore[misc]


@pytest.mark.parametrize("load", LOAD_POLICIES)
def test_a_request_that_waits_for_room_is_looked_up_once(
    engine: MakeEngine, tmp_path: Path, load: str
) -> None:
    chain = chain_of(cpu(400), disk(tmp_path), load_policy=load)
    made = engine(chain, num_blocks=16, prefix_caching=False)
    prompts = [[n, *range(30)] for n in range(12)]
    requests = [made.add(prompt, 20) for prompt in prompts]
    made.run()
    assert measured(made, "lookups", "cpu") == len(prompts)
    assert counted(made, "lookups") <= 2 * len(prompts)
    assert counted(made, "hits") == counted(made, "hit_tokens") == 0, "of preempted ones alone"
    assert counted(made, "loaded_tokens") == 0 < counted(made, "reloaded_tokens")
    assert made.scheduler.preemptions > 0
    for request, prompt in zip(requests, prompts, strict=True):
        assert request.output == answer(MODEL, prompt, 20)


def test_a_step_that_completes_no_block_asks_no_tier(
    engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    for manager in (HostManager, StoreManager):
        missing = manager.touch_and_list_missing

        def count(self: Any, keys: Any, missing: Any = missing) -> Any:
            asked.append(len(keys))
            return missing(self, keys)

        monkeypatch.setattr(manager, "touch_and_list_missing", count)
    made = engine(chain_of(cpu(400), disk(tmp_path)))
    prompt = [*range(30)]
    assert made.generate(prompt, 40).output == answer(MODEL, prompt, 40)
    assert asked, "blocks are stored"
    assert 0 not in asked


@pytest.mark.parametrize("load", LOAD_POLICIES)
def test_hits_are_those_that_the_engine_counts(
    engine: MakeEngine, tmp_path: Path, load: str
) -> None:
    chain = chain_of(cpu(30), disk(tmp_path), load_policy=load)
    made = engine(chain, num_blocks=24)
    drive(made, seed=5)
    made.settle()
    drive(made, seed=5)
    made.settle()
    assert made.scheduler.preemptions > 0
    hit_tokens = counted(made, "hit_tokens")
    assert hit_tokens == made.scheduler.external_hits >= counted(made, "loaded_tokens") > 0
    assert counted(made, "reloaded_tokens") > 0
    hits, lookups = counted(made, "hits"), counted(made, "lookups")
    assert 0 < hits < lookups <= 2 * 120


def test_a_tier_that_fails_to_load_counts_a_hit_and_the_next_its_own(
    engine: MakeEngine, store: TroubledStore, tmp_path: Path
) -> None:
    slow = SlowSpec(type="slow")
    tiers = chain_of(disk(tmp_path)).tiers
    chain = ChainSpec(version=1, load_when="always", load_policy="first", tiers=(slow, *tiers))
    made = engine(chain, prefix_caching=False)
    prompt = list(range(50))
    made.generate(prompt, 1)
    made.settle()
    store.faults.fail("get", error=TierUnavailable("gone"))
    made.generate(prompt, 1)
    assert [measured(made, "hits", tier) for tier in ("slow", "disk")] == [1, 1]
    assert [measured(made, "hit_tokens", tier) for tier in ("slow", "disk")] == [48, 48]
    assert [measured(made, "loaded_tokens", tier) for tier in ("slow", "disk")] == [0, 48]
    assert [measured(made, "lookups", tier) for tier in ("slow", "disk")] == [2, 2]


def test_a_lookup_that_fails_is_a_failure_of_the_tier(
    engine: MakeEngine, store: TroubledStore
) -> None:
    """Also where it is the scheduler alone that may not, or can't, ask."""
    store.slow.indexed = False
    slow = SlowSpec(type="slow")
    made = engine(ChainSpec(version=1, load_when="always", tiers=(slow,)), prefix_caching=False)
    store.faults.fail("has", error=TierUnavailable("no permissions"))
    for prompt in (PROMPT, PROMPT[1:]):
        made.generate(prompt, 1)
        made.settle()
    failed = manager_of(made)._store.failures.total
    assert measured(made, "tier_failures", "slow") == failed > 0
    assert measured(made, "stored_blocks", "slow") > 0 == measured(made, "store_failures", "slow")


@pytest.mark.parametrize("load", LOAD_POLICIES)
@pytest.mark.parametrize("limit", ["prompt log-probabilities", "max_load_tokens", "tiers"])
def test_a_request_that_may_load_nothing_is_not_looked_up_and_yet_stored(
    engine: MakeEngine, store: TroubledStore, load: LoadPolicy, limit: str
) -> None:
    store.slow.indexed = False  # else offers for storing are lookups, too
    made = engine(
        ChainSpec(version=1, load_when="always", load_policy=load, tiers=(SlowSpec(type="slow"),))
    )
    limits: dict[str, Any] = {"max_load_tokens": 0} if limit == "max_load_tokens" else {"tiers": []}
    options: dict[str, Any] = {"kv_transfer_params": {"kvtiers": limits}}
    if limit == "prompt log-probabilities":
        options = {"skip_reading_prefix_cache": True}
    prompt = list(range(50))
    made.generate(prompt, 1)
    made.settle()
    asked, known = store.asked, len(store.blocks)
    made.scheduler.pool.forget_all()
    request = made.add([*prompt, *range(100, 108)], 1, **options)
    made.run()
    made.settle()
    assert store.asked == asked and request.loaded_tokens == 0
    assert measured(made, "lookups") == 1, "that of the first request"
    assert len(store.blocks) == known + 2


@pytest.mark.parametrize("name", ["__bench_", "__bench_kv_seed_3_0", "__kvwarm_chain_0"])
def test_what_a_worker_of_dynamo_measures_itself_by_is_neither_loaded_nor_stored(
    engine: MakeEngine, store: TroubledStore, name: str
) -> None:
    """Its next start asks the same, and ends where it is told of more than it computed itself."""
    made = engine(ChainSpec(version=1, load_when="always", tiers=(SlowSpec(type="slow"),)))
    prompt = list(range(50))
    made.generate(prompt, 1)
    made.settle()
    asked, known = store.asked, len(store.blocks)
    made.scheduler.pool.forget_all()
    request = made.add([*prompt, *range(100, 108)], 1, name=name)
    made.run()
    made.settle()
    assert (store.asked, len(store.blocks)) == (asked, known) and request.loaded_tokens == 0


def test_a_tier_that_is_paused_or_leaves_is_asked_about_no_request(
    store: TroubledStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its server may be stopped meanwhile, and the tier does not count as failed."""
    asked: list[int] = []
    ask = LookupQueue.ask

    def count(self: Any, keys: Any, first: int) -> Any:
        asked.append(len(keys))
        return ask(self, keys, first)

    monkeypatch.setattr(LookupQueue, "ask", count)
    store.slow.indexed = False
    alone = chain_of(cpu(400)).model_copy(update={"load_when": "always"})

    def beside(paused: Any) -> ChainSpec:
        slow = SlowSpec(type="slow", paused=paused)
        return alone.model_copy(update={"tiers": (*alone.tiers, slow)})

    with running(beside("both"), ranks=1) as made:
        for paused, is_asked in (("both", 0), ("writes", 1), ("reads", 0), (None, 1)):
            assert not change(made, beside(paused)).why
            asked.clear()
            made.generate(PROMPT, 1)
            assert bool(asked) == is_asked, paused
        store.pace.hang("put")
        made.generate([*range(100, 150)], 1)
        leaving = ask_for(made, alone)
        made.step()
        asked.clear()
        made.add(PROMPT, 1)
        assert not asked and not leaving.wait(0)
        store.pace.resume()
        finish(made, leaving)
        made.run()


def test_a_tiers_answer_and_the_engines_notice_are_told_apart(
    engine: MakeEngine, store: TroubledStore, tmp_path: Path
) -> None:
    """A store answers in a quarter of a second, and the engine's step takes nine."""
    store.slow.indexed = False
    made, clock = explaining(engine, tmp_path)
    store.pace.hang("has")
    made.add(PROMPT, 1)
    made.step()  # the engine asks
    clock.now += 0.25
    store.pace.resume()
    queue = manager_of(made)._queue
    # The thread may not even have begun: then the question still waits.
    wait_for(lambda: not queue._waiting and not queue._calls)
    clock.now += 9
    made.run()
    assert samples(made) == (0.25, 9)
    told = last_told(made)
    assert (tier_of(told, "slow")["lookup_ms"], tier_of(told, "slow")["notice_ms"]) == (250, 9000)
    times = told["attempts"][0]["milliseconds"]
    assert (times["lookup"], times["notice"]) == (250, 9000)
    assert "answered in 250 ms, which the engine took 9000 ms later" in "\n".join(lines(told))


def test_what_was_waited_for_a_tier_that_goes_down_is_no_notice(
    engine: MakeEngine, store: TroubledStore, tmp_path: Path
) -> None:
    store.slow.indexed = False
    made, clock = explaining(engine, tmp_path, deadline="100ms")
    store.pace.hang("has")
    made.add(PROMPT, 1)
    made.step()
    clock.now += 0.25
    wait_for(lambda: not manager_of(made).health().reads)
    made.run()
    told = last_told(made)
    assert tier_of(told, "slow")["why"] == "down"
    times = told["attempts"][0]["milliseconds"]
    assert (times["lookup"], times["notice"]) == (250, 0)
    store.pace.resume()


def test_an_answer_that_was_there_before_the_engine_asked_is_noticed_at_once(
    engine: MakeEngine, store: TroubledStore, tmp_path: Path
) -> None:
    store.slow.indexed = False
    made, clock = explaining(engine, tmp_path)
    made.add(PROMPT, 1)
    queue = manager_of(made)._queue

    def is_answered() -> bool:
        with queue._lock:  # a thread that has taken it holds it in neither for a moment
            return not queue._waiting and not queue._calls

    wait_for(is_answered)
    clock.now += 9  # the step that was under way
    made.run()
    assert samples(made) == (0, 0)
    assert last_told(made)["attempts"][0]["milliseconds"]["lookup"] == 0


def test_a_prompt_that_is_looked_up_in_steps_does_not_count_them_as_its_tiers_time(
    engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LookupPace, "FEW", 8)
    monkeypatch.setattr(LookupPace, "AT_ONCE", 16)
    made, clock = explaining(engine, tmp_path, disk(tmp_path / "disk"))
    wait_for(lambda: manager_of(made)._index is not None)
    made.add(PROMPT, 1)
    steps = 0
    while measured(made, "lookups", "disk") < 2:
        clock.now += 3
        made.step()
        steps += 1
    made.run()
    assert steps > 1
    assert samples(made) == (0, 3 * (steps - 1))
    assert tier_of(last_told(made), "disk")["notice_ms"] == 3000 * (steps - 1)


PROMPT = [*range(50)]


def explaining(
    engine: MakeEngine, tmp_path: Path, tier: Any = None, **slow: Any
) -> tuple[ReplayEngine, Clock]:
    """An engine over this tier or `slow_store`, which has stored the prompt, and its clock."""
    settings: dict[str, Any] = {"max_wait": "100s", "explain": {}}
    settings["tiers"] = chain_of(tier).tiers if tier else (SlowSpec(type="slow", **slow),)
    clock = Clock()
    chain = ChainSpec(version=1, load_when="always", **settings)
    made = engine(chain, prefix_caching=False, now=clock)
    made.generate(PROMPT, 1)
    made.settle()
    return made, clock


def manager_of(made: ReplayEngine) -> StoreManager:
    manager = scheduler_of(made).manager
    assert isinstance(manager, StoreManager)
    return manager


def samples(made: ReplayEngine) -> tuple[float, float]:
    """Of the last lookup: what the tier took, and then the engine."""
    (measures,) = (m for m in made.stats.data.values() if "lookups" in m)
    answers, notices = measures["lookup_seconds"], measures["lookup_notice_seconds"]
    assert isinstance(answers, list) and isinstance(notices, list)
    assert len(answers) == len(notices) == measures["lookups"]
    return answers[-1], notices[-1]


@contextmanager
def sets_below(server: RedisServer, space: object) -> Iterator[Callable[[], list[str]]]:
    """Take the names that were set below a key prefix since the last call, each as often."""
    with server.client() as client, client.pubsub(ignore_subscribe_messages=True) as told:
        client.config_set("notify-keyspace-events", "K$")
        front = f"__keyspace@0__:{space}:"
        told.psubscribe(f"{front}*", "end")
        for _ in range(2):  # the server says that it tells
            told.get_message(timeout=30)

        def take() -> list[str]:
            client.publish("end", "")  # comes behind all that was set before
            found = []
            for message in told.listen():
                if message["channel"] == b"end":
                    break
                if message["data"] == b"set":
                    found.append(message["channel"].decode("latin-1").removeprefix(front))
            return found

        yield take


def test_what_a_server_has_already_is_renewed_and_not_stored_once_more(
    engine: MakeEngine, server: RedisServer, tmp_path: Path
) -> None:
    """As many blocks are stored as values are set; the others only live longer."""
    prompt = list(range(50))
    with sets_below(server, tmp_path) as take_sets:
        for more in (0, 24):
            made = engine(chain_of(redis(server, tmp_path, ttl="1h")))
            request = made.add([*prompt, *range(100, 100 + more)], 1, kv_transfer_params=NO_LOAD)
            made.run()
            made.settle()
            # Notes and marks of the engine lie beside the blocks.
            sets = [name for name in take_sets() if not name.startswith("namespace:")]
            stored, renewed = (
                measured(made, f"{n}_blocks", "redis") for n in ("stored", "renewed")
            )
            assert stored == len(sets) == len(set(sets)), "what was sent"
            assert stored + renewed == len(request.block_hashes)
            assert measured(made, "stored_bytes", "redis") == stored * MODEL.payload_bytes
            assert measured(made, "renewed_bytes", "redis") == renewed * MODEL.payload_bytes
    assert renewed == len(prompt) // MODEL.block_tokens


def test_a_disk_tier_tells_how_full_it_is_and_what_it_evicts(
    engine: MakeEngine, tmp_path: Path
) -> None:
    """Each rank evicts its part in a process of its own."""
    made = engine(chain_of(disk(tmp_path, "160KiB")), world_size=2, processes=True)
    drive(made, seed=5, world_size=2)
    made.settle()
    stored, evicted = (measured(made, name, "disk") for name in ("stored_blocks", "evictions"))
    held = DiskStore(tmp_path, 160 << 10, StoreContext(MODEL.payload_bytes, 2)).usage()
    assert evicted > 0 and stored - evicted == held.blocks
    taken = measured(made, "store_taken", "disk")
    # Of what was taken a few may be there already, or not stored.
    assert stored / 2 <= taken < 0.6 * stored, "once for both ranks"
    late = time.monotonic() + 30
    while measured(made, "used_bytes", "disk") != held.used:
        assert time.monotonic() < late
        made.step()
    assert measured(made, "capacity_bytes", "disk") == 160 << 10
    assert measured(made, "shared", "disk") == 1, "used_bytes are of all engines"


def test_a_cpu_tier_tells_how_full_it_is(engine: MakeEngine) -> None:
    made = engine(chain_of(cpu(4)))
    made.generate(list(range(30)), 1)
    made.settle()
    made.step()
    kept = scheduler_of(made).manager.slots_kept()
    assert 0 < kept <= 4
    assert measured(made, "used_bytes", "cpu") == kept * SLOT
    assert measured(made, "capacity_bytes", "cpu") == 4 * SLOT
    assert measured(made, "shared", "cpu") == 0
