"""RepeatedLog: said once, then summed up each minute; nothing is lost, nothing told twice."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from tiers.concurrency.repeated_log import MINUTE, RepeatedLog

logger = logging.getLogger(__name__)


class Minutes:
    """What is to be done later; a minute passes when told."""

    def __init__(self) -> None:
        self.due: list[Callable[[], None]] = []

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        assert seconds == MINUTE
        self.due.append(call)

    def passes(self) -> None:
        due, self.due = self.due, []
        for call in due:
            call()


@pytest.fixture
def minutes() -> Minutes:
    return Minutes()


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = caplog.messages
    caplog.clear()
    return lines


def test_events_are_said_once_then_summed_up_until_they_end(
    minutes: Minutes, caplog: pytest.LogCaptureFixture
) -> None:
    log = RepeatedLog(logger, "tier 'disk'", "blocks were damaged", later=minutes.later)
    for _ in range(3):
        log.log("a block was %s", "damaged", count=2)
    assert said(caplog) == ["a block was damaged"]
    minutes.passes()
    assert said(caplog) == ["tier 'disk': 4 more blocks were damaged in the last minute"]
    log.log("a block was %s", "damaged")
    assert said(caplog) == [], "the storm is not over"
    minutes.passes()
    assert said(caplog) == ["tier 'disk': 1 more blocks were damaged in the last minute"]
    minutes.passes()
    assert (said(caplog), minutes.due) == ([], []), "nothing runs on where nothing happens"
    log.log("a block was %s", "damaged")
    assert said(caplog) == ["a block was damaged"]


def test_a_sum_tells_how_things_are_then(
    minutes: Minutes, caplog: pytest.LogCaptureFixture
) -> None:
    state = ["; they are down now"]
    log = RepeatedLog(
        logger, "tier x", "changes", at_once=2, state=lambda: state[0], later=minutes.later
    )
    for event in ("down", "up", "down", "up"):
        log.log(event)
    assert said(caplog) == ["down", "up"]
    state[0] = "; they are up now"
    minutes.passes()
    assert said(caplog) == ["tier x: 2 more changes in the last minute; they are up now"]


def test_without_a_thread_to_sum_up_each_event_is_said(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(seconds: float, call: Callable[[], None]) -> None:
        raise RuntimeError("can't start new thread")

    log = RepeatedLog(logger, "tier x", "events", later=refuse)
    log.log("one")
    log.log("two")
    assert said(caplog) == ["one", "two"]
