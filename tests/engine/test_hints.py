"""Hints of requests: what they keep from eviction or let go, and what nobody can do with them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from spec.offloading import StoreContext
from tests.support.clock import Clock
from tests.support.replay import ReplayEngine, ReplayRequest, answer
from tests.support.replay_chains import (
    HYBRID,
    MODEL,
    RECURRENT,
    chain_of,
    coverage_of,
    cpu,
    damage_disk,
    disk,
    measured,
    names,
    scheduler_of,
)
from tests.test_readme import blocks
from tiers.connector.policy.request_params import MAX_TTL
from tiers.connector.scheduler import offloading_scheduler, tier_hints
from tiers.connector.scheduler.lookups import LookupPace
from tiers.disk.disk_store import DiskStore
from tiers.disk.slab import slot_bytes

MakeEngine = Callable[..., ReplayEngine]
SIZE = MODEL.block_tokens
ROOM = 16
"""Blocks that the tier has room for."""
PREFIX = list(range(4 * SIZE))
"""Four blocks."""
KINDS = ["lru", "arc", "disk"]
RETAIN = {"retain": {"ttl": 60}}
PAGE = Path(__file__).parents[2] / "docs" / "hints.md"


def tier(kind: str, folder: Path, room: int) -> dict[str, Any]:
    if kind == "disk":
        return disk(folder, f"{room * slot_bytes(MODEL.payload_bytes)}B", name="tier")
    return cpu(room, eviction=kind, name="tier")


def make(engine: MakeEngine, kind: str, folder: Path, **options: Any) -> ReplayEngine:
    """An engine over one small tier; without hints its own cache would serve as well."""
    more = {"max_retained": options.pop("max_retained", 0.5)}
    more["tenants"] = options.pop("tenants", {"": {"max_retained": 0.5}})
    room = options.pop("room", ROOM) * options.get("world_size", 1)
    chain = chain_of(tier(kind, folder, room), **more)
    return engine(chain, prefix_caching=False, **options)


def ask(
    engine: ReplayEngine, tokens: Iterable[int], hints: Any = None, salt: str = ""
) -> ReplayRequest:
    """Run a request of one token's answer to its end, and what it stores."""
    params = None if hints is None else {"kvtiers": {"hints": hints}}
    request = engine.generate([*tokens], 1, salt, params)
    engine.settle()
    return request


def held(engine: ReplayEngine, tokens: Iterable[int], salt: str = "") -> list[bool]:
    """Which full blocks of these tokens the tier has."""
    probe = ReplayRequest("probe", [*tokens], 1, SIZE, salt)
    return [bool(one) for one in coverage_of(engine, probe)]


def keys_of(engine: ReplayEngine, tokens: Iterable[int]) -> list[bytes]:
    """The keys of these tokens' full blocks."""
    assert engine.connector is not None
    probe, requests = ReplayRequest("probe", [*tokens], 1, SIZE), engine.connector._requests
    keys = list(requests.keys(requests.of(probe)))
    requests.forget(probe)
    return keys


def flood(engine: ReplayEngine, prompts: int = ROOM, hints: Any = None, salt: str = "") -> None:
    """Store prompts of two blocks each, which are never asked for again."""
    start = engine.steps * 1000
    for number in range(prompts):
        ask(engine, [start + number, *range(2 * SIZE - 1)], hints, salt)


def assert_retained_for(seconds: float, made: ReplayEngine, clock: Clock) -> None:
    clock.now += seconds - 1
    flood(made)
    assert held(made, PREFIX) == [True] * 4
    clock.now += 2
    flood(made)
    assert held(made, PREFIX) == [False] * 4


def retained(engine: ReplayEngine) -> float:
    return measured(engine, "retained_blocks", "tier")


@pytest.mark.parametrize("hints", [None, RETAIN], ids=["without", "retain"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_retained_prefix_survives_a_flood(
    engine: MakeEngine, tmp_path: Path, kind: str, hints: Any
) -> None:
    made = make(engine, kind, tmp_path)
    ask(made, PREFIX, hints)
    flood(made)
    assert held(made, PREFIX) == [hints is not None] * 4
    assert retained(made) == (4 if hints else 0)
    later = made.generate([*PREFIX, 7], 3)
    assert later.output == answer(MODEL, [*PREFIX, 7], 3)
    assert later.loaded_tokens == (4 * SIZE if hints else 0)


@pytest.mark.parametrize("kind", ["lru", "disk"])
def test_it_survives_on_all_ranks(engine: MakeEngine, tmp_path: Path, kind: str) -> None:
    made = make(engine, kind, tmp_path, world_size=2)
    ask(made, PREFIX, RETAIN)
    flood(made)
    assert held(made, PREFIX) == [True] * 4


@pytest.mark.parametrize("model", [HYBRID, RECURRENT], ids=["windows", "states"])
@pytest.mark.parametrize("kind", ["lru", "disk"])
def test_all_parts_of_its_blocks_survive(
    engine: MakeEngine, tmp_path: Path, kind: str, model: Any
) -> None:
    """Of layers with windows and with states, too."""
    made = make(engine, kind, tmp_path, model=model, room=60)
    prompt = list(range(8 * SIZE + 1))
    ask(made, prompt, RETAIN)
    flood(made, 2 * ROOM)
    assert made.generate(prompt, 2).loaded_tokens == 8 * SIZE


class Paced:
    """An engine that asks its tier for 25 blocks a step, and for 2 without a wait. Asking takes a
    second of the machine's time, which `clock` tells."""

    def __init__(self, made: ReplayEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made, self.clock = made, Clock(0.0)
        self.asked: list[Sequence[bytes]] = []
        """The keys of each step that were asked for, by now."""
        manager = scheduler_of(made).manager
        monkeypatch.setattr(LookupPace, "AT_ONCE", 100)
        monkeypatch.setattr(LookupPace, "FEW", 8)
        manager.pace = LookupPace(1, self.clock)
        held = manager.pinnable

        def asking(keys: Sequence[bytes]) -> list[bytes]:
            self.asked.append(keys)
            self.clock.now += 1
            return held(keys)

        monkeypatch.setattr(manager, "pinnable", asking)

    def hint(self, prompt: Iterable[int]) -> ReplayRequest:
        """Queue a request that stores nothing, and retains what others stored."""
        return self.made.add(prompt, 1, "", {"kvtiers": {"store": False, "hints": RETAIN}})

    def steps(self, count: int = 20) -> list[int]:
        """Take steps, a second apart; how many blocks were asked for at once."""
        for _ in range(count):
            self.clock.now += 1
            self.made.step()
        return [len(keys) for keys in self.asked]


def test_a_hint_about_a_long_prompt_is_obeyed_over_several_steps(
    engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a long prompt is looked up: no step looks up all of it, and the time that a look takes
    allows for no more of it."""
    made = make(engine, "lru", tmp_path, room=400, num_blocks=200)
    prompt = list(range(100 * SIZE))
    ask(made, prompt)
    paced = Paced(made, monkeypatch)
    paced.hint(prompt)
    made.run()  # it loads, which may take longer than the steps
    assert paced.steps() == [25] * 4 and retained(made) == 100
    paced.hint(prompt)
    made.run()
    for _ in range(5):
        made.step()
    assert len(paced.asked) == 5, "no time has passed but that of the look"
    made.reset_cache()
    assert len(paced.steps()) == 5 and retained(made) == 0


def test_hints_are_obeyed_in_their_order_and_their_time_counts_while_they_wait(
    engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(1000.0)
    made = make(engine, "lru", tmp_path, room=400, num_blocks=200, now=clock)
    first, second = (list(range(start, start + 40 * SIZE)) for start in (0, 5000))
    for prompt in (first, second):
        ask(made, prompt)
    paced = Paced(made, monkeypatch)
    for prompt in (first, second):
        paced.hint(prompt)
    made.run()
    clock.now += 59
    assert paced.steps() == [25, 15, 10, 25, 5]
    asked = [key for keys in paced.asked for key in keys]
    keys = [keys_of(made, prompt) for prompt in (first, second)]
    # The requests load at once, and either may end first.
    assert asked in (keys[0] + keys[1], keys[1] + keys[0]) and retained(made) == 80
    clock.now += 2
    made.step()
    assert retained(made) == 0, "since the requests ended"


def test_short_hints_of_one_step_wait_once_it_has_looked_up_enough(
    engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make(engine, "lru", tmp_path, room=400, num_blocks=200)
    prompts = [list(range(start, start + 2 * SIZE)) for start in range(0, 3000, 1000)]
    for prompt in prompts:
        ask(made, prompt)
    paced = Paced(made, monkeypatch)
    monkeypatch.setattr(LookupPace, "AT_ONCE", 8)
    monkeypatch.setattr(offloading_scheduler, "LOOK_SECONDS", 0.0)  # at what is retained
    for prompt in prompts:
        paced.hint(prompt)
    while not paced.asked:
        paced.steps(1)
    assert len(paced.asked) == 1 and retained(made) == 2
    paced.steps()
    assert retained(made) == 6


@pytest.mark.parametrize("most", [0, 3])
def test_no_more_hints_wait_than_are_obeyed_soon(
    engine: MakeEngine, tmp_path: Path, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make(engine, "lru", tmp_path)
    monkeypatch.setattr(tier_hints, "MOST_WAITING", most)
    ask(made, PREFIX, RETAIN)
    assert retained(made) == 0 and measured(made, "retain_refused", "tier") >= 4
    ask(made, PREFIX, {"demote": {}})
    assert measured(made, "demote_refused", "tier") >= 4
    assert measured(made, "demoted_blocks", "tier") == 0


def test_what_others_stored_is_retained_too(engine: MakeEngine, tmp_path: Path) -> None:
    made = make(engine, "lru", tmp_path)
    ask(made, PREFIX)
    made.generate(PREFIX, 1, "", {"kvtiers": {"store": False, "hints": RETAIN}})
    flood(made)
    assert held(made, PREFIX) == [True] * 4


def test_only_the_prompt_is_retained(engine: MakeEngine, tmp_path: Path) -> None:
    made = make(engine, "lru", tmp_path)
    request = made.generate(PREFIX, 2 * SIZE + 1, "", {"kvtiers": {"hints": RETAIN}})
    made.settle()
    assert held(made, request.tokens[:-1]) == [True] * 6
    flood(made)
    assert held(made, request.tokens[:-1]) == [True] * 4 + [False] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_when_its_time_is_over_it_is_as_any_other(
    engine: MakeEngine, tmp_path: Path, kind: str
) -> None:
    clock = Clock(1000.0)
    made = make(engine, kind, tmp_path, now=clock)
    ask(made, PREFIX, RETAIN)
    assert_retained_for(60, made, clock)
    assert retained(made) == 0


@pytest.mark.parametrize("kind", ["lru", "disk"])
def test_its_time_counts_from_the_last_request_that_said_so(
    engine: MakeEngine, tmp_path: Path, kind: str
) -> None:
    clock = Clock(1000.0)
    made = make(engine, kind, tmp_path, now=clock)
    ask(made, PREFIX, RETAIN)
    clock.now += 50
    ask(made, PREFIX, RETAIN)
    assert_retained_for(60, made, clock)


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_that_retains_everything_gets_its_share(
    engine: MakeEngine, tmp_path: Path, kind: str
) -> None:
    """Others' blocks are stored and found, and another tenant can retain its own."""
    made = make(engine, kind, tmp_path, tenants={})
    flood(made, hints={"retain": {"ttl": MAX_TTL}}, salt="greedy")
    assert retained(made) == ROOM / 4
    assert measured(made, "retain_refused", "tier") > 0
    ask(made, PREFIX, RETAIN, "modest")
    flood(made, hints={"retain": {"ttl": MAX_TTL}}, salt="greedy")
    assert retained(made) == ROOM / 2
    assert held(made, PREFIX, "modest") == [True] * 4
    for number in range(3):
        prompt = [900 + number, *PREFIX]
        ask(made, prompt)
        assert held(made, prompt) == [True] * 4


def test_many_clients_that_retain_everything_get_the_chains_share(
    engine: MakeEngine, tmp_path: Path
) -> None:
    made = make(engine, "lru", tmp_path, tenants={"own": {"max_retained": 0.0}})
    for salt in ("own", "a", "b", "c", "d"):
        flood(made, 4, {"retain": {"ttl": MAX_TTL}}, salt)
        assert retained(made) <= ROOM / 2
    assert retained(made) == ROOM / 2
    assert not any(tenant == "own" for tenant in tenants_of(made))


def tenants_of(made: ReplayEngine) -> set[str]:
    return {tenant for _, tenant in scheduler_of(made)._hints._retained._kept.values()}


def test_nothing_is_retained_where_the_chain_says_so(engine: MakeEngine, tmp_path: Path) -> None:
    made = make(engine, "lru", tmp_path, max_retained=0, tenants={})
    ask(made, PREFIX, RETAIN)
    flood(made)
    assert held(made, PREFIX) == [False] * 4


def test_a_quota_and_a_reset_take_what_is_retained(engine: MakeEngine, tmp_path: Path) -> None:
    quota = {"": {"quota": 6 * MODEL.payload_bytes, "max_retained": 0.5}}
    made = make(engine, "lru", tmp_path, tenants=quota)
    ask(made, PREFIX, RETAIN)
    flood(made, 2)
    assert held(made, PREFIX) == [True] * 2 + [False] * 2
    assert retained(made) == 2, "room for other hints"
    flood(made, 4, RETAIN)
    assert retained(made) == 6 and not measured(made, "retain_refused", "tier")
    assert made.reset_cache()
    made.generate([1], 1)
    assert retained(made) == 0
    assert scheduler_of(made).pool.in_use == 0, "no slot is kept for what is gone"


def test_what_no_room_was_left_for_takes_none_of_a_quota(
    engine: MakeEngine, tmp_path: Path
) -> None:
    """Of a prompt that is larger than the tier, whose job evicts its own blocks."""
    quota = {"": {"quota": 6 * MODEL.payload_bytes, "max_retained": 0.5}}
    made = make(engine, "lru", tmp_path, room=6, tenants=quota)
    ask(made, PREFIX[: 3 * SIZE], RETAIN)
    ask(made, range(100, 100 + 8 * SIZE))
    assert held(made, PREFIX[: 3 * SIZE]) == [True] * 3
    assert sum(held(made, range(100, 100 + 8 * SIZE))) == 3


def test_what_turns_out_to_be_damaged_is_not_retained(engine: MakeEngine, tmp_path: Path) -> None:
    made = make(engine, "disk", tmp_path)
    ask(made, PREFIX, RETAIN)
    damage_disk(tmp_path)
    ask(made, [*PREFIX, 7])
    assert retained(made) == 0
    manager: Any = scheduler_of(made).manager
    assert not manager._uses._pinned


@pytest.mark.parametrize("kind", ["lru", "disk"])
def test_a_restart_forgets(engine: MakeEngine, tmp_path: Path, kind: str) -> None:
    first = make(engine, kind, tmp_path)
    ask(first, PREFIX, RETAIN)
    first.close()
    second = make(engine, kind, tmp_path)
    assert held(second, PREFIX) == [kind == "disk"] * 4
    flood(second)
    assert held(second, PREFIX) == [False] * 4


@pytest.mark.parametrize("kind", ["lru", "arc"])
def test_a_demoted_prompt_goes_first_from_its_tail(
    engine: MakeEngine, tmp_path: Path, kind: str
) -> None:
    made = make(engine, kind, tmp_path)
    ask(made, PREFIX)
    demoted = [900, *PREFIX[1:]]
    ask(made, demoted, {"demote": {}})
    flood(made, (ROOM - 8) // 2 + 1)
    assert held(made, PREFIX) == [True] * 4
    assert held(made, demoted) == [True, True, False, False]
    assert measured(made, "demoted_blocks", "tier") == 4


@pytest.mark.parametrize("kind", KINDS)
def test_a_demoted_prompt_is_retained_no_more(
    engine: MakeEngine, tmp_path: Path, kind: str
) -> None:
    made = make(engine, kind, tmp_path)
    ask(made, PREFIX, RETAIN)
    ask(made, PREFIX, {"demote": {}})
    assert retained(made) == 0
    flood(made)
    assert held(made, PREFIX) == [False] * 4


@pytest.mark.parametrize("kind", ["lru", "arc"])
def test_a_demoted_prompt_that_is_used_stays(engine: MakeEngine, tmp_path: Path, kind: str) -> None:
    made = make(engine, kind, tmp_path)
    older = [900, *PREFIX[1:]]
    ask(made, older)
    ask(made, PREFIX, {"demote": {}})
    ask(made, PREFIX)
    flood(made, (ROOM - 8) // 2 + 1)
    assert held(made, PREFIX) == [True] * 4
    assert held(made, older) == [True, True, False, False]


def test_the_engines_envelope_is_obeyed(engine: MakeEngine, tmp_path: Path) -> None:
    made = make(engine, "lru", tmp_path)
    said = [("retain", "1", {"ttl": 60}), ("retain", "9", {}), ("other", "1", {})]
    actions = [
        SimpleNamespace(action_type=kind, action_version=version, payload=payload)
        for kind, version, payload in said
    ]
    made.add(PREFIX, 1, kv_hints=SimpleNamespace(actions=actions))
    made.run()
    made.settle()
    flood(made)
    assert held(made, PREFIX) == [True] * 4
    assert measured(made, "hints_ignored", "(chain)") == 2


def test_an_aborted_request_is_retained_as_far_as_it_is_stored(
    engine: MakeEngine, tmp_path: Path
) -> None:
    made = make(engine, "lru", tmp_path)
    request = made.add(PREFIX, 50, kv_transfer_params={"kvtiers": {"hints": RETAIN}})
    for _ in range(3):
        made.step()
    made.scheduler.abort(request.request_id)
    made.settle()
    flood(made)
    assert held(made, PREFIX) == [True] * 4


def test_the_page_s_examples_work_as_they_are_shown(engine: MakeEngine, tmp_path: Path) -> None:
    page = blocks(PAGE.read_text())
    said = [json.loads(one.text)["kv_transfer_params"] for one in page if one.language == "json"]
    (keys,) = (yaml.safe_load(one.text) for one in page if one.language == "yaml")
    assert len(said) == 3
    made = make(engine, "lru", tmp_path, **keys)
    for params, is_held in zip(said, (True, False, True), strict=True):
        made.generate(PREFIX, 1, "", params)
        made.settle()
        flood(made)
        assert held(made, PREFIX) == [is_held] * 4
    assert not measured(made, "hints_ignored", "(chain)")


def test_a_prompt_asked_with_one_token_is_brought_up(engine: MakeEngine, tmp_path: Path) -> None:
    """What the page names instead of a prefetch."""
    first = engine(chain_of(disk(tmp_path)), prefix_caching=False)
    ask(first, PREFIX)
    first.close()
    made = engine(chain_of(cpu(name="tier"), disk(tmp_path)), prefix_caching=False)
    ask(made, [*PREFIX, 7])
    assert held(made, PREFIX) == [True] * 4
    store = DiskStore(tmp_path, 1 << 20, StoreContext(MODEL.payload_bytes))
    store.drop(names(made, ReplayRequest("probe", PREFIX, 1, SIZE).block_hashes))
    store.close()
    assert made.generate([*PREFIX, 8], 1).loaded_tokens == 4 * SIZE
