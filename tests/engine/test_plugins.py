"""Plugins' tiers in the replay engine: what they do wrong costs hits, never an answer or a step."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from spec.chain import ChainSpec
from spec.offloading import StoreContext, StoreSpec
from tests.support.replay import ReplayEngine, answer
from tests.support.replay_chains import MODEL, SLOT, cpu, measured
from tests.support.slow_store import LONG, ask
from tiers.block import HEADER_BYTES
from tiers.cpu.spec import CpuSpec
from tiers.errors import TierNotOpen
from tiers.store import Block
from tiers.wrappers import guard as guarding

ROOT = Path(__file__).parents[2]

HANG = threading.Event()
"""Set when the test is over."""


class Store:
    """A store in a dict, which no other process sees."""

    def __init__(self) -> None:
        self.payloads: dict[bytes, bytes] = {}

    def has(self, keys: Sequence[bytes]) -> Any:
        return [key in self.payloads for key in keys]

    def put(self, blocks: Sequence[Block]) -> Any:
        self.payloads.update((block.key, bytes(block.payload)) for block in blocks)
        return [True] * len(blocks)

    def get(self, blocks: Sequence[Block]) -> Any:
        for key, payload in blocks:
            payload[:] = self.payloads[key]
        return [True] * len(blocks)

    def drop(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.payloads.pop(key, None)

    def close(self) -> None:
        pass


class PluginSpec(StoreSpec):
    def open(self, site: StoreContext) -> Any:
        return MAKE[0]()


CLOSE_SECONDS = guarding.CLOSE_SECONDS
MAKE: list[Callable[[], object]] = [Store]


@pytest.fixture(autouse=True)
def _let_go(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(guarding, "CLOSE_SECONDS", 0.2)
    HANG.clear()
    yield
    HANG.set()


def chain(*more: Any, **settings: Any) -> ChainSpec:
    tier = PluginSpec.model_validate({"type": "plugin", "deadline": "200ms", **settings})
    tiers = (tier, *more)
    made = ChainSpec(version=1, load_when="always", tiers=tiers, staging=256 * SLOT)
    return made.model_copy(update={"max_wait": 0.4})


def shared() -> None:
    """Let both halves of the engine have one store."""
    made = MAKE[0]()
    MAKE[:] = [lambda: made]


@pytest.mark.fault
def test_a_store_of_which_nothing_is_ever_found_says_so_once(
    engine: Callable[..., ReplayEngine], caplog: pytest.LogCaptureFixture
) -> None:
    MAKE[:] = [Store]
    made = engine(chain(deadline="30s"), num_blocks=120, prefix_caching=False)
    for _ in range(3):
        ask(made)
        made.settle()
    assert measured(made, "loaded_tokens", "plugin") == 0
    said = [line for line in caplog.messages if "open the store separately" in line]
    assert len(said) == 1 and "plugin (package tests)" in said[0]


class Staying(Store):
    def close(self) -> None:
        HANG.wait()


@pytest.mark.fault
def test_a_close_that_hangs_holds_an_engine_half_a_minute_at_most(
    engine: Callable[..., ReplayEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here each second is a tenth. Both halves wait for it, one behind the other."""
    monkeypatch.setattr(guarding, "CLOSE_SECONDS", CLOSE_SECONDS / 10)
    MAKE[:] = [Staying]
    made = engine(chain(), num_blocks=120, prefix_caching=False)
    ask(made)
    made.settle()
    began = time.monotonic()
    made.close()
    assert 2.5 < time.monotonic() - began < 4


class Cutting(Store):
    """It keeps a part of each block, and finds that out."""

    def put(self, blocks: Sequence[Block]) -> Any:
        self.payloads.update((block.key, bytes(block.payload[:-1])) for block in blocks)
        return [True] * len(blocks)

    def get(self, blocks: Sequence[Block]) -> Any:
        return [len(self.payloads[key]) == len(payload) for key, payload in blocks]


class Empty(Store):
    """It keeps nothing, and says that it has everything."""

    def has(self, keys: Sequence[bytes]) -> Any:
        return [True] * len(keys)

    def get(self, blocks: Sequence[Block]) -> Any:
        return [False] * len(blocks)


@pytest.mark.fault
@pytest.mark.parametrize("kind", [Cutting, Empty])
def test_a_store_of_which_nothing_is_ever_loaded_says_so_once(
    kind: type[Store], engine: Callable[..., ReplayEngine], caplog: pytest.LogCaptureFixture
) -> None:
    MAKE[:] = [kind]
    shared()
    made = engine(chain(deadline="30s"), num_blocks=120, prefix_caching=False)
    for _ in range(10):
        ask(made)
        made.settle()
    assert measured(made, "loaded_tokens", "plugin") == 0
    said = [line for line in caplog.messages if "none of the" in line]
    assert len(said) == 1 and "plugin (package tests)" in said[0] and "kvtiers check" in said[0]


def test_a_store_of_which_something_is_found_says_nothing(
    engine: Callable[..., ReplayEngine], caplog: pytest.LogCaptureFixture
) -> None:
    MAKE[:] = [Store]
    shared()
    made = engine(chain(deadline="30s"), num_blocks=120, prefix_caching=False)
    for number in range(3):
        ask(made)
        made.settle()
        ask(made, [number, *LONG[:80]])
    assert measured(made, "loaded_tokens", "plugin") > 0
    assert not [line for line in caplog.messages if "none of the" in line]


@pytest.mark.fault
def test_a_rank_that_is_late_does_not_end_the_tier(engine: Callable[..., ReplayEngine]) -> None:
    made_one, tries = Store(), iter(range(1000))

    def opens() -> Store:
        if next(tries) in (1, 2):  # the second of two workers
            raise TierNotOpen("another process holds the lock")
        return made_one

    MAKE[:] = [opens]
    made = engine(chain(deadline="30s"), num_blocks=120, prefix_caching=False, world_size=2)
    while not measured(made, "loaded_tokens", "plugin"):
        request = made.generate(list(LONG), 4)
        assert request.output == answer(MODEL, list(LONG), 4, 2)
        made.settle()


class SaysSpec(PluginSpec):
    """Says that its stores verify, and does not show it."""

    verifies = True


@pytest.mark.fault
def test_flipped_bits_of_a_store_that_says_it_verifies_are_misses(
    engine: Callable[..., ReplayEngine],
) -> None:
    MAKE[:] = [Store]
    shared()
    tier = SaysSpec.model_validate({"type": "plugin", "deadline": "30s"})
    spec = ChainSpec(version=1, load_when="always", tiers=(tier,), staging=256 * SLOT)
    made = engine(spec, num_blocks=120, prefix_caching=False)
    ask(made)
    made.settle()
    store: Any = MAKE[0]()
    for key, kept in store.payloads.items():
        place = HEADER_BYTES + 100
        store.payloads[key] = kept[:place] + bytes([kept[place] ^ 1]) + kept[place + 1 :]
    ask(made)
    assert measured(made, "damaged_blocks", "plugin") > 0


def hangs(*args: object) -> Any:
    HANG.wait()


def exits(*args: object) -> Any:
    raise SystemExit("a plugin exits")


@pytest.mark.fault
@pytest.mark.parametrize("wrong", [hangs, exits])
@pytest.mark.parametrize("verbs", [("peek",), ("touch",), ("has",), ("peek", "close")])
def test_a_verb_that_hangs_or_exits_stops_nobody(
    engine: Callable[..., ReplayEngine], verbs: tuple[str, ...], wrong: Callable[..., Any]
) -> None:
    MAKE[:] = [type("Odd", (Store,), dict.fromkeys(verbs, wrong))]
    shared()
    below = CpuSpec.model_validate(cpu(400))
    made = engine(chain(below), num_blocks=120, prefix_caching=False)
    for _ in range(2):
        ask(made)
        made.settle()
    ask(made)
    served = sum(measured(made, "loaded_tokens", tier) for tier in ("plugin", "cpu"))
    assert served >= 100, "something serves"


HUNG = """
from tests.engine import test_plugins as plugins
plugins.hang_in_each_verb()
print("ends", flush=True)
"""


def hang_in_each_verb() -> None:
    """For a process of its own: engines whose store hangs in one verb, which nobody closes."""
    for verb in ("has", "get", "put", "touch"):
        begun = threading.Event()

        def hang(*args: object, begun: threading.Event = begun) -> Any:
            begun.set()
            HANG.wait()

        MAKE[:] = [type("Hung", (Store,), {"touch": lambda *_: None, verb: hang})]
        shared()
        made = ReplayEngine(chain(), MODEL, num_blocks=120, prefix_caching=False)
        while not begun.is_set():
            ask(made)
        print(verb, flush=True)


@pytest.mark.fault
def test_a_process_ends_though_verbs_hang() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HUNG], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["has", "get", "put", "touch", "ends"], done.stderr
    assert done.returncode == 0, done.stderr
