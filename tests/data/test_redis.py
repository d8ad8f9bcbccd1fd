"""What the tools find and drop on real servers."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from redis.exceptions import ResponseError

from tests.cli.conftest import Ran
from tests.cli.conftest import kvtiers as kvtiers  # the fixture
from tests.data.test_inspection import NOTE
from tests.support.redis_verbs import PAYLOAD, get, name, opened, put
from tests.support.servers import RedisServer
from tests.support.topologies import cluster
from tiers.remote.redis import records as remote_records
from tiers.remote.spec import RedisSpec
from tiers.store import GatheredBlock
from tiers.testing import make_key


def records_of(url: str) -> remote_records.RedisRecords:
    return RedisSpec.model_validate({"url": url, "timeout": "5s"}).records()


def value(client: Any, name: bytes) -> bytes:
    return bytes(client.get(name))


def flip(client: Any, name: bytes, place: int, bit: int) -> None:
    """Flip a bit of a value."""
    client.setrange(name, place, bytes([value(client, name)[place] ^ 1 << bit]))


@pytest.fixture
def chain(tmp_path: Path, server: RedisServer) -> Path:
    file = tmp_path / "chain.yaml"
    file.write_text(f"version: 1\ntiers: [{{type: redis, url: '{server.url}', timeout: 5s}}]\n")
    return file


@pytest.mark.fault
def test_flipped_values_are_found_and_no_other_is_dropped(
    server: RedisServer, chain: Path, kvtiers: Callable[..., Ran]
) -> None:
    """Beside values that are none of ours, which stay; and without a use of any."""
    chance, keys = random.Random(3), [make_key() for _ in range(150)]
    client = server.client()
    client.rpush("kvtiers:a list", "of somebody's")
    client.set("kvtiers:text of another program", "some text" * 100)
    with opened(server.url) as plain, opened(server.url, codec="zstd") as packed:
        assert all(put(plain, *keys[:75]) + put(packed, *keys[75:]))
        damaged = chance.sample(keys, 50)
        for key in damaged:
            # In the first 248 bytes is all that a header says.
            size = client.strlen(name(key))
            place = chance.choice((chance.randrange(248), chance.randrange(512, size)))
            flip(client, name(key), place, chance.randrange(8))
        client.set(name(damaged[0]), value(client, name(damaged[0]))[:-1])  # cut, too
        ran = kvtiers("verify", chain, "--json")
        assert ran.status == 1
        assert {one for one, _ in json.loads(ran.out)["redis"]["found"]} == {
            name(key).hex() for key in damaged
        }
        ran = kvtiers("verify", chain)
        assert "150 blocks" in ran.out and "2 are no records of this format" in ran.out
        ran = kvtiers("scrub", chain)
        assert ran.status == 0 and "50 damaged, 50 dropped" in ran.out
        whole = [key not in damaged for key in keys]
        assert plain.has(keys) == whole
        assert get(packed, *keys) == whole
        ran = kvtiers("inspect", chain)
        assert "no records of this kvtiers" in ran.out
        spaces = (b"text of another ".hex(), b"a list".hex() + "0000")
        ran = kvtiers("gc", chain, "--namespace", spaces[0], "--namespace", spaces[1], "--delete")
        assert ran.status == 0 and "nothing to drop" in ran.out
        ran = kvtiers("export", chain, chain.with_suffix(".kvt"))
        assert ran.status == 0 and ": 100 blocks, " in ran.out, ran.err
        assert client.exists("kvtiers:a list", "kvtiers:text of another program") == 2


def test_a_tier_whose_key_prefix_begins_with_anothers_is_left_alone(
    server: RedisServer, chain: Path, kvtiers: Callable[..., Ran]
) -> None:
    ours, theirs = make_key(), [make_key() for _ in range(5)]
    with opened(server.url) as store, opened(server.url, key_prefix="kvtiers:prod") as other:
        assert all(put(store, ours) + put(other, *theirs))
        ran = kvtiers("scrub", chain)
        assert ran.status == 0 and "0 damaged" in ran.out and "1 blocks" in ran.out, ran.out
        ran = kvtiers("export", chain, chain.with_suffix(".kvt"))
        assert ran.status == 0 and ": 1 blocks, " in ran.out, ran.err
        assert other.has(theirs) == [True] * 5
        client = server.client()
        client.set(b"kvtiers:" + ours, value(client, b"kvtiers:prod:" + theirs[0]))
        assert "1 damaged, 1 dropped" in kvtiers("scrub", chain).out, "another's record is damage"


def test_what_is_not_used_is_not_known_without_times_of_uses(
    server: RedisServer, chain: Path, kvtiers: Callable[..., Ran]
) -> None:
    """An engine that loads alone renews no note of its namespace."""
    key, client = make_key(), server.client()
    with opened(server.url) as store:
        put(store, key)
        records = records_of(server.url)
        records.note(key[:16], replace(NOTE, opened=1.0).encode())
        records.close()
        client.config_set("maxmemory-policy", "allkeys-lfu")
        assert "nothing to drop" in kvtiers("gc", chain, "--unused", "30d", "--delete").out
        assert get(store, key) == [True]


def test_reading_counts_as_no_use(
    server: RedisServer, chain: Path, kvtiers: Callable[..., Ran]
) -> None:
    """A server that evicts the least recently used ones must not take them for used."""
    client: Any = server.client()
    key = make_key()
    try:
        client.execute_command("CLIENT", "NO-TOUCH", "ON")
    except ResponseError:
        pytest.skip("the server can't tell: Redis can since 7.2")
    with opened(server.url) as store:
        put(store, key)
        client.config_set("maxmemory-policy", "allkeys-lfu")
        client.config_set("lfu-decay-time", 0)  # a busy machine takes minutes, each of which counts
        client.config_set("lfu-log-factor", 0)  # each use counts, not one of many
        store.has([key])
        get(store, key)
        before = client.execute_command("OBJECT", "FREQ", name(key))
        assert kvtiers("verify", chain).status == 0
        assert client.execute_command("OBJECT", "FREQ", name(key)) == before


def test_what_is_under_a_name_now_is_what_counts(server: RedisServer) -> None:
    """A block that was stored anew, longer, since it was listed is whole; a whole record of
    another key is damaged, and goes."""
    client, keys, used = server.client(), [make_key() for _ in range(4)], list[bytes]()
    with opened(server.url) as plain, opened(server.url, codec="zstd") as packed:
        packed.put([GatheredBlock(keys[0], memoryview(bytes(PAYLOAD)), None)])
        put(plain, *keys[1:])
        records = records_of(server.url)
        every = {one.name: one for piece in records.listed() for one in piece}
        listed = [every[name(key)] for key in keys]
        client.delete(name(keys[0]))
        put(plain, keys[0])
        client.set(name(keys[1]), value(client, name(keys[3])))
        client.delete(name(keys[2]))
        client.rpush(name(keys[2]), "of somebody's")
        found = records.read(listed, lambda header, payload: used.append(header.key))
        assert [finding.state for finding in found] == ["whole", "damaged", "damaged", "whole"]
        assert "another key" in found[1].why and "another type" in found[2].why
        assert used == [keys[3], keys[0]]
        assert records.drop_damaged(listed) == 2
        assert get(plain, *keys) == [True, False, False, True]
        records.drop(listed[3:])
        assert get(plain, *keys) == [True, False, False, False]
        records.close()


def test_each_node_of_a_cluster_is_read() -> None:
    keys = [make_key() for _ in range(60)]
    with cluster() as nodes, opened(f"redis+cluster://127.0.0.1:{nodes[0].port}") as store:
        assert all(put(store, *keys))
        records = records_of(f"redis+cluster://127.0.0.1:{nodes[1].port}")
        pieces = list(records.listed())
        assert {record.name for piece in pieces for record in piece} == set(map(name, keys))
        assert all(finding.state == "whole" for piece in pieces for finding in records.read(piece))
        assert {record.payload_bytes for piece in pieces for record in piece} == {PAYLOAD}
        records.close()
