"""The remote tier over real servers that die, hang, fill up, refuse, or hold what they should not.

The times below only keep a broken build from hanging; no test measures speed.
"""

from __future__ import annotations

import logging
import multiprocessing
import threading
import traceback
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.redis_verbs import PAYLOAD, get, name, opened, put
from tests.support.servers import RedisServer, binaries
from tiers.block import HEADER_BYTES
from tiers.errors import TierUnavailable
from tiers.remote.store import RedisStore
from tiers.remote.stream import PIECE_BYTES
from tiers.testing import Memory, make_key
from tiers.wrappers.guard import Guarded

HANG_LIMIT = 20.0
SECRET = "s3same-0pen"


def within_limit(call: Callable[[], object]) -> None:
    """Run a call that must end with TierUnavailable, and end."""
    ended: list[BaseException] = []

    def work() -> None:
        with pytest.raises(TierUnavailable) as caught:
            call()
        ended.append(caught.value)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(HANG_LIMIT)
    assert ended, "hung, or did not say that it is unavailable"


def every_verb(store: RedisStore) -> list[Callable[[], object]]:
    key = make_key()
    return [
        lambda: store.has([key]),
        lambda: put(store, key),
        lambda: get(store, key),
        lambda: store.drop([key]),
    ]


@pytest.mark.fault
@pytest.mark.parametrize("over", ["url", "unix_url"])
def test_a_killed_server_is_unavailable_and_back_after_a_restart(
    server: RedisServer, over: str
) -> None:
    key = make_key()
    with opened(getattr(server, over)) as store:
        assert put(store, key) == [True]
        server.kill()
        for verb in every_verb(store):
            within_limit(verb)
        server.start()
        assert get(store, key) == [False]
        assert put(store, key) == [True]
        assert get(store, key) == [True]


@pytest.mark.fault
def test_a_restart_between_two_calls_goes_unnoticed(server: RedisServer) -> None:
    key = make_key()
    with opened(server.url) as store:
        assert put(store, key) == [True]
        server.kill()
        server.start()
        assert put(store, key) == [True]


@pytest.mark.fault
def test_a_hung_server_is_unavailable_and_back_when_it_goes_on(server: RedisServer) -> None:
    key = make_key()
    with opened(server.url, timeout="500ms") as store:
        assert put(store, key) == [True]
        server.hang()
        for verb in every_verb(store):
            within_limit(verb)
        with opened(server.url, timeout="500ms") as late:  # connects only now, and nobody answers
            within_limit(lambda: late.has([key]))
        server.resume()
        assert get(store, key) == [True]


@pytest.mark.fault
def test_a_server_that_was_down_at_open_is_used_once_it_is_up() -> None:
    server = RedisServer(binaries()["valkey"])
    try:
        with opened(server.url) as store:
            within_limit(lambda: store.has([make_key()]))
            server.start()
            assert put(store, make_key()) == [True]
    finally:
        server.close()


@pytest.mark.fault
def test_a_flipped_bit_anywhere_is_a_miss_and_dropped(shared_server: RedisServer) -> None:
    client = shared_server.client()
    for codec in ("none", "zstd"):
        with opened(shared_server.url, codec=codec) as store:
            good, bad = make_key(), make_key()
            put(store, good, bad)
            value = client.get(name(bad))
            assert isinstance(value, bytes)
            for at in (0, 9, 40, 100, HEADER_BYTES - 1, HEADER_BYTES, len(value) - 1):
                flipped = bytearray(value)
                flipped[at] ^= 0x10
                client.set(name(bad), bytes(flipped))
                assert get(store, good, bad) == [True, False]
                assert store.has([good, bad]) == [True, False]
            put(store, bad)
            assert get(store, bad) == [True]


@pytest.mark.fault
@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_a_flipped_bit_in_any_piece_of_a_large_block_is_a_miss(
    shared_server: RedisServer, codec: str
) -> None:
    payload_bytes = 5 * PIECE_BYTES + 4096
    keys = [make_key() for _ in range(3)]
    client = shared_server.client()
    with opened(shared_server.url, payload_bytes, codec=codec, timeout="10s") as store:
        memory = Memory(keys, payload_bytes).fill()
        store.put(memory.blocks)
        value = client.get(name(keys[1]))
        assert isinstance(value, bytes)
        last = len(value) - 1
        for at in (HEADER_BYTES, HEADER_BYTES + PIECE_BYTES - 1, PIECE_BYTES * 3, last):
            flipped = bytearray(value)
            flipped[min(at, last)] ^= 1
            client.set(name(keys[1]), bytes(flipped))
            got = Memory(keys, payload_bytes)
            assert store.get(got.blocks) == [True, False, True]
            assert got.holds(0)
            assert got.holds(2)
        store.drop(keys)


@pytest.mark.fault
@pytest.mark.parametrize("length", [0, 1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 100])
def test_a_cut_value_is_a_miss_and_dropped(shared_server: RedisServer, length: int) -> None:
    key = make_key()
    client = shared_server.client()
    with opened(shared_server.url) as store:
        put(store, key)
        value = client.get(name(key))
        assert isinstance(value, bytes)
        client.set(name(key), value[:length])
        assert get(store, key) == [False]
        assert store.has([key]) == [False]


@pytest.mark.fault
def test_another_keys_value_is_a_miss(shared_server: RedisServer) -> None:
    key, other = make_key(), make_key()
    client = shared_server.client()
    with opened(shared_server.url) as store:
        put(store, key, other)
        value = client.get(name(other))
        assert isinstance(value, bytes)
        client.set(name(key), value)
        assert get(store, key, other) == [False, True]
        assert store.has([key, other]) == [False, True]


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
def test_an_evicting_server_only_misses() -> None:
    small = RedisServer(binaries()["valkey"], maxmemory="8mb", maxmemory_policy="allkeys-lru")
    keys = [make_key() for _ in range(200)]
    with small as server, opened(server.url, timeout="10s") as store:
        for start in range(0, 200, 20):
            put(store, *keys[start : start + 20])
        assert 0 < sum(get(store, *keys)) < 200


def test_a_replica_that_takes_no_writes_is_unavailable_to_put(server: RedisServer) -> None:
    server.client().replicaof("127.0.0.1", "1")
    with opened(server.url) as store:
        within_limit(lambda: put(store, make_key()))


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


def test_a_server_that_wants_a_password_and_gets_none_is_unavailable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GIVEN", SECRET)
    with RedisServer(binaries()["valkey"], password=SECRET) as server:
        with opened(server.url) as store:
            within_limit(lambda: store.has([make_key()]))
        with opened(server.url, password={"env": "GIVEN"}) as store:
            assert put(store, make_key()) == [True]


@pytest.mark.fault
@pytest.mark.parametrize("url", ["redis://no-such-host.invalid", "redis://127.0.0.1/900"])
def test_a_place_that_is_not_there_is_unavailable(url: str, shared_server: RedisServer) -> None:
    url = url.replace("127.0.0.1", f"127.0.0.1:{shared_server.port}")
    with opened(url) as store:
        within_limit(lambda: store.has([make_key()]))


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
