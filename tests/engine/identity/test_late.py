"""Facts that come late: the engine serves without the tiers that need them, and then with them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from spec.chain import ChainSpec
from tests.support.replay_chains import MODEL, chain_of, close, cpu, disk, drive, measured
from tiers.connector import assembly as chains
from tiers.connector.scheduler import open_tier
from tiers.connector.worker import offloading_worker as workers
from tiers.engine.identity.late import LateFacts
from tiers.errors import TierUnusable
from tiers.lab.replay import ReplayEngine, answer

PROMPT = list(range(48))
SECONDS = 30.0


class Facts:
    """Late facts that a test lets be known; of all ranks."""

    def __init__(self, weights: str = "weights") -> None:
        self.weights = weights
        self.are_known = False
        self.asked = 0

    def known(self, seconds: float = 0.0) -> Mapping[str, str] | None:
        self.asked += 1
        return {"weights": self.weights} if self.are_known else None


@pytest.fixture
def make() -> Iterator[Callable[..., ReplayEngine]]:
    """Make engines; each is closed, and must have given everything back."""
    engines: list[ReplayEngine] = []

    def one(chain: ChainSpec, late: Any, **more: Any) -> ReplayEngine:
        engines.append(ReplayEngine(chain, late_facts=late, prefix_caching=False, **more))
        return engines[-1]

    yield one
    for engine in engines:
        close(engine)


def count(engine: ReplayEngine, tier: str, what: str) -> float:
    return measured(engine, what, tier)


def loaded(engine: ReplayEngine, tier: str) -> float:
    """Tokens of the prompt that come from a tier."""
    before = count(engine, tier, "loaded_tokens")
    request = engine.generate(PROMPT)
    assert request.output == answer(MODEL, PROMPT, 4, len(engine.workers))
    engine.settle()
    return count(engine, tier, "loaded_tokens") - before


def until(engine: ReplayEngine, tier: str) -> None:
    """Serve until the tier does."""
    limit = time.monotonic() + SECONDS
    while not loaded(engine, tier):
        assert time.monotonic() < limit, f"{tier} never joined"


@pytest.mark.fault
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_tier_that_others_share_joins_when_the_facts_are_known(
    make: Callable[..., ReplayEngine],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    world_size: int,
) -> None:
    caplog.set_level(logging.INFO)
    late = Facts()
    engine = make(chain_of(disk(tmp_path)), late, world_size=world_size)
    assert loaded(engine, "disk") == 0 and loaded(engine, "disk") == 0
    assert not count(engine, "disk", "store_dropped_inflight")
    assert [r.levelname for r in caplog.records if "being identified" in r.message] == ["INFO"]
    late.are_known = True
    until(engine, "disk")
    assert len([r for r in caplog.records if "join now" in r.message]) == 1
    # What it stored is found by the next engine with these facts, and by no other.
    engine.settle()
    assert loaded(make(chain_of(disk(tmp_path)), _known(), world_size=world_size), "disk")
    assert not loaded(
        make(chain_of(disk(tmp_path)), _known("others"), world_size=world_size), "disk"
    )


def _known(weights: str = "weights") -> Facts:
    facts = Facts(weights)
    facts.are_known = True
    return facts


def test_the_cpu_tier_waits_for_nothing_and_asks_for_nothing(
    make: Callable[..., ReplayEngine], tmp_path: Path
) -> None:
    alone = Facts()
    engine = make(chain_of(cpu()), alone)
    loaded(engine, "cpu")
    assert loaded(engine, "cpu") and alone.asked == 0, "nobody reads weights for it"
    beside = make(chain_of(cpu(), disk(tmp_path)), Facts())
    loaded(beside, "cpu")
    assert loaded(beside, "cpu")


def test_a_load_of_requests_is_right_before_and_after(
    make: Callable[..., ReplayEngine], tmp_path: Path
) -> None:
    late = Facts()
    engine = make(chain_of(cpu(8), disk(tmp_path)), late)
    drive(engine, 1)
    late.are_known = True
    drive(engine, 2)
    drive(engine, 1)
    until(make(chain_of(disk(tmp_path)), _known()), "disk")


@pytest.mark.fault
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), TierUnusable("no disk")])
def test_a_tier_that_one_rank_can_not_open_late_is_said_once(
    make: Callable[..., ReplayEngine],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    world_size: int,
) -> None:
    opens = vars(workers)["open_guarded"]
    opened: list[str] = []

    def last_fails(*args: Any) -> Any:
        opened.append("worker")
        if len(opened) == world_size:
            raise error
        return opens(*args)

    monkeypatch.setattr(workers, "open_guarded", last_fails)
    monkeypatch.setattr(open_tier, "open_guarded", lambda *_: opened.append("scheduler"))
    late = Facts()
    engine = make(chain_of(disk(tmp_path)), late, world_size=world_size)
    loaded(engine, "disk")
    late.are_known = True
    limit = time.monotonic() + SECONDS
    while "unusable" not in caplog.text:
        assert time.monotonic() < limit, "nobody says why the tier is absent"
        loaded(engine, "disk")
    for _ in range(3):
        assert loaded(engine, "disk") == 0
    (line,) = [r.getMessage() for r in caplog.records if "unusable" in r.getMessage()]
    assert "tier 'disk' is unusable" in line and str(error) in line
    assert opened == ["worker"] * world_size, "what can't be used is opened in vain"


def test_a_store_that_opens_after_its_worker_was_closed_is_closed(
    make: Callable[..., ReplayEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opens = vars(workers)["open_guarded"]
    begin, stores = threading.Event(), []

    def slowly(*args: Any) -> Any:
        assert begin.wait(SECONDS)
        stores.append(opens(*args))
        return stores[0]

    monkeypatch.setattr(workers, "open_guarded", slowly)
    monkeypatch.setattr(chains, "DRAIN_SECONDS", 0.01)
    late = Facts()
    engine = make(chain_of(disk(tmp_path)), late)
    late.are_known = True
    loaded(engine, "disk")
    close(engine)
    begin.set()
    limit = time.monotonic() + SECONDS
    while not stores or not stores[0]._closed:
        assert time.monotonic() < limit, "its folder stays in use"
        time.sleep(0.01)


# -- finding them out ----------------------------------------------------------------------------


def test_facts_are_found_beside_who_asks() -> None:
    begin = threading.Event()

    def slowly() -> dict[str, str]:
        assert begin.wait(SECONDS)
        return {"weights": "w"}

    late = LateFacts(lambda: {"attention": "amx"}, slowly, {"weights": "alone"})
    assert late.known() is None and late.known(0.01) is None
    begin.set()
    assert late.known(SECONDS) == {"attention": "amx", "weights": "w"}


def test_facts_that_can_t_be_found_are_this_process_s_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda told: None)

    def fails() -> dict[str, str]:
        raise MemoryError

    late = LateFacts(dict, fails, {"weights": "alone"})
    assert late.known(SECONDS) == {"weights": "alone"}


def test_layers_that_can_t_be_identified_start_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails() -> dict[str, str]:
        raise NotImplementedError("a layer of a kind that is new")

    late = LateFacts(fails, lambda: {"weights": "w"}, {"weights": "alone"})
    assert late.known() == late.known() == {"weights": "alone"}
    assert len(caplog.records) == 1
