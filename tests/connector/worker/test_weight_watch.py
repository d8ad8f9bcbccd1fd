"""Looks at weights, one by one: what each says of the jobs of its step."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from tiers.connector.multi.multi_scheduler import WeightAgreement
from tiers.connector.worker import weight_watch
from tiers.connector.worker.weight_watch import WeightVerdict, WeightWatch
from tiers.contract.generation import Generation
from tiers.contract.messages import OffloadingConnectorMetadata, StoreJob
from tiers.contract.weight_reports import Look, Seen, WeightOrders, WeightReport, Weights


class Crossing(Look):
    """A look whose words arrive when they are let."""

    def __init__(self, shown: bytes, go: threading.Event) -> None:
        self._shown = shown
        self._go = go

    def ready(self) -> bool:
        return self._go.is_set()

    def seen(self) -> bytes:
        assert self._go.wait(30)
        if self._shown == b"failed":
            raise RuntimeError("the device failed")
        return self._shown


class Slow(Weights):
    """Weights whose looks take time, as a device's."""

    def __init__(self) -> None:
        self.shown = b"old"
        self.go = threading.Event()
        self.go.set()

    def look(self, part: int) -> Crossing:
        return Crossing(self.shown, self.go)


def step(watch: WeightWatch, tag: bytes = b"") -> WeightVerdict:
    watch.bind(WeightOrders())
    return watch.stores(tag)


def watching(weights: Slow) -> WeightWatch:
    watch = WeightWatch(weights, 1)
    watch.begin()
    return watch


def test_weights_that_were_others_in_between_are_not_believed() -> None:
    """Whoever asks first: what they computed meanwhile is in the blocks of now."""
    weights = Slow()
    watch = watching(weights)
    before = step(watch)
    weights.shown = b"new"
    between = step(watch)
    weights.shown = b"old"
    after = step(watch)
    assert [one.unchanged() for one in (after, between, before)] == [False, False, True]
    assert step(watch).unchanged() is False
    assert watch.report() == WeightReport(b"", {}) and watch.report() is None
    assert step(watch, b"next").unchanged() is True, "a generation begins with what is there"
    assert step(watch).unchanged() is False, "an order from before it began"
    assert step(watch, b"next").unchanged() is True
    weights.shown = b"newer"
    assert step(watch, b"next").unchanged() is False


def test_an_engine_that_is_reset_for_ever_remembers_the_last_generations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weight_watch, "MOST_OVER", 3)
    watch = watching(Slow())
    for number in range(9):
        assert step(watch, b"%d" % number).unchanged()
    assert len(watch._over) == 3
    for number in (5, 6, 7):
        assert not step(watch, b"%d" % number).unchanged(), "an order from before a reset"
    assert step(watch, b"8").unchanged()


@pytest.mark.timeout(30)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_waits_for_no_look(ranks: int) -> None:
    weights = Slow()
    watch = WeightWatch(weights, ranks)
    assert watch.report() is None, "nothing is looked at yet"
    watch.begin()
    weights.go.clear()
    weights.shown = b"new"
    watch.bind(WeightOrders(7, {6: True}))  # of a step that looked at nothing here
    assert watch.report() is None, "it may look yet"
    watch.stores(b"")
    assert watch.report() is None
    weights.go.set()
    seen = {7: Seen(1, unchanged=False)} if ranks == 2 else {}
    assert watch.report() == WeightReport(b"", seen)


def test_a_device_that_fails_shows_nothing() -> None:
    weights = Slow()
    watch = watching(weights)
    weights.shown = b"failed"
    assert step(watch).unchanged() is False


def test_all_tiers_of_a_step_share_a_look() -> None:
    watch = WeightWatch(Weights(), 1)
    watch.begin()
    watch.bind(WeightOrders())
    assert watch.stores(b"") is watch.stores(b"")
    assert watch.loads(b"") is not watch.stores(b""), "before the step, and after it"


class Numbered(WeightAgreement):
    """Of steps in a row."""

    def __init__(self, ranks: int, generation: Generation) -> None:
        super().__init__(ranks, generation)
        self._step = -1

    def orders(
        self, metadata: Sequence[Any], step: int = 0, is_first: bool = False
    ) -> WeightOrders:
        self._step += 1
        return super().orders(metadata, self._step, is_first)


def test_ranks_wait_for_each_other() -> None:
    generation = Generation()
    agreement = Numbered(2, generation)
    stores = OffloadingConnectorMetadata(reqs_to_store=[StoreJob(0, [])])
    weights = [Slow(), Slow()]
    ranks = [WeightWatch(one, 2) for one in weights]
    for rank in ranks:
        rank.begin()

    def run(orders: WeightOrders, looks: bool = True) -> list[WeightVerdict]:
        for rank in ranks:
            rank.bind(orders)
        return [rank.stores(b"") for rank in ranks] if looks else []

    def reports() -> WeightReport | None:
        one, two = (rank.report() for rank in ranks)
        return (one or two) if one is None or two is None else one.fold(two)

    first = run(agreement.orders([stores]))
    assert all(one.waits_for_others() for one in first) and agreement.waits
    assert not agreement.heard(reports()) and agreement.waits
    run(agreement.orders([OffloadingConnectorMetadata()]), looks=False)
    assert not agreement.waits
    assert [one.unchanged_everywhere() for one in first] == [True, True]
    assert not any(one.waits_for_others() for one in first)

    weights[1].shown = b"new"
    second = run(agreement.orders([stores]))
    assert agreement.heard(reports()), "one rank's word is enough"
    run(agreement.orders([]), looks=False)
    assert [one.unchanged_everywhere() for one in second] == [False, False]

    unlooked = agreement.orders([stores])
    run(unlooked, looks=False)
    run(agreement.orders([]), looks=False)
    assert not agreement.heard(reports())
    assert agreement.orders([]).verdicts == {unlooked.number: False}, "nobody waits for ever"

    third = run(agreement.orders([stores]))
    for _ in "two tiers":
        ranks[0].close()
    assert third[0].unchanged_everywhere() is False, "nor when the engine ends"


@pytest.mark.timeout(30)
@pytest.mark.parametrize("lost", [0, 1])
def test_nobody_waits_for_a_rank_that_a_step_never_came_to(lost: int) -> None:
    """It failed there before, and the engine goes on: that rank stores nothing any more, and so no
    later step does."""
    agreement = Numbered(2, Generation())
    stores = OffloadingConnectorMetadata(reqs_to_store=[StoreJob(0, [])])
    ranks = [WeightWatch(Weights(), 2) for _ in range(2)]
    looks = []
    for number in range(4):
        orders = agreement.orders([stores if number <= lost else OffloadingConnectorMetadata()])
        for place, rank in enumerate(ranks):
            if number == lost and place == 1:
                continue
            rank.bind(orders)
            looks += [rank.stores(b"")] if number <= lost else []
            rank.computed()
            agreement.heard(rank.report())
    assert not agreement.waits
    # What the scheduler said of an earlier look went with the lost step.
    assert [one.unchanged_everywhere() for one in looks] == [True, False] * lost + [False]
    assert [rank.may_store for rank in ranks] == [True, False]


def test_reports_fold() -> None:
    one = WeightReport(None, {1: Seen(1, True), 2: Seen(1, True)}, missed={1: 1})
    two = WeightReport(b"x", {2: Seen(1, False), 3: Seen(1, True)}, missed={1: 1, 2: 1})
    seen = {1: Seen(1, True), 2: Seen(2, False), 3: Seen(1, True)}
    assert one.fold(two) == WeightReport(b"x", seen, missed={1: 2, 2: 1})


def test_steps_that_never_came_are_reported_once() -> None:
    watch = WeightWatch(Weights(), 1)
    watch.bind(WeightOrders(step=0))
    assert watch.report() is None
    for step in (2, 5):  # the second one comes before a report
        watch.bind(WeightOrders(step=step))
    assert watch.report() == WeightReport(None, {}, missed={1: 1, 3: 1, 4: 1})
    assert watch.report() is None
