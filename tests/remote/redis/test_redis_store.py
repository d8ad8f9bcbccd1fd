"""The remote tier over real servers that restart, fill up, refuse, or hold what they should not.

What it has in common with the disk is in tests/test_store_faults.py, with its outages.
"""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.redis_verbs import PAYLOAD, get, is_up, name, opened, put
from tests.support.servers import RedisServer, binaries
from tests.support.topologies import wait_until
from tiers.block import HEADER_BYTES, pack_header
from tiers.errors import TierUnavailable
from tiers.remote.deadline import Deadline
from tiers.remote.redis import redis_store
from tiers.testing import Memory, make_key
from tiers.wrappers.guard import Guarded

HANG_LIMIT = 20.0
SECRET = "s3same-0pen"


@contextmanager
def guarded_tier(url: str) -> Iterator[Guarded]:
    with opened(url, timeout="400ms") as store:
        guarded = Guarded(store, "remote", retry_after=0.1, retry_after_max=0.2)
        with closing(guarded):
            yield guarded


@pytest.mark.fault
def test_a_restart_between_two_calls_goes_unnoticed(server: RedisServer) -> None:
    key = make_key()
    with opened(server.url) as store:
        assert put(store, key) == [True]
        server.kill()
        server.start()
        assert put(store, key) == [True]


@pytest.mark.fault
def test_a_key_of_another_type_is_a_miss_and_heals(shared_server: RedisServer) -> None:
    key, good = make_key(), make_key()
    client = shared_server.client()
    with opened(shared_server.url) as store:
        client.rpush(name(key), "somebody's", "list")
        put(store, good)
        assert get(store, key, good) == [False, True]
        assert put(store, key) == [True]
        assert get(store, key) == [True]


@pytest.mark.fault
def test_a_value_of_a_later_version_is_a_miss_and_heals(
    shared_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """One of a codec that is not known yet, as engines are upgraded one by one, or back."""
    caplog.set_level(logging.WARNING)
    keys = [make_key() for _ in range(3)]
    client, stored = shared_server.client(), bytes(100)
    for key in keys:
        client.set(name(key), pack_header(key, PAYLOAD, stored, codec=9) + stored)
    with opened(shared_server.url) as store:
        assert get(store, *keys) == [False] * 3
        assert store.damaged() == 0
        assert store.has(keys) == [False] * 3, "else each lookup promises what no load brings"
        assert put(store, *keys) == [True] * 3
        assert get(store, *keys) == [True] * 3
    said = [line for line in caplog.messages if "another version of kvtiers" in line]
    assert len(said) == 1 and "codec 9" in said[0]


def test_ttl_is_set_and_starts_anew_when_stored_again(shared_server: RedisServer) -> None:
    key = make_key()
    client = shared_server.client()
    with opened(shared_server.url, ttl="1h") as store:
        put(store, key)
        assert 3_500_000 < client.pttl(name(key)) <= 3_600_000
        client.pexpire(name(key), 60_000)
        assert put(store, key) == [True]
        assert 3_500_000 < client.pttl(name(key)) <= 3_600_000
    with opened(shared_server.url) as store:
        forever = make_key()
        put(store, forever)
        assert client.pttl(name(forever)) == -1


def test_a_held_block_is_not_sent_again(shared_server: RedisServer) -> None:
    key = make_key()
    client = shared_server.client()
    with opened(shared_server.url) as store:
        put(store, key)
        client.set(name(key), "untouched")
        assert put(store, key) == [True]
        assert client.get(name(key)) == b"untouched"


def test_prefixes_part_tiers_on_one_server(shared_server: RedisServer) -> None:
    key = make_key()
    one, other = (opened(shared_server.url, key_prefix=prefix) for prefix in ("one", "other"))
    with one as store, other as stranger:
        put(store, key)
        assert stranger.has([key]) == [False]
        assert shared_server.client().exists(b"one:" + key) == 1


def test_a_compressed_block_takes_less_and_noise_is_kept_as_it_is(
    shared_server: RedisServer,
) -> None:
    key, noise = make_key(), make_key()
    client = shared_server.client()
    with opened(shared_server.url, codec="zstd") as store:
        put(store, key)
        assert client.strlen(name(key)) < 0.7 * PAYLOAD
        memory = Memory([noise], PAYLOAD)
        memory.blocks[0].payload[:] = make_key(PAYLOAD)
        store.put(memory.blocks)
        assert client.strlen(name(noise)) == HEADER_BYTES + PAYLOAD
    with opened(shared_server.url, codec="none") as store:  # the record says how it is stored
        assert get(store, key) == [True]


def test_a_batch_of_many_windows(shared_server: RedisServer) -> None:
    keys = [make_key() for _ in range(160)]
    with opened(shared_server.url, timeout="30s") as store:
        assert put(store, *keys) == [True] * 160
        assert get(store, make_key(), *keys) == [False] + [True] * 160
        store.drop(keys)


@pytest.mark.parametrize("verb", ["has", "drop"])
def test_what_moves_no_blocks_may_take_little_more_than_the_timeout(
    verb: str, shared_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a server that hangs holds up a look-up for as long as its prompts are."""
    given: list[float] = []

    class Noted(Deadline):
        def __init__(self, seconds: float) -> None:
            given.append(seconds)
            super().__init__(seconds)

    with opened(shared_server.url, timeout="10s") as store:
        monkeypatch.setattr(redis_store, "Deadline", Noted)
        for count in (1, 400, 16384):
            getattr(store, verb)([make_key() for _ in range(count)])
    assert given[:2] == [10, 10] and 10 < given[2] < 11


@pytest.mark.fault
def test_a_full_server_stores_what_fits_and_serves_on() -> None:
    full = RedisServer(binaries()["valkey"], maxmemory="8mb", maxmemory_policy="noeviction")
    keys = [make_key() for _ in range(200)]
    with full as server, opened(server.url, timeout="10s") as store:
        stored = put(store, *keys)
        assert 0 < sum(stored) < 200
        assert store.has(keys) == stored
        assert get(store, *keys) == stored
        assert put(store, keys[-1]) == [False]
        store.drop(keys)
        assert put(store, keys[-1]) == [True]


@pytest.mark.fault
def test_a_full_server_is_asked_whether_it_has_memory_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    full = RedisServer(binaries()["valkey"], maxmemory="8mb", maxmemory_policy="noeviction")
    keys = [make_key() for _ in range(200)]
    with full as server, opened(server.url, timeout="10s") as store:
        stored = put(store, *keys)
        refused = [key for key, held in zip(keys, stored, strict=True) if not held]
        assert store.warning()
        server.client().config_set("maxmemory", 200 << 20)
        assert store.warning(), "a second has not passed"
        clock = itertools.count(time.monotonic() + 10, 10)
        monkeypatch.setattr(redis_store, "time", SimpleNamespace(monotonic=clock.__next__))
        server.client().config_set("maxmemory", 1 << 20)
        assert put(store, refused[0]) == [False]
        assert store.warning() == store.warning() != ""
        server.client().config_set("maxmemory", 200 << 20)
        assert store.warning() == ""
        time.sleep(0.05)
        assert store.has(keys) == stored, "what it was asked with is gone"
        server.client().config_set("maxmemory", 1 << 20)
        assert put(store, refused[0]) == [False]
        server.client().config_set("maxmemory", 200 << 20)
        with opened(server.url, timeout="10s") as other:
            assert put(other, refused[0]) == [True]
        assert store.warning() == "" and get(store, refused[0]) == [True]


@pytest.mark.fault
def test_an_evicting_server_only_misses() -> None:
    small = RedisServer(binaries()["valkey"], maxmemory="8mb", maxmemory_policy="allkeys-lru")
    keys = [make_key() for _ in range(200)]
    with small as server, opened(server.url, timeout="10s") as store:
        for start in range(0, 200, 20):
            put(store, *keys[start : start + 20])
        assert 0 < sum(get(store, *keys)) < 200


def test_a_replica_that_takes_no_writes_is_unavailable_to_put(server: RedisServer) -> None:
    server.client().replicaof("127.0.0.1", "1")
    with opened(server.url) as store, pytest.raises(TierUnavailable):
        put(store, make_key())


def shown_by(error: BaseException, log: str) -> str:
    return f"{error} {error!r} {''.join(traceback.format_exception(error))} {log}"


@pytest.mark.parametrize("options", [{"password": "another"}, {"rename_command": 'AUTH ""'}, {}])
def test_a_refused_password_is_unavailable_and_never_shown(
    options: dict[str, str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("GIVEN", SECRET)
    login: dict[str, Any] = {"password": {"env": "GIVEN"}}
    login |= {} if options else {"username": "me"}
    refusing = RedisServer(binaries()["valkey"], **options)
    with refusing as server, opened(server.url, **login) as store:
        with pytest.raises(TierUnavailable, match="refused the user or password") as caught:
            store.has([make_key()])
        guarded = Guarded(store, "remote")
        assert guarded.has([make_key()]) == [False]
        assert SECRET not in shown_by(caught.value, caplog.text)
        assert "remote: reads are down" in caplog.text


@pytest.mark.fault
def test_a_password_that_changes_while_an_engine_serves_is_read_again(tmp_path: Path) -> None:
    file, key = tmp_path / "password", make_key()
    file.write_text("first")
    server = RedisServer(binaries()["valkey"], password="first")
    with server, opened(server.url, password={"file": str(file)}) as store:
        assert put(store, key) == [True]
        client = server.client()
        client.config_set("requirepass", "second")
        client.client_kill_filter(_type="normal", skipme=True)
        for _ in range(2):  # the file comes later
            with pytest.raises(TierUnavailable, match="refused the user or password"):
                store.has([key])
        file.write_text("second")
        with suppress(TierUnavailable):
            store.has([key])
        assert get(store, key) == [True]


def test_a_server_that_wants_a_password_and_gets_none_is_unavailable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GIVEN", SECRET)
    with RedisServer(binaries()["valkey"], password=SECRET) as server:
        with opened(server.url) as store, pytest.raises(TierUnavailable):
            store.has([make_key()])
        with opened(server.url, password={"env": "GIVEN"}) as store:
            assert put(store, make_key()) == [True]


@pytest.mark.fault
@pytest.mark.parametrize("url", ["redis://no-such-host.invalid", "redis://127.0.0.1/900"])
def test_a_place_that_is_not_there_is_unavailable(url: str, shared_server: RedisServer) -> None:
    url = url.replace("127.0.0.1", f"127.0.0.1:{shared_server.port}")
    with opened(url) as store, pytest.raises(TierUnavailable):
        store.has([make_key()])


def test_a_forked_child_uses_connections_of_its_own(shared_server: RedisServer) -> None:
    keys = [make_key() for _ in range(8)]
    fork = multiprocessing.get_context("fork")
    with opened(shared_server.url, timeout="10s") as store:
        put(store, *keys)

        def child(hits: Any) -> None:
            hits.put([get(store, *keys) for _ in range(20)])

        hits: multiprocessing.Queue[list[list[bool]]] = fork.Queue()
        process = fork.Process(target=child, args=(hits,))
        process.start()
        for _ in range(20):
            assert get(store, *keys) == [True] * 8
        assert hits.get(timeout=HANG_LIMIT) == [[True] * 8] * 20
        process.join(HANG_LIMIT)


@pytest.mark.fault
def test_a_server_that_takes_no_writes_still_serves_loads(server: RedisServer) -> None:
    keys = [make_key() for _ in range(6)]
    with guarded_tier(server.url) as tier:
        wait_until(lambda: put(tier, *keys) == [True] * 6)
        server.client().replicaof("127.0.0.1", "1")
        assert put(tier, make_key()) == [False]
        assert get(tier, *keys) == [True] * 6
        assert not is_up(tier)
        assert tier.health.reads
        server.client().replicaof("NO", "ONE")
        wait_until(lambda: put(tier, make_key()) == [True])
        assert is_up(tier)


@pytest.mark.fault
def test_restarts_under_load_cost_misses_and_never_a_wrong_block(server: RedisServer) -> None:
    keys = [make_key() for _ in range(20)]
    with guarded_tier(server.url) as tier:
        for _ in range(4):
            wait_until(lambda: put(tier, *keys) == [True] * 20)
            killer = threading.Timer(0.02, server.kill)
            killer.start()
            while any(get(tier, *keys)):  # which compares every byte of a hit
                pass
            killer.join()
            server.start()
        wait_until(lambda: put(tier, *keys) == [True] * 20)
        wait_until(lambda: get(tier, *keys) == [True] * 20)
