"""What opens says so in one line each: the chain, and each tier, at start or later."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.replay import ReplayEngine
from tests.support.replay_chains import MODEL, SLOT, chain_of, close, cpu, disk, measured
from tests.support.slow_store import LONG, SlowSpec, ask
from tiers.store import Usage
from tiers.testing import MemoryStore
from tiers.wrappers import reopening

MakeEngine = Callable[..., ReplayEngine]


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    name = "tiers.connector.scheduler.open_tier"
    return [record.getMessage() for record in caplog.records if record.name == name]


def test_a_start_tells_of_the_chain_and_of_each_tier(
    engine: MakeEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    server = {"type": "redis", "url": "redis://127.0.0.1:1/0", "name": "shared"}
    made = engine(chain_of(cpu(20), disk(tmp_path / "d"), server), num_blocks=120)
    chain, *tiers = said(caplog)
    assert "chain of 3 tier(s)" in chain and "84 slots" in chain
    assert f"blocks of {MODEL.payload_bytes}B" in chain
    assert [line.split(": ")[0] for line in tiers] == [
        f"tier '{name}' is open, load priority {place} of 3"
        for place, name in ((1, "cpu"), (2, "disk"))
    ]
    assert f"capacity {20 * SLOT // 1024}KiB, room for 20 blocks" in tiers[0]
    assert f"{tmp_path / 'd'}, io buffered, durability none" in tiers[1]
    assert "capacity 1MiB, 0 blocks held" in tiers[1]
    (unreached,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "tier shared is configured, not reached yet" in unreached and "127.0.0.1:1" in unreached
    ask(made, LONG[:40])
    close(made)
    caplog.clear()
    engine(chain_of(disk(tmp_path / "d")))
    assert "10 blocks held" in said(caplog)[1], "they outlive the engine"


def test_a_tier_that_opens_late_tells_then_and_once(
    engine: MakeEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(reopening, "RETRY_AFTER", 0.1)
    caplog.set_level(logging.INFO)
    place = tmp_path / "mount"
    place.write_text("not mounted yet")
    made = engine(chain_of(disk(place / "tier")), prefix_caching=False)
    ask(made, LONG[:40])
    assert [line for line in said(caplog) if "is open" in line] == []
    place.unlink()
    deadline = time.monotonic() + 30
    while not measured(made, "loaded_tokens", "disk"):
        assert time.monotonic() < deadline
        ask(made, LONG[:40])
        time.sleep(0.05)
    (line,) = [line for line in said(caplog) if "is open" in line]
    assert "tier 'disk' is open, load priority 1 of 1" in line


class _Mute(MemoryStore):
    def usage(self) -> Usage:
        raise ZeroDivisionError("no idea")


def test_a_store_that_can_not_tell_is_used_all_the_same(
    engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    mute = _Mute()
    monkeypatch.setattr(SlowSpec, "open", lambda spec, site: mute)
    chain = chain_of(cpu(20))
    made = engine(chain.model_copy(update={"tiers": (SlowSpec(type="slow"),)}))
    assert "can't tell what it holds: ZeroDivisionError" in said(caplog)[1]
    ask(made, LONG[:40])
    made.settle()
    assert mute.blocks


class _Forging(MemoryStore):
    def describe(self) -> str:
        return "here\nERROR the engine\x1b[2J"


def test_what_a_store_tells_is_one_line(
    engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(SlowSpec, "open", lambda spec, site: _Forging())
    engine(chain_of(cpu(20)).model_copy(update={"tiers": (SlowSpec(type="slow"),)}))
    assert said(caplog)[1] == (
        r"tier 'slow (package tests)' is open, load priority 1 of 1: here\nERROR the engine\x1b[2J"
    )
