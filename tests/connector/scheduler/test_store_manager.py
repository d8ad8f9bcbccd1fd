"""How often a store is asked what it holds."""

from __future__ import annotations

import logging
import time

import pytest

from tests.support.clock import wait_for
from tiers.connector.scheduler import store_manager
from tiers.connector.scheduler.store_manager import StoreWatch
from tiers.store import Usage
from tiers.testing import MemoryStore
from tiers.wrappers.guard import Guarded

SLOW_S = 0.3


class Counting(MemoryStore):
    """Takes its time to count, for so many first times; holds a byte more each time."""

    def __init__(self, slow: int) -> None:
        super().__init__()
        self._slow, self.asked = slow, 0

    def usage(self) -> Usage:
        self.asked += 1
        if self.asked <= self._slow:
            time.sleep(SLOW_S)
        return Usage(0, self.asked, 100)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_manager, "LOOK_SECONDS", 0.01)


def test_one_slow_look_does_not_postpone_the_next() -> None:
    """As the first while an engine starts, whose threads wait for the interpreter: for half a
    minute its metrics had what the tier held before its first block."""
    watch = StoreWatch(Guarded(Counting(slow=1), "t"))
    wait_for(lambda: watch.usage.used >= 3)
    watch.close()


def test_a_store_that_is_slow_to_count_is_asked_rarely() -> None:
    store = Counting(slow=9)
    watch = StoreWatch(Guarded(store, "t"))
    wait_for(lambda: watch.usage.used == 2)
    time.sleep(2 * SLOW_S)
    assert store.asked == 2
    watch.close()


class Short(MemoryStore):
    """Warns of what it is told to."""

    trouble = ""

    def warning(self) -> str:
        return self.trouble


def test_each_trouble_of_a_store_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Of one that another follows at once, too, and of one that comes soon behind the last."""
    caplog.set_level(logging.INFO)
    healed = "it has all that its settings ask for again"
    store, said = Short(), list[str]()
    watch = StoreWatch(Guarded(store, "t"))
    for trouble in ("it is worn", "others write to it", "", "it has no room"):
        store.trouble = trouble
        said.append(f"tier 't': {trouble or healed}")
        wait_for(lambda: caplog.messages == said)
    watch.close()
