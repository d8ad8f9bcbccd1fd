"""Policies of plugins: what docs/policies.md shows works, and what fails costs hits alone."""

from __future__ import annotations

import importlib
import logging
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from spec.chain import ChainSpec
from spec.errors import SpecError
from spec.load import load_chain
from tests.support.plugin_packages import write_package
from tests.support.replay import ReplayEngine, answer
from tests.support.replay_chains import MODEL, SLOT, chain_of, close, cpu, disk, measured, total
from tests.test_readme import blocks
from tiers.connector.scheduler.offloading_scheduler import OffloadingScheduler
from tiers.contract.stats import STATE, STATES
from tiers.cpu.eviction import ArcEviction, LruEviction
from tiers.guarded_policies import GuardedEviction

ROOT = Path(__file__).parent.parent
SHOWN = blocks((ROOT / "docs" / "policies.md").read_text())
MODULE, KIT = (block.text for block in SHOWN if block.language == "python")
(PROJECT,) = (tomllib.loads(block.text) for block in SHOWN if block.language == "toml")

Package = Callable[[str], None]


def written(folder: Path, source: str) -> Path:
    """A package of this source whose policies have the names that the page gives."""
    place = write_package(folder, "frequency_policies", source)
    (points,) = place.glob("*/entry_points.txt")
    lines = (
        [f"[{group}]", *(f"{name} = {found}" for name, found in names.items())]
        for group, names in PROJECT["project"]["entry-points"].items()
    )
    points.write_text("\n".join(chain.from_iterable(lines)))
    return place


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    def install(source: str) -> None:
        monkeypatch.syspath_prepend(str(written(tmp_path / "package", source)))
        monkeypatch.delitem(sys.modules, "frequency_policies", raising=False)
        importlib.invalidate_caches()

    return install


def serve(spec: ChainSpec) -> ReplayEngine:
    """An engine that has answered prompts over a small tier, all of them right."""
    engine = ReplayEngine(spec, MODEL, prefix_caching=False)
    for prompt in [list(range(start, start + 60)) for start in (0, 0, 200, 400, 0, 600, 200)]:
        assert engine.generate(prompt, 2).output == answer(MODEL, prompt, 2)
        engine.settle()
    return engine


def shown(engine: ReplayEngine, tier: str) -> str:
    """The tier's state in the metrics."""
    return STATES[int(measured(engine, STATE, tier))]


def why(engine: ReplayEngine) -> str:
    """What `kvtiers status` says of the first tier."""
    assert engine.connector is not None
    first = engine.connector.children[0]
    assert isinstance(first, OffloadingScheduler)
    return first.condition()[1]


def test_the_pages_kit_passes(tmp_path: Path) -> None:
    place = written(tmp_path, MODULE)
    (place / "test_frequency.py").write_text(KIT)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "."]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(place), str(ROOT)])}
    done = subprocess.run(command, cwd=place, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "14 passed" in done.stdout


def test_a_tier_evicts_and_stores_by_the_pages_policies(tmp_path: Path, package: Package) -> None:
    package(MODULE)
    engine = serve(chain_of(cpu(24, eviction="frequency"), disk(tmp_path / "d", admission="soon")))
    try:
        assert total(engine, "loaded_tokens") > 0
        assert total(engine, "store_deferred") > 0
        assert measured(engine, "stored_bytes", "disk") > 0, "what came again is on disk"
        assert [shown(engine, tier) for tier in ("cpu", "disk")] == ["open", "open"]
    finally:
        close(engine)


FAILING = {
    "raises in __init__": ("def enter", "def __init__(self, capacity): 1 / 0\n    def enter"),
    "has no queues": ("queues = 4", "queues = 0"),
    "raises in enter": ("return 1", "return 1 / 0"),
    "panics in enter, as Rust does": ("return 1", "raise type('Panic', (BaseException,), {})"),
    "is cancelled in used": ("return min(", "raise asyncio.CancelledError\n        ("),
    "enters nowhere": ("return 1", "return 9"),
    "enters by a text": ("return 1", "return 'first'"),
    "raises in used": ("min(queue + 1, 4)", "{}[queue]"),
    "raises in next": ("return next(", "return next(iter(()))\n        ("),
    "evicts from an empty queue": ("return next(", "return 4\n        ("),
    "raises in evicted": ("def enter", "def evicted(self, key, queue): {}[0]\n    def enter"),
}


@pytest.mark.parametrize("how", FAILING)
def test_a_policy_that_fails_ends_alone(
    how: str, package: Package, caplog: pytest.LogCaptureFixture
) -> None:
    right, wrong = FAILING[how]
    assert right in MODULE
    package("import asyncio\n" + MODULE.replace(right, wrong, 1))
    with caplog.at_level(logging.ERROR):
        engine = serve(chain_of(cpu(24, eviction="frequency")))
    try:
        assert total(engine, "loaded_tokens") > 0
        assert shown(engine, "cpu") == "degraded"
        assert "frequency has failed" in why(engine)
    finally:
        close(engine)
    lines = [r.message for r in caplog.records if "frequency has failed" in r.message]
    assert len(lines) == 1, lines
    assert lines[0].startswith("tier 'cpu': frequency has failed, and LruEviction decides instead")


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_a_request_to_stop_ends_no_policy_but_on_another_thread(stop: type[BaseException]) -> None:
    class Stopped(LruEviction):
        def used(self, queue: int) -> int:
            raise stop

    guarded = GuardedEviction(Stopped, 4, LruEviction(4), "tier")
    with pytest.raises(stop):
        guarded.used(1)
    assert not guarded.asked.warning
    with ThreadPoolExecutor() as pool:
        assert pool.submit(guarded.used, 1).result() == 1
    assert stop.__name__ in guarded.asked.warning


class SeemsEmpty(ArcEviction):
    def __len__(self) -> int:
        return 0


def test_a_policy_that_counts_as_false_is_asked_all_the_same() -> None:
    guarded = GuardedEviction(SeemsEmpty, 4, LruEviction(4), "tier")
    assert guarded.used(1) == ArcEviction(4).used(1) != LruEviction(4).used(1)


@pytest.mark.parametrize("answer_", ["1 / 0", "'yes'", "None"])
def test_an_admission_that_fails_ends_alone(
    answer_: str, tmp_path: Path, package: Package, caplog: pytest.LogCaptureFixture
) -> None:
    package(MODULE.replace("before is not None and now < before + 60", answer_))
    with caplog.at_level(logging.ERROR):
        engine = serve(chain_of(disk(tmp_path / "d", admission="soon")))
    try:
        assert total(engine, "loaded_tokens") > 0
        assert shown(engine, "disk") == "degraded"
        assert "soon has failed" in why(engine)
    finally:
        close(engine)
    assert sum("soon has failed" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize(
    ("tier", "says"),
    [
        ({"eviction": "frequenzy"}, "eviction: found 'frequenzy'; did you mean frequency?"),
        ({"eviction": "soon"}, "eviction: found 'soon'; use one of arc, frequency, lru"),
        ({"admission": "lru"}, "admission: found 'lru'; use one of soon, threshold"),
    ],
)
def test_a_name_that_is_not_there_is_answered_with_those_that_are(
    tier: dict[str, Any], says: str, package: Package
) -> None:
    package(MODULE)
    with pytest.raises(SpecError, match=says.replace("?", r"\?")):
        load_chain({"version": 1, "tiers": [{"type": "cpu", "capacity": 64 * SLOT, **tier}]})


def test_a_class_that_is_no_policy_is_named(package: Package) -> None:
    package("class FrequencyEviction: ...\nclass SoonAdmission: ...\n")
    tier = {"type": "cpu", "capacity": 64 * SLOT, "eviction": "frequency"}
    with pytest.raises(SpecError, match=r"frequency_policies 1\.0 is broken.*not an EvictionPol"):
        load_chain({"version": 1, "tiers": [tier]})
