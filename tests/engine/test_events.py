"""Events tell which tier holds which block."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spec.chain import ChainSpec
from tests.support.clock import Clock, wait_for
from tests.support.replay import ReplayEngine, ReplayRequest
from tests.support.replay_chains import (
    MODEL,
    chain_of,
    coverage_of,
    cpu,
    damage_disk,
    disk,
    drive,
    drop_from_disk,
    encryption,
    measured,
    names,
    redis,
    scheduler_of,
    workload,
)
from tests.support.servers import RedisServer
from tiers.block import NAMESPACE_BYTES
from tiers.connector.scheduler.inventory import inventory
from tiers.connector.scheduler.store_manager import StoreManager
from tiers.contract.block_groups import GROUP_BYTES


def told(engine: ReplayEngine, tier: str) -> set[bytes]:
    """The blocks that a tier holds by its events, each of which must change something."""
    held: set[bytes] = set()
    for event in engine.events:
        if event.tier == tier:
            hashes = set(event.hashes)
            assert hashes.isdisjoint(held) if event.stored else hashes <= held
            held = held | hashes if event.stored else held - hashes
    return held


def test_events_of_a_small_host_tier_are_what_it_holds(
    engine: Callable[..., ReplayEngine], tmp_path: Path
) -> None:
    made = engine(chain_of(cpu(20), disk(tmp_path)), num_blocks=24, kv_events=True)
    drive(made, seed=5, abort=0.2)
    made.settle()
    held = told(made, "cpu")
    assert 0 < len(held) <= 20
    assert any(not event.stored for event in made.events), "the tier was meant to be too small"
    for number, (prompt, _) in enumerate(workload(5)):
        request = ReplayRequest(f"probe-{number}", prompt, 1, MODEL.block_tokens)
        assert coverage_of(made, request) == [one in held for one in request.block_hashes]


def test_what_a_step_evicts_is_told_at_once(engine: Callable[..., ReplayEngine]) -> None:
    made = engine(chain_of(cpu(20)), kv_events=True, prefix_caching=False)
    for first in (0, 1000, 2000):
        made.generate(range(first, first + 80), 1)
        made.settle()
    assert [(e.stored, len(e.hashes)) for e in made.events] == [
        (True, 20),
        *[(False, 20), (True, 20)] * 2,
    ]
    assert len(told(made, "cpu")) == 20


def test_no_tier_tells_of_a_reset_which_the_engine_does_for_all(
    engine: Callable[..., ReplayEngine], tmp_path: Path
) -> None:
    made = engine(chain_of(cpu(), disk(tmp_path)), kv_events=True)
    made.generate(range(40), 1)
    made.settle()
    before = len(made.events)
    made.reset_cache()
    made.step()
    assert len(made.events) == before
    made.generate(range(40), 1)
    made.settle()
    assert {(e.tier, e.stored) for e in made.events[before:]} == {("cpu", True), ("disk", True)}


def test_what_a_quota_drops_is_told_as_removed(engine: Callable[..., ReplayEngine]) -> None:
    """Else a router sends requests for it here."""
    rules = {"small": {"quota": 15 * MODEL.payload_bytes}}
    made = engine(chain_of(cpu(), tenants=rules), kv_events=True, prefix_caching=False)
    for first in (0, 100):
        made.generate(range(first, first + 41), 1, "small")
        made.settle()
    made.step()
    assert len(told(made, "cpu")) == 15


def test_a_block_that_failed_to_load_is_told_as_removed(
    engine: Callable[..., ReplayEngine], tmp_path: Path
) -> None:
    made = engine(chain_of(disk(tmp_path)), prefix_caching=False, kv_events=True)
    made.generate(range(40), 1)
    made.settle()
    assert len(told(made, "disk")) == 10
    damage_disk(tmp_path)
    made.generate([*range(38), 1, 2], 1)
    assert any(not event.stored for event in made.events)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_block_that_engines_share_is_told_by_the_one_that_stored_it(
    engine: Callable[..., ReplayEngine],
    shared_server: RedisServer,
    tmp_path: Path,
    world_size: int,
) -> None:
    tiers = redis(shared_server, tmp_path, name="slow"), disk(tmp_path)
    options = {"kv_events": True, "world_size": world_size}
    first, second = (engine(chain_of(*tiers, promote=False), **options) for _ in range(2))
    for made in (first, second):
        made.generate(range(40), 1)
        made.settle()
    second.generate([*range(40), *range(7, 27)], 1)
    second.settle()
    for tier in ("slow", "disk"):
        assert len(told(first, tier)) == 10
        assert len(told(second, tier)) == 5, "what followed the first engine's blocks is its own"


def until(engine: ReplayEngine, said: Callable[[], bool]) -> None:
    """Step until the engine's events say so: what is due is found on a thread of its own."""
    deadline = time.monotonic() + 60
    while not said():
        assert time.monotonic() < deadline
        engine.step()
        time.sleep(0.002)


def test_what_a_disk_holds_is_told_again_after_a_restart_parents_first(
    engine: Callable[..., ReplayEngine], tmp_path: Path
) -> None:
    chain = chain_of(cpu(), disk(tmp_path))
    before = engine(chain, kv_events=True)
    for prompt in (range(40), [*range(20), *range(100, 120)], range(200, 212)):
        before.generate(prompt, 1, salt="tenant")
    before.settle()
    held = {event.hashes: event for event in before.events if event.tier == "disk"}
    before.close()
    after = engine(chain, kv_events=True)
    after.run()  # an engine with nothing to do steps until all is told
    assert {event.hashes: event for event in after.events} == held
    known: set[bytes | None] = {None}
    for event in after.events:
        assert event.parent in known
        known |= set(event.hashes)
    told(after, "disk")


def left_by_another(engine: Callable[..., ReplayEngine], chain: ChainSpec, folder: Path) -> Path:
    """What an engine that stored a prompt on the disk kept, at its end, of what it had told."""
    before = engine(chain, kv_events=True)
    before.generate(range(40), 1)
    before.settle()
    before.close()
    (left,) = (folder / "events").rglob("*.runs")
    return left


def test_an_engine_that_is_long_in_starting_tells_what_its_disk_holds(
    engine: Callable[..., ReplayEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first step comes long after all that there is to tell was found."""
    chain = chain_of(disk(tmp_path))
    left = left_by_another(engine, chain, tmp_path)
    clock = Clock()
    monkeypatch.setattr(inventory, "time", SimpleNamespace(monotonic=clock))
    after = engine(chain, kv_events=True)
    wait_for(lambda: not left.exists())  # then all of it is found
    clock.now += 60
    after.run()
    assert len(told(after, "disk")) == 10


def test_what_left_the_disk_while_the_engine_was_away_is_not_told(
    engine: Callable[..., ReplayEngine], tmp_path: Path
) -> None:
    chain = chain_of(disk(tmp_path))
    before = engine(chain, kv_events=True)
    request = before.generate(range(40), 1)
    before.settle()
    gone = request.block_hashes[3:5]
    drop_from_disk(tmp_path, names(before, gone))
    before.close()
    after = engine(chain, kv_events=True)
    after.run()
    assert told(after, "disk") == set(request.block_hashes[:3] + request.block_hashes[5:])
    assert after.events[-1].parent == request.block_hashes[4]
    assert after.events[-1].origin.tokens == list(range(20, 40))


def test_two_engines_on_a_disk_and_one_dies(
    engine: Callable[..., ReplayEngine], tmp_path: Path
) -> None:
    chain = chain_of(disk(tmp_path))
    first, second = (engine(chain, kv_events=True) for _ in range(2))
    first.generate(range(40), 1)
    second.generate(range(100, 140), 1)
    for made in (first, second):
        made.settle()
    alone = told(first, "disk")
    first.close()
    third = engine(chain, kv_events=True)
    third.run()
    assert told(third, "disk") == alone, "what a living engine told is left to it"


def nothing_beside_it(folder: Path) -> dict[str, Any]:
    """Settings of a chain whose events may keep nothing, since a file lies in their folder's
    place: a mode would not keep a superuser out."""
    (folder / "file").touch()
    return {"events": {"folder": str(folder / "file" / "events")}}


def is_all_there(engine: ReplayEngine) -> bool:
    """Whether the disk holds all that events say."""
    manager, held = scheduler_of(engine).manager, told(engine, "disk")
    assert isinstance(manager, StoreManager)
    return manager._parts.has([*map(_key_of(engine), held)]) == [True] * len(held)


def _key_of(engine: ReplayEngine) -> Callable[[bytes], bytes]:
    assert engine.connector is not None
    requests = engine.connector._requests
    return lambda block: requests.generation.key(block + bytes(GROUP_BYTES))


@pytest.mark.parametrize("kind", ["plain", "encrypted", "nothing beside it", "reset"])
def test_what_a_disk_evicts_is_told(
    engine: Callable[..., ReplayEngine],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    """800 blocks are stored on a disk that has room for 128 of them, or for fewer encrypted."""
    monkeypatch.setattr(inventory, "AUDIT_EVERY", 0.0)
    more = encryption(tmp_path) if kind == "encrypted" else {}
    settings = nothing_beside_it(tmp_path) if kind == "nothing beside it" else {}
    small = disk(tmp_path / "tier", capacity="1MiB", **more)
    made = engine(chain_of(small, **settings), kv_events=True)
    if kind == "reset":
        made.generate(range(40), 1)
        made.settle()
        made.reset_cache()
        made.events.clear()  # the engine says that all is cleared
    for first in range(0, 3200, 40):
        made.generate(range(first, first + 40), 1)
        made.settle()
    told_ever = {block for event in made.events if event.stored for block in event.hashes}
    assert len(told_ever) == 800
    until(made, lambda: is_all_there(made))
    assert 64 < len(told(made, "disk")) <= 128
    if kind == "encrypted":
        assert not [*tmp_path.rglob("*.runs")], "names and tokens are in no file"


def test_what_another_store_holds_is_not_told_as_removed(
    engine: Callable[..., ReplayEngine],
    shared_server: RedisServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(inventory, "AUDIT_EVERY", 0.0)
    tiers = disk(tmp_path), redis(shared_server, tmp_path, name="slow")
    made = engine(chain_of(*tiers, promote=False), kv_events=True)
    first, second = (made.generate(range(n, n + 40), 1).block_hashes for n in (0, 100))
    made.settle()
    manager = scheduler_of(made, 1).manager
    assert isinstance(manager, StoreManager)
    manager._store.drop(names(made, second[5:]))
    drop_from_disk(tmp_path, names(made, [*first, *second]))
    kept = {*first, *second[:5]}
    until(made, lambda: told(made, "disk") == kept)
    for _ in range(50):  # routers would take these for gone, which the other store holds
        made.step()
        time.sleep(0.01)
    assert told(made, "disk") == told(made, "slow") == kept
    manager._store.drop(names(made, [*kept]))
    # Each withdraws what it told: one may have told nothing, and some routers count.
    until(made, lambda: not told(made, "slow") and not told(made, "disk"))


@pytest.mark.parametrize(
    ("events", "other", "stays"),
    [
        ({}, "packs", True),
        ({"ownership": True}, "packs", False),
        ({"locality": True}, "packs", False),
        ({"locality": True}, "of this host", True),
    ],
)
def test_what_another_store_may_hold_stays_where_events_look_the_same(
    engine: Callable[..., ReplayEngine],
    shared_server: RedisServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    events: dict[str, Any],
    other: str,
    stays: bool,
) -> None:
    """A tier that keeps prompts in packs answers for no single block."""
    monkeypatch.setattr(inventory, "AUDIT_EVERY", 0.0)
    (tmp_path / "packs").mkdir()
    others = {
        "packs": {"type": "shared", "path": str(tmp_path / "packs"), "capacity": "1MiB"},
        "of this host": redis(shared_server, tmp_path, name="slow"),
    }
    tiers = disk(tmp_path / "disk"), others[other]
    made = engine(chain_of(*tiers, promote=False, events=events), kv_events=True)
    first, second = (made.generate(range(n, n + 40), 1).block_hashes for n in (0, 100))
    made.settle()
    drop_from_disk(tmp_path / "disk", names(made, first))
    for _ in range(50):
        made.step()
        time.sleep(0.01)
    assert told(made, "disk") == ({*first, *second} if stays else {*second})


def test_what_failed_to_load_and_another_store_holds_is_not_told_as_removed(
    engine: Callable[..., ReplayEngine],
    shared_server: RedisServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(inventory, "AUDIT_EVERY", 0.0)
    tiers = disk(tmp_path), redis(shared_server, tmp_path, name="slow")
    made = engine(chain_of(*tiers, promote=False), prefix_caching=False, kv_events=True)
    made.generate(range(40), 1)
    made.settle()
    damage_disk(tmp_path)
    made.generate([*range(38), 1, 2], 1)
    made.settle()
    assert measured(made, "damaged_blocks", "disk") == 9
    for _ in range(50):
        made.step()
        time.sleep(0.01)
    assert all(event.stored for event in made.events)


def test_what_a_reset_outdated_is_not_told_as_removed(
    engine: Callable[..., ReplayEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same blocks have been stored since, under the same hashes."""
    monkeypatch.setattr(inventory, "AUDIT_EVERY", 0.0)
    made = engine(chain_of(disk(tmp_path)), kv_events=True)
    request = made.generate(range(40), 1)
    made.settle()
    old = names(made, request.block_hashes)
    made.reset_cache()
    made.events.clear()  # the engine says that all is cleared
    made.generate(range(40), 1)
    made.settle()
    drop_from_disk(tmp_path, old)
    for _ in range(50):
        made.step()
        time.sleep(0.01)
    assert told(made, "disk") == set(request.block_hashes)


def test_what_a_reset_outdated_is_not_told_again(
    engine: Callable[..., ReplayEngine], tmp_path: Path
) -> None:
    """The reset comes before the first step of an engine that was started again."""
    chain = chain_of(disk(tmp_path))
    left = left_by_another(engine, chain, tmp_path)
    after = engine(chain, kv_events=True)
    wait_for(lambda: not left.exists())
    after.reset_cache()
    after.run()
    assert told(after, "disk") == set()


def test_nothing_of_an_encrypted_tier_is_kept(
    engine: Callable[..., ReplayEngine], tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ab" * 32 + "\n")
    keys.chmod(0o600)
    folder = tmp_path / "tier"
    hidden = disk(folder, encryption={"key_file": str(keys)})
    events = {"folder": str(tmp_path / "events")}
    before = engine(chain_of(hidden, events=events), kv_events=True)
    before.generate(range(40), 1)
    before.settle()
    assert len(told(before, "disk")) == 10
    before.close()
    assert not (folder / "events").exists() and not (tmp_path / "events").exists()


@pytest.mark.parametrize("kv_events", [True, False])
def test_what_was_announced_before_a_tier_was_encrypted_is_removed(
    engine: Callable[..., ReplayEngine], tmp_path: Path, kv_events: bool
) -> None:
    """It has the prompts' tokens in the clear. What an engine that lives keeps there stays, as does
    another tier's."""
    folder, events = tmp_path / "tier", tmp_path / "events[1]"
    own = {"events": {"folder": str(events)}}
    other = disk(tmp_path / "other", name="disk.2")
    for tiers, more in (((disk(folder),), {}), ((disk(folder), other), own)):
        before = engine(chain_of(*tiers, **more), kv_events=True)
        before.generate(range(40), 1)
        before.settle()
        before.close()
    living = engine(chain_of(disk(folder)), kv_events=True)
    living.generate(range(60, 100), 1)
    living.settle()
    wait_for(lambda: len(list(folder.glob("events/*/*/*.runs"))) == 1)  # it has taken over
    (kept,) = folder.glob("events/*/*/*.runs")
    hidden = disk(folder, **encryption(tmp_path))
    engine(chain_of(hidden, **own), kv_events=kv_events)
    wait_for(lambda: not list(events.glob("disk.????????????????????????????????")))
    assert list(folder.glob("events/*/*/*.runs")) == [kept]
    assert list(events.glob("disk.2.*/*/*.runs"))
    living.close()
    shutil.rmtree(folder / "namespaces")  # its own folder has nobody else's
    engine(chain_of(hidden), kv_events=kv_events)
    wait_for(lambda: not kept.exists())


def test_an_encrypted_tier_leaves_what_another_of_its_name_announced(
    engine: Callable[..., ReplayEngine], tmp_path: Path
) -> None:
    """Engines of a host may have one folder for events, and their tiers the name of their type."""
    own = {"events": {"folder": str(tmp_path / "events")}}
    plain = chain_of(disk(tmp_path / "plain"), **own)
    before = engine(plain, kv_events=True)
    before.generate(range(40), 1)
    before.settle()
    before.close()
    hidden = engine(chain_of(disk(tmp_path / "hidden", **encryption(tmp_path)), **own))
    hidden.generate(range(40), 1)
    hidden.settle()
    hidden.close()
    after = engine(plain, kv_events=True)
    after.run()
    assert len(told(after, "disk")) == 10


def test_of_a_server_s_what_was_announced_of_the_engine_s_namespace_is_removed(
    engine: Callable[..., ReplayEngine], shared_server: RedisServer, tmp_path: Path
) -> None:
    """Those that it has notes of would have to be looked for among all its keys."""
    events, tier = tmp_path / "events", redis(shared_server, tmp_path)
    own = {"events": {"folder": str(events)}}
    before = engine(chain_of(tier, **own), kv_events=True)
    before.generate(range(40), 1)
    before.settle()
    before.close()
    (left,) = events.iterdir()
    another = left.rename(events / f"redis.{'ab' * NAMESPACE_BYTES}")
    shutil.copytree(another, left)
    engine(chain_of({**tier, **encryption(tmp_path)}, **own))
    wait_for(lambda: not left.exists())
    assert len([*another.glob("*/*.runs")]) == 1


def test_a_servers_blocks_are_told_again_from_a_folder_of_their_own(
    engine: Callable[..., ReplayEngine], shared_server: RedisServer, tmp_path: Path
) -> None:
    tier = redis(shared_server, tmp_path, name="slow")
    chain = chain_of(tier, events={"folder": str(tmp_path / "events")})
    before = engine(chain, kv_events=True)
    before.generate(range(40), 1)
    before.settle()
    before.close()
    after = engine(chain, kv_events=True)
    after.run()
    assert told(after, "slow") == told(before, "slow")
    assert len(told(after, "slow")) == 10


def test_nothing_is_kept_for_an_engine_that_takes_no_events(
    engine: Callable[..., ReplayEngine],
) -> None:
    made = engine(chain_of(cpu(4)))
    drive(made, seed=1)
    assert made.events == []
