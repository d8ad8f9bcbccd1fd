"""The remote tier over a real Cluster of three masters, and over a master that Sentinel names."""

from __future__ import annotations

import logging
import socket
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from types import SimpleNamespace
from typing import Any, cast

import pytest
from redis.crc import key_slot

from spec.offloading import StoreContext
from tests.support.redis_verbs import PAYLOAD, get, is_up, name, put
from tests.support.servers import RedisServer, binaries
from tests.support.topologies import (
    Sentinel,
    cluster,
    cluster_command,
    joined,
    move_slot,
    slots_of,
    wait_until,
)
from tiers.errors import RecordError, TierUnavailable
from tiers.remote.deadline import Deadline
from tiers.remote.redis.pipeline import Record
from tiers.remote.redis.pools import Pool, Pools
from tiers.remote.redis.redis_store import RedisStore
from tiers.remote.redis.stream import command
from tiers.remote.redis.topology import FAILURES, SLOTS, Cluster, Node, OneMaster
from tiers.remote.redis.url import Endpoint
from tiers.remote.spec import RedisSpec
from tiers.store import Block, TierStore, Waiting
from tiers.testing import Memory, StoreContract, make_key
from tiers.wrappers.guard import Guarded


def open_store(url: str, timeout: str = "10s", payload_bytes: int = PAYLOAD) -> RedisStore:
    spec = RedisSpec.model_validate({"url": url, "timeout": timeout, "ttl": "10m"})
    return spec.open(StoreContext(payload_bytes=payload_bytes))


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
    assert put(store, *keys) == [True] * 60
    held = Counter(node.port for node in nodes for _ in node.client().scan_iter(b"kvtiers:*"))
    assert len(held) == 3
    assert get(store, make_key(), *keys) == [False] + [True] * 60
    store.close()


def node_of(nodes: list[RedisServer], key: bytes) -> int:
    slot = key_slot(name(key))
    return next(number for number in range(len(nodes)) if slot in slots_of(number, len(nodes)))


def is_alone(nodes: list[RedisServer], key: bytes) -> bool:
    """Whether other tests have left nothing in the key's slot, which could not be given away."""
    node, slot = nodes[node_of(nodes, key)], key_slot(name(key))
    return bool(cluster_command(node, "COUNTKEYSINSLOT", slot) == 0)


@pytest.mark.fault
def test_a_slot_that_moved_is_found_again(nodes: list[RedisServer]) -> None:
    store = open_store(url_of(*nodes))
    key = next(key for key in iter(make_key, None) if is_alone(nodes, key))
    slot, old = key_slot(name(key)), node_of(nodes, key)
    assert put(store, key) == [True]  # the map is known now
    store.drop([key])
    to = nodes[(old + 1) % 3]
    owner = cluster_command(to, "MYID")
    home = cluster_command(nodes[old], "MYID")
    try:
        for node in nodes:
            cluster_command(node, "SETSLOT", slot, "NODE", owner)
        assert put(store, key) == [True]
        assert to.client().exists(name(key)) == 1
        assert get(store, key) == [True]
    finally:
        store.drop([key])
        for node in nodes:
            cluster_command(node, "SETSLOT", slot, "NODE", home)
        store.close()


def test_a_value_that_came_is_not_asked_for_again_where_another_has_moved(
    nodes: list[RedisServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(url_of(*nodes))
    here = (key for key in iter(make_key, None) if node_of(nodes, key) == 0)
    gone, stays = islice(here, 2)
    moved = next(key for key in here if is_alone(nodes, key))
    put(store, gone, stays)
    slot = key_slot(name(moved))
    owner, home = (cluster_command(node, "MYID") for node in (nodes[1], nodes[0]))
    assert store.has([gone]) == [True]  # the map is known now
    memory = Memory([gone, stays, moved], PAYLOAD)
    loaded: list[bytes] = []
    fill = store._fill

    def count(block: Block, record: Record | None) -> None:
        loaded.append(block.key)
        if block.key == gone:  # it is evicted before the map is asked for again
            nodes[0].client().delete(name(gone))
        fill(block, record)

    monkeypatch.setattr(store, "_fill", count)
    try:
        for node in nodes:
            cluster_command(node, "SETSLOT", slot, "NODE", owner)
        assert store.get(memory.blocks) == [True, True, False]
        assert memory.holds(0) and memory.holds(1)
        assert loaded == [gone, stays]
    finally:
        for node in nodes:
            cluster_command(node, "SETSLOT", slot, "NODE", home)
        store.close()


@pytest.mark.fault
def test_what_left_a_moving_slot_is_a_miss_and_the_others_are_served(
    nodes: list[RedisServer],
) -> None:
    store = open_store(url_of(*nodes))
    moved = make_key()
    slot, source = key_slot(name(moved)), node_of(nodes, moved)
    others = (key for key in iter(make_key, None) if key_slot(name(key)) != slot)
    stays = next(key for key in others if node_of(nodes, key) == source)
    put(store, stays)
    there = cluster_command(nodes[(source + 1) % 3], "MYID")
    cluster_command(nodes[source], "SETSLOT", slot, "MIGRATING", there)
    try:
        assert store.has([moved, stays]) == [False, True]
        assert get(store, moved, stays) == [False, True]
        assert put(store, moved, stays) == [False, True]
    finally:
        cluster_command(nodes[source], "SETSLOT", slot, "STABLE")
        store.close()


@pytest.mark.fault
def test_a_node_that_is_down_at_first_is_passed_over_for_the_next(
    nodes: list[RedisServer],
) -> None:
    store = open_store(f"redis+cluster://127.0.0.1:1,127.0.0.1:{nodes[2].port}")
    keys = [make_key() for _ in range(9)]
    assert put(store, *keys) == [True] * 9
    store.close()


@pytest.mark.fault
def test_a_server_that_is_no_cluster_is_unavailable(shared_server: RedisServer) -> None:
    store = open_store(f"redis+cluster://127.0.0.1:{shared_server.port}")
    with pytest.raises(TierUnavailable):
        store.has([make_key()])
    store.close()


@pytest.mark.fault
@pytest.mark.parametrize("fault", ["kill", pytest.param("hang", marks=pytest.mark.faults)])
def test_a_lost_masters_blocks_are_misses_and_the_others_are_served(
    fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    keys = [make_key() for _ in range(30)]
    with cluster(cluster_require_full_coverage="no") as nodes:
        at_first = [node_of(nodes, key) == 0 for key in keys]
        store = open_store(url_of(*nodes), "1s")
        guarded = Guarded(store, "remote")
        assert put(guarded, *keys) == [True] * 30
        getattr(nodes[0], fault)()
        others = [not lost for lost in at_first]
        assert guarded.has(keys) == others
        assert get(guarded, *keys) == others
        assert put(guarded, *keys) == others
        only_lost = [key for key, lost in zip(keys, at_first, strict=True) if lost]
        assert guarded.has(only_lost) == [False] * len(only_lost)
        guarded.drop([*only_lost, keys[others.index(True)]])
        assert is_up(guarded)
        for kind in ("reads", "writes"):
            assert caplog.text.count(f"node 127.0.0.1:{nodes[0].port}: {kind} are down") == 1
        nodes[0].start() if fault == "kill" else nodes[0].resume()
        wait_until(lambda: all(put(guarded, *keys)))
        wait_until(lambda: get(guarded, *keys) == [True] * 30)
        for kind in ("reads", "writes"):
            assert caplog.text.count(f"node 127.0.0.1:{nodes[0].port}: {kind} are up again") == 1
        guarded.close()


@pytest.mark.fault
def test_a_node_that_takes_no_writes_still_serves_its_blocks(nodes: list[RedisServer]) -> None:
    guarded = Guarded(open_store(url_of(*nodes)), "remote")
    keys, more = ([make_key() for _ in range(30)] for _ in range(2))
    assert put(guarded, *keys) == [True] * 30
    client = nodes[0].client()
    client.config_set("min-replicas-to-write", 1)
    try:
        assert put(guarded, *more) == [node_of(nodes, key) != 0 for key in more]
        assert get(guarded, *keys) == [True] * 30
        assert is_up(guarded)
    finally:
        client.config_set("min-replicas-to-write", 0)
    wait_until(lambda: put(guarded, *more) == [True] * 30)
    assert get(guarded, *keys, *more) == [True] * 60
    guarded.drop([*keys, *more])
    guarded.close()


@pytest.mark.faults
@pytest.mark.fault
def test_a_cluster_without_a_node_is_down_and_back_when_they_are() -> None:
    keys = [make_key() for _ in range(40)]  # of which each node has some
    with cluster() as nodes:
        store = open_store(url_of(*nodes), "1s")
        guarded = Guarded(store, "remote", retry_after=0.1)
        assert put(guarded, *keys) == [True] * 40
        for node in nodes:
            node.hang()
        with pytest.raises(TierUnavailable):
            store.has(keys)
        assert guarded.has(keys) == [False] * 40
        assert not is_up(guarded)
        for node in nodes:
            node.resume()
        wait_until(lambda: get(guarded, *keys) == [True] * 40)
        wait_until(lambda: put(guarded, make_key()) == [True])
        assert is_up(guarded)
        guarded.close()


@pytest.mark.faults
@pytest.mark.fault
def test_a_cluster_that_refuses_to_serve_is_down_and_back_after_a_restart() -> None:
    keys = [make_key() for _ in range(40)]  # of which each node has some
    with cluster() as nodes:
        guarded = Guarded(open_store(url_of(*nodes), "1s"), "remote", retry_after=0.2)
        assert put(guarded, *keys) == [True] * 40
        nodes[0].kill()
        wait_until(lambda: not any(guarded.has(keys)) and not is_up(guarded))
        nodes[0].start()
        wait_until(lambda: all(put(guarded, *keys)))
        assert get(guarded, *keys) == [True] * 40
        assert is_up(guarded)
        guarded.close()


@pytest.mark.faults
@pytest.mark.fault
def test_a_replica_that_took_over_serves_its_masters_blocks() -> None:
    keys = [make_key() for _ in range(30)]
    with cluster() as nodes, ExitStack() as stack:
        replica = stack.enter_context(joined(nodes, replica_of=nodes[0]))
        guarded = Guarded(open_store(url_of(*nodes), "1s"), "remote")
        stack.callback(guarded.close)
        assert put(guarded, *keys) == [True] * 30
        wait_until(lambda: replica.client().dbsize() == nodes[0].client().dbsize())
        nodes[0].kill()
        wait_until(lambda: get(guarded, *keys) == [True] * 30)
        assert is_up(guarded)


@pytest.mark.fault
def test_slots_that_move_under_load_cost_misses_and_never_a_wrong_block(
    nodes: list[RedisServer],
) -> None:
    keys = [make_key() for _ in range(24)]
    store = open_store(url_of(*nodes))
    put(store, *keys)
    done = threading.Event()
    rounds: list[int] = []

    def load() -> None:
        while not done.is_set():
            rounds.append(sum(get(store, *keys)))  # which compares every byte of a hit
            put(store, *keys)

    loader = threading.Thread(target=load)
    loader.start()
    mine = [key for key in keys if node_of(nodes, key) == 0][:4]
    try:
        for key in mine:
            move_slot(nodes, key_slot(name(key)), nodes[0], nodes[1])
    finally:
        done.set()
        loader.join()
    assert rounds
    assert get(store, *keys) == [True] * 24
    assert all(nodes[1].client().exists(name(key)) for key in mine)
    for key in mine:
        move_slot(nodes, key_slot(name(key)), nodes[1], nodes[0])
    assert get(store, *keys) == [True] * 24
    store.drop(keys)
    store.close()


def _has(store: TierStore, keys: list[bytes]) -> bool:
    try:
        return bool(store.has(keys))
    except TierUnavailable:
        return False


@pytest.mark.faults
@pytest.mark.fault
def test_sentinels_next_master_serves_when_the_first_is_killed() -> None:
    valkey = binaries()["valkey"]
    keys = [make_key() for _ in range(8)]
    with ExitStack() as stack:
        first, second = (stack.enter_context(RedisServer(valkey)) for _ in range(2))
        second.client().replicaof("127.0.0.1", str(first.port))
        sentinel = stack.enter_context(Sentinel(first, "main"))
        store = open_store(f"redis+sentinel://127.0.0.1:1,127.0.0.1:{sentinel.port}/main", "2s")
        stack.callback(store.close)
        assert put(store, *keys) == [True] * 8
        assert first.client().dbsize() == 8
        wait_until(sentinel.knows_a_replica)
        wait_until(lambda: second.client().dbsize() == 8)
        first.kill()
        with pytest.raises(TierUnavailable):
            store.has(keys)
        wait_until(lambda: sentinel.master_port() == second.port)
        wait_until(lambda: _has(store, keys))
        assert get(store, *keys) == [True] * 8
        fresh = make_key()
        assert put(store, fresh) == [True]


@pytest.mark.fault
def test_a_service_no_sentinel_knows_is_unavailable() -> None:
    with ExitStack() as stack:
        master = stack.enter_context(RedisServer(binaries()["valkey"]))
        sentinel = stack.enter_context(Sentinel(master, "main"))
        store = open_store(f"redis+sentinel://127.0.0.1:{sentinel.port}/other", "1s")
        stack.callback(store.close)
        with pytest.raises(TierUnavailable, match="no sentinel names a master of 'other'"):
            store.has([make_key()])


@pytest.mark.fault
def test_one_that_never_answers_leaves_time_for_the_next(nodes: list[RedisServer]) -> None:
    with ExitStack() as stack:
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        mute = f"127.0.0.1:{silent.getsockname()[1]}"
        master = stack.enter_context(RedisServer(binaries()["valkey"]))
        sentinel = stack.enter_context(Sentinel(master, "main"))
        for url in (
            f"redis+sentinel://{mute},127.0.0.1:{sentinel.port}/main",
            f"redis+cluster://{mute},127.0.0.1:{nodes[0].port}",
        ):
            store = open_store(url, "2s")
            stack.callback(store.close)
            keys = [make_key() for _ in range(6)]
            assert put(store, *keys) == [True] * 6
            assert get(store, *keys) == [True] * 6
        for url in (f"redis+sentinel://{mute},{mute}/main", f"redis+cluster://{mute}"):
            store = open_store(url, "300ms")
            stack.callback(store.close)
            with pytest.raises(TierUnavailable):
                store.has([make_key()])


class Told:
    """Answers questions to servers that are not there, by their ports; those of `gone` hang."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers: dict[int, Any] = {}
        self.asked: list[int] = []
        monkeypatch.setattr(Pool, "ask", lambda pool, limit, *words: self.ask(pool))

    def ask(self, pool: Pool) -> Any:
        port = pool._pool.connection_kwargs["port"]
        self.asked.append(port)
        if port not in self.answers:
            raise TimeoutError("nobody is there")
        return self.answers[port]


@pytest.mark.fault
def test_masters_that_left_a_cluster_are_asked_nothing_and_leave_no_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A master hands over, and its address is gone: a few of those took all of a verb's time."""
    told = Told(monkeypatch)
    spec = RedisSpec.model_validate({"url": "redis+cluster://127.0.0.1:1"})
    topology = Cluster(spec.connection(), 1.0)
    for master in range(10, 22):
        told.answers = {port: [[0, SLOTS - 1, [b"127.0.0.1", master]]] for port in (1, master)}
        told.asked.clear()
        topology._map = None  # as after MOVED
        assert [*topology.masters(Deadline(5))[0]] == [f"127.0.0.1:{master}"]
        assert told.asked in ([1], [master - 1, 1]), "the one that it knew, and who is named"
        assert len(topology._pools._pools) == 2


@pytest.mark.fault
def test_a_node_that_knows_no_cluster_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(monkeypatch)
    spec = RedisSpec.model_validate({"url": "redis+cluster://127.0.0.1:1,127.0.0.1:2"})
    topology = Cluster(spec.connection(), 1.0)
    told.answers = {1: []}
    with pytest.raises(FAILURES):
        topology.masters(Deadline(5))
    told.answers = {1: [], 2: [[0, SLOTS - 1, [b"127.0.0.1", 2]]]}
    assert topology.masters(Deadline(5))[1] == 0, "no slot is nobody's"
    told.answers = {1: []}
    topology._map = None
    with pytest.raises(FAILURES):
        topology.masters(Deadline(5))


@pytest.mark.fault
def test_former_masters_that_sentinels_named_leave_no_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(monkeypatch)
    spec = RedisSpec.model_validate({"url": "redis+sentinel://127.0.0.1:1/master"})
    topology = OneMaster(spec.connection())
    for port in range(10, 22):
        told.answers[1] = [b"127.0.0.1", b"%d" % port]
        topology._master = None  # as after a failure
        assert topology.masters(Deadline(5))[0]
    assert len(topology._masters._pools) == 1


def test_a_pool_that_is_dropped_cuts_off_no_verb(nodes: list[RedisServer]) -> None:
    """Another thread learns meanwhile that its node is a master no more."""
    settings = RedisSpec.model_validate({"url": nodes[0].url}).connection()
    pools = Pools(settings)
    with pools.at(None).borrow(Deadline(60)) as stream:
        pools.keep(set())
        stream.send([command(b"PING")])
        assert stream.line() == b"+PONG"


class Idle:
    """A pool of connections that need no server."""

    @contextmanager
    def borrow(self, deadline: Deadline) -> Iterator[Any]:
        yield None


def test_a_master_is_not_looked_for_because_a_load_was_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = RedisSpec.model_validate({"url": "redis+sentinel://127.0.0.1:1/master"})
    topology, found = OneMaster(spec.connection()), list[Idle]()

    def find(deadline: Deadline) -> Any:
        found.append(Idle())
        return found[-1]

    def fails(stream: Any, places: Sequence[int]) -> None:
        raise TimeoutError("no answer in time")

    monkeypatch.setattr(topology, "_find", find)
    for seconds, times in ((0.0, 1), (0.0, 1), (5.0, 1), (5.0, 2)):
        with pytest.raises(TimeoutError), Waiting(lambda seconds=seconds: seconds):  # type: ignore[misc]
            topology.dispatch([b"name"], "reads", fails, Deadline(5))
        assert len(found) == times


@pytest.mark.fault
@pytest.mark.parametrize("url", ["redis://127.0.0.1:1", "redis+sentinel://127.0.0.1:1/master"])
def test_a_verb_goes_on_whose_master_others_forget(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another verb fails at the moment at which it was found."""
    topology = OneMaster(RedisSpec.model_validate({"url": url}).connection())
    done: list[Sequence[int]] = []
    named = SimpleNamespace(ask=lambda *question: [b"127.0.0.1", b"2"])
    monkeypatch.setattr(topology._sentinels, "at", lambda endpoint: named)
    monkeypatch.setattr(topology._masters, "at", lambda endpoint: Idle())
    forgetting = property(lambda topology: None, lambda topology, found: None)
    monkeypatch.setattr(OneMaster, "_master", forgetting, raising=False)
    topology.dispatch([b"name"], "reads", lambda _, places: done.append(places), Deadline(5))
    assert done == [range(1)]


def test_a_block_that_is_not_to_be_stored_leaves_no_call_behind() -> None:
    """As of a row that vLLM has taken back: it shows nothing of the node."""
    spec = RedisSpec.model_validate({"url": "redis+cluster://127.0.0.1:1"})
    topology = Cluster(spec.connection(), 5.0)
    node = Node(Endpoint("127.0.0.1", 1), cast(Any, Idle()), 5.0)
    topology._map = [node] * SLOTS

    def fails(stream: Any, places: Sequence[int]) -> None:
        raise RecordError("vLLM has taken the row back")

    for _ in range(3):
        with pytest.raises(RecordError):
            topology.dispatch([b"name"], "writes", fails, Deadline(5))
    assert node.serves("writes") and not node.breakers["writes"]._in_flight
