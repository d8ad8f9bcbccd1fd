"""The remote tier over a real Cluster of three masters, and over a master that Sentinel names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from redis.crc import key_slot
from servers import RedisServer, binaries
from topologies import Sentinel, cluster, cluster_command, wait_until

from spec.offloading import StoreSite
from tiers.errors import TierUnavailable
from tiers.remote.spec import RedisSpec
from tiers.remote.store import RedisStore
from tiers.store import TierStore
from tiers.testing import Memory, StoreContract, make_key

PAYLOAD = 65536


def open_store(url: str, timeout: str = "10s", payload_bytes: int = PAYLOAD) -> RedisStore:
    spec = RedisSpec.model_validate({"url": url, "timeout": timeout, "ttl": "10m"})
    return spec.open(StoreSite(payload_bytes=payload_bytes))


def put(store: RedisStore, keys: list[bytes]) -> list[bool]:
    return store.put(Memory(keys, PAYLOAD).fill().blocks)


def get(store: RedisStore, keys: list[bytes]) -> list[bool]:
    memory = Memory(keys, PAYLOAD)
    hits = store.get(memory.blocks)
    assert all(memory.holds(index) for index, hit in enumerate(hits) if hit)
    return hits


def name(key: bytes) -> bytes:
    return b"kvtiers:" + key


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[RedisServer]]:
    with cluster() as nodes:
        yield nodes


def url_of(*nodes: RedisServer) -> str:
    return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in nodes)


class TestCluster(StoreContract):
    shared = True
    persistent = True

    @pytest.fixture(autouse=True)
    def _place(self, nodes: list[RedisServer]) -> None:
        self.url = url_of(nodes[1])  # one node is enough to find the others

    def open_store(self, payload_bytes: int) -> TierStore:
        return open_store(self.url, "30s", payload_bytes)


def test_blocks_lie_on_every_master_and_only_where_they_belong(nodes: list[RedisServer]) -> None:
    store = open_store(url_of(*nodes))
    keys = [make_key() for _ in range(60)]
    assert put(store, keys) == [True] * 60
    held = Counter(node.port for node in nodes for _ in node.client().scan_iter(b"kvtiers:*"))
    assert len(held) == 3
    assert get(store, [make_key(), *keys]) == [False] + [True] * 60
    store.close()


def node_of(nodes: list[RedisServer], key: bytes) -> int:
    return key_slot(name(key)) * len(nodes) // 16384


def test_a_slot_that_moved_is_found_again(nodes: list[RedisServer]) -> None:
    store = open_store(url_of(*nodes))
    key = make_key()
    slot, old = key_slot(name(key)), node_of(nodes, key)
    assert put(store, [key]) == [True]  # the map is known now
    store.drop([key])
    to = nodes[(old + 1) % 3]
    owner = cluster_command(to, "MYID")
    home = cluster_command(nodes[old], "MYID")
    try:
        for node in nodes:
            cluster_command(node, "SETSLOT", slot, "NODE", owner)
        assert put(store, [key]) == [True]
        assert to.client().exists(name(key)) == 1
        assert get(store, [key]) == [True]
    finally:
        store.drop([key])
        for node in nodes:
            cluster_command(node, "SETSLOT", slot, "NODE", home)
        store.close()


def test_what_left_a_moving_slot_is_a_miss_and_the_others_are_served(
    nodes: list[RedisServer],
) -> None:
    store = open_store(url_of(*nodes))
    moved, stays = make_key(), make_key()
    slot, source = key_slot(name(moved)), node_of(nodes, moved)
    put(store, [stays])
    there = cluster_command(nodes[(source + 1) % 3], "MYID")
    cluster_command(nodes[source], "SETSLOT", slot, "MIGRATING", there)
    try:
        assert store.has([moved, stays]) == [False, True]
        assert get(store, [moved, stays]) == [False, True]
        assert put(store, [moved, stays]) == [False, True]
    finally:
        cluster_command(nodes[source], "SETSLOT", slot, "STABLE")
        store.close()


def test_a_node_that_is_down_at_first_is_passed_over_for_the_next(
    nodes: list[RedisServer],
) -> None:
    store = open_store(f"redis+cluster://127.0.0.1:1,127.0.0.1:{nodes[2].port}")
    keys = [make_key() for _ in range(9)]
    assert put(store, keys) == [True] * 9
    store.close()


def test_a_server_that_is_no_cluster_is_unavailable(shared_server: RedisServer) -> None:
    store = open_store(f"redis+cluster://127.0.0.1:{shared_server.port}")
    with pytest.raises(TierUnavailable):
        store.has([make_key()])
    store.close()


def test_a_lost_master_is_unavailable_and_back_after_a_restart() -> None:
    keys = [make_key() for _ in range(12)]
    with cluster() as nodes:
        store = open_store(url_of(*nodes), "1s")
        assert put(store, keys) == [True] * 12
        nodes[0].kill()
        with pytest.raises(TierUnavailable):
            store.has(keys)
        nodes[0].start()
        wait_until(lambda: _has(store, keys))
        assert all(put(store, keys))
        assert get(store, keys) == [True] * 12
        store.close()


def _has(store: RedisStore, keys: list[bytes]) -> bool:
    try:
        return bool(store.has(keys))
    except TierUnavailable:
        return False


def test_sentinels_next_master_serves_when_the_first_is_killed() -> None:
    valkey = binaries()["valkey"]
    keys = [make_key() for _ in range(8)]
    with ExitStack() as stack:
        first, second = (stack.enter_context(RedisServer(valkey)) for _ in range(2))
        second.client().replicaof("127.0.0.1", str(first.port))
        sentinel = stack.enter_context(Sentinel(first, "main"))
        store = open_store(f"redis+sentinel://127.0.0.1:1,127.0.0.1:{sentinel.port}/main", "2s")
        stack.callback(store.close)
        assert put(store, keys) == [True] * 8
        assert first.client().dbsize() == 8
        wait_until(sentinel.knows_a_replica)
        wait_until(lambda: second.client().dbsize() == 8)
        first.kill()
        with pytest.raises(TierUnavailable):
            store.has(keys)
        wait_until(lambda: sentinel.master_port() == second.port)
        wait_until(lambda: _has(store, keys))
        assert get(store, keys) == [True] * 8
        fresh = make_key()
        assert put(store, [fresh]) == [True]


def test_a_service_no_sentinel_knows_is_unavailable() -> None:
    with ExitStack() as stack:
        master = stack.enter_context(RedisServer(binaries()["valkey"]))
        sentinel = stack.enter_context(Sentinel(master, "main"))
        store = open_store(f"redis+sentinel://127.0.0.1:{sentinel.port}/other", "1s")
        stack.callback(store.close)
        with pytest.raises(TierUnavailable, match="no sentinel names a master of 'other'"):
            store.has([make_key()])
