"""Engines over several hosts: a tier whose blocks each host keeps for itself is no tier there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spec.chain import ChainSpec
from spec.load import load_chain
from tests.support.replay import ReplayEngine, answer
from tests.support.replay_chains import MODEL, SLOT, chain_of, cpu, disk, measured, redis
from tests.support.servers import RedisServer
from tests.support.slow_store import LONG, SlowSpec
from tiers.paths import this_host
from tiers.testing import MemoryStore

MakeEngine = Callable[..., ReplayEngine]
PROMPT = LONG[:50]


def ask_twice(made: ReplayEngine) -> None:
    for _ in range(2):
        request = made.generate(PROMPT, 2)
        made.settle()
        assert request.output == answer(MODEL, PROMPT, 2, 2)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "unusable" in r.getMessage()]


@pytest.mark.fault
@pytest.mark.parametrize(
    ("hosts", "who"),
    [
        (("a", "a", "b"), "the scheduler and rank 0 on a; rank 1 on b"),
        (("a", "b", "b"), "the scheduler on a; ranks 0, 1 on b"),
    ],
)
def test_a_disk_over_several_hosts_is_unusable_by_name_and_the_others_serve(
    engine: MakeEngine,
    tmp_path: Path,
    shared_server: RedisServer,
    caplog: pytest.LogCaptureFixture,
    hosts: tuple[str, ...],
    who: str,
) -> None:
    # Not written as localhost, which no operator of two hosts would write.
    url = shared_server.url.replace("localhost", "127.0.0.1").replace("127.0.0.1", "0.0.0.0")
    elsewhere = {**redis(shared_server, tmp_path), "url": url}
    for others in (cpu(), elsewhere):
        caplog.clear()
        chain = chain_of(disk(tmp_path / "disk"), others)
        made = engine(chain, world_size=2, hosts=hosts, prefix_caching=False)
        ask_twice(made)
        (line,) = said(caplog)
        assert "tier 'disk' is unusable" in line and who in line and "redis, or cpu" in line
        assert measured(made, "loaded_blocks", str(others["type"])) > 0
        assert not made.stats.data.get("disk", {}).get("stored_blocks")


def test_on_one_host_the_disk_serves_all_ranks(engine: MakeEngine, tmp_path: Path) -> None:
    made = engine(chain_of(disk(tmp_path)), world_size=2, hosts="aaa", prefix_caching=False)
    ask_twice(made)
    assert measured(made, "loaded_blocks", "disk") > 0


class Clears(MemoryStore):
    def clear(self, namespace: bytes) -> bool:
        return False


class Shared(SlowSpec):
    @property
    def host_local(self) -> bool:
        return False


class Prompt(SlowSpec):
    is_prompt = True


@pytest.mark.parametrize(
    ("kind", "spec", "is_used"),
    [
        (MemoryStore, SlowSpec, True),
        (Clears, SlowSpec, False),
        (MemoryStore, Prompt, False),
        (Clears, Shared, True),
    ],
)
def test_a_plugin_says_whether_it_is_local_or_its_store_does(
    engine: MakeEngine,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[MemoryStore],
    spec: type[SlowSpec],
    is_used: bool,
) -> None:
    monkeypatch.setattr("tests.support.slow_store.STORES", [kind()])
    tier = spec.model_validate({"type": "slow"})
    chain = ChainSpec(version=1, load_when="always", tiers=(tier,), staging=256 * SLOT)
    made = engine(chain, world_size=2, hosts="aab", prefix_caching=False)
    ask_twice(made)
    assert bool(made.stats.data.get("slow", {}).get("loaded_blocks")) == is_used
    assert bool(said(caplog)) != is_used


@pytest.mark.parametrize(
    ("url", "is_local"),
    [
        ("unix:///run/redis.sock", True),
        ("redis://localhost", True),
        ("redis://127.0.0.1:7000", True),
        ("redis://[::1]", True),
        ("redis://cache.internal", False),
        ("redis+cluster://localhost,10.0.0.1", False),
    ],
)
def test_a_redis_at_localhost_is_another_on_every_host(url: str, is_local: bool) -> None:
    (tier,) = load_chain({"version": 1, "tiers": [{"type": "redis", "url": url}]}).tiers
    settings: Any = tier
    assert settings.host_local is is_local


def test_a_host_is_known_again_by_its_processes_and_no_container_passes_for_it(
    tmp_path: Path,
) -> None:
    ask = [sys.executable, "-c", "from tiers.paths import this_host as h; print(h())"]
    run = {"capture_output": True, "text": True, "env": dict(os.environ)}
    other = subprocess.run(ask, check=True, **run)  # type: ignore[call-overload]
    assert other.stdout.strip() == this_host()
    # Another machine of the same name: it has booted at another time.
    boot = tmp_path / "sys/kernel/random/boot_id"
    boot.parent.mkdir(parents=True)
    boot.write_text("another\n")
    assert this_host(tmp_path) != this_host()
    apart = subprocess.run(["unshare", "-Urm", *ask], **run)  # type: ignore[call-overload]
    if apart.returncode:
        pytest.skip(f"no mount namespaces here: {apart.stderr}")
    assert apart.stdout.strip() != this_host()
