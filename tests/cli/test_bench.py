"""`kvtiers bench`: a profile that replays can read; and what it refuses."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import redis as redis_client

from spec.offloading import StoreContext
from tests.cli.conftest import Ran
from tests.support.servers import RedisServer
from tiers.disk.slab import slot_bytes
from tiers.disk.spec import DiskSpec
from tiers.testing import Memory, make_key
from tiers.tuning import profiling
from tiers.tuning.machine import load_machine


@pytest.fixture(autouse=True)
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """How fast this machine is, is of no account."""
    monkeypatch.setattr(profiling, "TOTAL_BYTES", 16 << 20)


FACTS = {"kv_bytes_per_token": 4096, "engine_cache": "8GiB", "prefill_rate": 20000}


def test_a_profile_is_made_and_made_anew(kvtiers: Callable[..., Ran], tmp_path: Path) -> None:
    chain, profile = tmp_path / "chain.yaml", tmp_path / "profile.json"
    folder = tmp_path / "disk"
    chain.write_text(
        "version: 1\ntiers:\n- {type: cpu, capacity: 64MiB}\n"
        f"- {{type: disk, capacity: 64MiB, path: {folder}}}\n"
    )
    arguments = ("bench", "--chain", chain, "--save", profile, "--block-tokens", 32)
    ran = kvtiers(*arguments)
    assert ran.status == 2 and "no such file; write kv_bytes_per_token, engine_cache" in ran.err
    profile.write_text(json.dumps({**FACTS, "kv_bytes_per_token": 65536}))
    ran = kvtiers(*arguments)
    assert (ran.status, ran.err.strip()) == (0, "")
    machine = load_machine(profile)
    assert machine.tiers.keys() == {"cpu", "disk"}
    assert all(one.load_bandwidth > 1e6 < one.store_bandwidth for one in machine.tiers.values())
    rates = [tier["load_bandwidth"] for tier in json.loads(profile.read_text())["tiers"].values()]
    assert all(re.fullmatch(r"[\d.]{1,5}[kMGT]B/s", rate) for rate in rates), rates
    priced = machine.tiers["disk"].model_copy(update={"price_per_month": 7.0, "load_latency": 77.0})
    tiers = {**machine.tiers, "disk": priced, "redis": machine.tiers["disk"]}
    whole = machine.model_copy(update={"tiers": tiers, "gpus": 3})
    profile.write_text(whole.model_dump_json())
    assert kvtiers(*arguments).status == 0
    again = load_machine(profile)
    assert again == whole.model_copy(update={"tiers": again.tiers})
    assert again.tiers["disk"].price_per_month == 7.0
    assert again.tiers["disk"].load_latency < 77.0, "it is measured anew"
    assert again.tiers["redis"] == machine.tiers["disk"], "it is kept, since the chain has none"
    chain.write_text(chain.read_text().replace("type: disk", "type: disk, name: nvme"))
    assert kvtiers(*arguments).status == 0
    named = load_machine(profile)
    assert named.tiers["nvme"].price_per_month == 7.0, "of its type"
    assert named.tiers["nvme"] != named.tiers["disk"] == again.tiers["disk"]


def test_a_tier_that_cannot_be_measured_is_said(
    kvtiers: Callable[..., Ran], tmp_path: Path
) -> None:
    chain, profile = tmp_path / "chain.yaml", tmp_path / "profile.json"
    chain.write_text(
        "version: 1\ntiers:\n- {type: redis, url: 'redis://127.0.0.1:1', timeout: 50ms}\n"
    )
    profile.write_text(json.dumps(FACTS))
    ran = kvtiers("bench", "--chain", chain, "--save", profile, "--live", "redis")
    assert ran.status == 1 and "tier redis: not every block" in ran.err
    assert json.loads(profile.read_text()) == FACTS
    text = chain.read_text().replace("tiers:\n", "tiers:\n- {type: cpu, capacity: 64MiB}\n")
    chain.write_text(text)
    ran = kvtiers("bench", "--chain", chain, "--save", profile, "--live", "redis")
    assert ran.status == 1 and "tier redis: not every block" in ran.err
    assert ran.out.startswith("cpu: loads ")
    assert load_machine(profile).tiers.keys() == {"cpu"}, "what was measured before is kept"


@pytest.mark.fault
def test_a_full_disk_tier_loses_no_block(kvtiers: Callable[..., Ran], tmp_path: Path) -> None:
    chain, profile = tmp_path / "chain.yaml", tmp_path / "profile.json"
    spec = DiskSpec(path=tmp_path / "disk", capacity=64 * slot_bytes(65536))
    keys = [make_key() for _ in range(64)]
    with contextlib.closing(spec.open(StoreContext(65536))) as store:
        assert store.put(Memory(keys, 65536).fill().blocks) == [True] * 64
        chain.write_text(
            "version: 1\ntiers:\n"
            f"- {{type: disk, path: {spec.path}, capacity: {spec.capacity // 1024}KiB}}\n"
        )
        profile.write_text(json.dumps(FACTS))
        ran = kvtiers("bench", "--chain", chain, "--save", profile)
        assert (ran.status, ran.err.strip()) == (0, "")
        assert store.has(keys) == [True] * 64
        assert not list(spec.path.glob(".kvtiers-bench-*"))


@pytest.mark.fault
def test_a_live_server_is_written_to_only_if_it_is_named(
    kvtiers: Callable[..., Ran], tmp_path: Path, server: RedisServer
) -> None:
    chain, profile = tmp_path / "chain.yaml", tmp_path / "profile.json"
    chain.write_text(f"version: 1\ntiers:\n- {{type: redis, url: '{server.url}', timeout: 30s}}\n")
    profile.write_text(json.dumps(FACTS))
    arguments = ("bench", "--chain", chain, "--save", profile)
    with redis_client.Redis.from_url(server.url) as client:
        ran = kvtiers(*arguments)
        assert (ran.status, ran.out) == (1, "") and "--live redis" in ran.err
        assert client.info("commandstats").get("cmdstat_set") is None
        ran = kvtiers(*arguments, "--live", "redis")
        assert ran.status == 0, ran.err
        assert client.dbsize() == 0
    assert load_machine(profile).tiers.keys() == {"redis"}
    ran = kvtiers(*arguments, "--live", "rediss")
    assert ran.status == 2 and "--live rediss: no such tier; use redis" in ran.err


def test_a_fact_that_no_machine_has_is_named_before_anything_is_measured(
    kvtiers: Callable[..., Ran], tmp_path: Path
) -> None:
    chain, profile = tmp_path / "chain.yaml", tmp_path / "profile.json"
    chain.write_text("version: 1\ntiers:\n- {type: cpu, capacity: 64MiB}\n")
    profile.write_text(json.dumps({**FACTS, "engine_cache": "8Gig", "prefill_rate": -5}))
    ran = kvtiers("bench", "--chain", chain, "--save", profile)
    assert (ran.status, ran.out) == (2, "")
    first, second = ran.err.splitlines()
    assert "engine_cache: found '8Gig'; use one of B, kB" in first
    assert "prefill_rate: found -5; input should be greater than 0" in second
