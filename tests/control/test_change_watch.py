"""The verdict on a change: by how much more or less the tiers save, and back where it is less."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import Mock

import pytest
from pydantic import ValidationError

from spec.chain import ChainSpec
from spec.chain_diff import ChainDiff
from tests.support.changing import change, changes_of, finish, running
from tests.support.clock import Clock
from tests.support.replay import ReplayEngine
from tests.support.replay_chains import chain_of, cpu, disk
from tests.support.topologies import wait_until
from tiers.connector.multi import changes as multi_changes
from tiers.connector.multi.changes import PendingChange
from tiers.connector.scheduler.offloading_scheduler import OffloadingScheduler
from tiers.contract.stats import CHAIN, TierStats
from tiers.control.change_verbs import KEPT, ChangeVerbs
from tiers.control.change_watch import PARTS, ChangeWatch, Saved, compare, describe
from tiers.control.control_server import QuestionRefused
from tiers.control.status_board import StatusBoard


def parts(rate: float, spread: float, count: int = PARTS, seed: int = 1) -> list[Saved]:
    """Parts of some thousand tokens each, in which `rate` seconds are saved for a thousand."""
    draw = random.Random(seed)
    tokens = [draw.uniform(1000, 5000) for _ in range(count)]
    return [Saved(n, n / 1000 * (rate + draw.gauss(0, spread))) for n in tokens]


@pytest.mark.parametrize(
    ("before", "after", "outcome"),
    [
        (parts(0.3, 0.05), parts(0.2, 0.05, seed=2), "worse"),
        (parts(0.3, 0.05), parts(0.4, 0.05, seed=2), "better"),
        (parts(0.3, 0.05), parts(0.3, 0.05, seed=2), "same"),
        (parts(0.3, 0.4), parts(0.25, 0.4), "same"),
        (parts(0.0, 0.01), parts(-0.2, 0.01, seed=2), "worse"),
        (parts(0.3, 0.0), parts(0.3, 0.0, 4), "too little"),
        ([Saved(0, 0)] * PARTS, parts(0.3, 0.0), "too little"),
    ],
)
def test_the_verdict_is_by_what_varies(
    before: Sequence[Saved], after: Sequence[Saved], outcome: str
) -> None:
    assert compare(before, after).outcome == outcome


def test_chance_alone_is_called_a_difference_seldom() -> None:
    """Of changes that change nothing, one in twenty at most, as the margin says; here of 400."""
    verdicts = [
        compare(parts(0.3, 0.3, seed=2 * n), parts(0.3, 0.3, 15, seed=2 * n + 1)).outcome
        for n in range(400)
    ]
    assert verdicts.count("same") > 360


def test_a_margin_is_two_standard_errors_of_both_ratios() -> None:
    """Of five parts with 500 tokens in all, whose squares add up to 2: (2 * 5/4) ** 0.5 / 500."""
    few = [Saved(100.0, seconds) for seconds in (1.0, 2.0, 3.0, 2.0, 2.0)]
    found = compare(few, [*few, Saved(0.0, 0.0)])
    assert found.margin == pytest.approx(1000 * 2 * 2**0.5 * 2.5**0.5 / 500)
    assert found.before == found.after == pytest.approx(20.0)


class History:
    """What was saved, as a test wants it."""

    def __init__(self, before: float, after: float) -> None:
        self.began = time.monotonic()
        self.rates = before, after

    def saved(self, since: float, until: float, parts_of_it: int) -> list[Saved]:
        return parts(self.rates[since >= self.began], 0.01, parts_of_it)


def watch(engine: ReplayEngine, watched: ChangeWatch) -> None:
    """Step until the verdict is there."""
    until = time.monotonic() + 30
    while watched.verdict.outcome == "watching" and time.monotonic() < until:
        if not engine.step():
            time.sleep(0.001)


@pytest.mark.parametrize(("after", "outcome"), [(0.1, "worse"), (0.5, "better"), (0.3, "same")])
def test_a_change_for_the_worse_is_taken_back(tmp_path: Path, after: float, outcome: str) -> None:
    old, new = chain_of(cpu(), disk(tmp_path)), chain_of(disk(tmp_path), cpu())
    with running(old) as engine:
        history = History(0.3, after)
        watched = ChangeWatch(changes_of(engine), history.saved, change(engine, new), seconds=0.4)
        watch(engine, watched)
        assert watched.verdict.outcome == outcome
        assert watched.verdict.went_back == (outcome == "worse")
        in_effect = changes_of(engine).chain
        assert in_effect == (old if outcome == "worse" else new)


def test_a_change_for_the_worse_takes_none_along_that_came_while_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = chain_of(cpu(), disk(tmp_path)), chain_of(disk(tmp_path), cpu())
    paused = chain_of(cpu(paused="reads"), disk(tmp_path))
    with running(old) as engine:
        changes, history = changes_of(engine), History(0.3, 0.1)
        verbs, request = ChangeVerbs(changes, history.saved), changes.request

        def late(chain: ChainSpec, if_version: int | None = None) -> PendingChange:
            monkeypatch.setattr(changes, "request", request)
            change(engine, paused)
            return request(chain, if_version)

        monkeypatch.setattr(changes, "request", late)
        verbs.apply({"chain": new.model_dump(mode="json", by_alias=True), "watch": 0.4})
        ((_, watched),) = verbs._asked.values()
        assert watched is not None
        watch(engine, watched)
        assert watched.verdict.went_back and changes.chain == paused


@pytest.mark.parametrize("is_in_part", [True, False])
@pytest.mark.parametrize("other", [False, True])
def test_a_change_is_taken_back_once_its_tier_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_in_part: bool, other: bool
) -> None:
    """Unless another change comes first, which is said at once."""
    old, new = (chain_of(cpu(), disk(tmp_path, durability=how)) for how in ("batch", "sync"))
    new = new if is_in_part else chain_of(cpu())
    with running(old) as engine:
        changes = changes_of(engine)
        with monkeypatch.context() as busy:
            busy.setattr(OffloadingScheduler, "jobs_in_flight", 1)
            busy.setattr(multi_changes, "DRAIN_SECONDS", 0.0)
            review = Mock(side_effect=changes.review)
            monkeypatch.setattr(changes, "review", review)
            pending = change(engine, new)
            assert pending.in_part == is_in_part and changes.chain == chain_of(cpu())
            reviews = review.call_count
            watched = ChangeWatch(changes, History(0.3, 0.1).saved, pending, seconds=0.4)
            wait_until(lambda: review.call_count > reviews)
            assert watched.verdict.outcome == "watching"
            if other:
                newest = chain_of(cpu(), max_wait="5s")
                change(engine, newest)
                watch(engine, watched)
                assert "another change came" in watched.verdict.why_not_back
                assert changes.chain == newest
                return
        watch(engine, watched)
        verdict = watched.verdict
        assert verdict.outcome == "worse" and verdict.went_back and changes.chain == old
        assert ("made in part" in describe(verdict)) == is_in_part


def test_another_change_ends_the_watch(tmp_path: Path) -> None:
    old, new = chain_of(cpu(), disk(tmp_path)), chain_of(disk(tmp_path), cpu())
    with running(old) as engine:
        history = History(0.3, 0.1)
        watched = ChangeWatch(changes_of(engine), history.saved, change(engine, new), seconds=0.4)
        newest = new.model_copy(update={"max_wait": 5.0})
        change(engine, newest)
        watch(engine, watched)
        assert watched.verdict.outcome == "another change"
        assert changes_of(engine).chain == newest


def test_a_pause_takes_no_change_back_that_came_while_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(chain_of(cpu(), disk(tmp_path))) as engine:
        changes, other = changes_of(engine), chain_of(disk(tmp_path), cpu())
        verbs, review = ChangeVerbs(changes, History(0.3, 0.3).saved), changes.review

        def late(chain: ChainSpec) -> ChainDiff:
            monkeypatch.setattr(changes, "review", review)
            change(engine, other)
            return review(chain)

        monkeypatch.setattr(changes, "review", late)
        assert "another change came" in verbs.pause({"tier": "cpu", "paused": "both"})["why"]
        assert changes.chain == other


def test_each_change_that_is_watched_has_its_verdict(tmp_path: Path) -> None:
    """Also for whoever asked before another: `kvtiers apply --watch` waits for it."""
    chains = [chain_of(cpu(), disk(tmp_path), max_wait=seconds) for seconds in ("7s", "8s", "9s")]
    with running(chains[0]) as engine:
        verbs = ChangeVerbs(changes_of(engine), History(0.3, 0.5).saved)

        def apply(chain: ChainSpec, seconds: float) -> int:
            asked = verbs.apply({"chain": chain.model_dump(mode="json"), "watch": seconds})
            engine.step()
            return int(asked["change"])

        def outcome(number: int) -> str:
            return str(verbs.change({"change": number})["verdict"]["outcome"])

        first = apply(chains[1], 0.4)
        second = apply(chains[2], 60.0)
        wait_until(lambda: outcome(first) == "another change")
        for _ in range(KEPT):
            assert verbs.pause({"tier": "cpu"})["over"], "nothing has changed"
        assert outcome(second) == "watching"
        same = verbs.apply({"chain": chains[2].model_dump(mode="json"), "watch": 60.0})
        assert same["over"] and "verdict" not in same, "nothing has changed"
        with pytest.raises(QuestionRefused, match="can't take this chain: chain: tiers: found"):
            verbs.apply({"chain": {"version": 1}})
        verbs.close()
        watches = [watched for _, watched in verbs._asked.values() if watched is not None]
        assert watches and all(watched._stop.is_set() for watched in watches)


@pytest.mark.parametrize("refused", ["", "rank 0: no room"])
def test_what_is_compared_leaves_out_the_change_itself(tmp_path: Path, refused: str) -> None:
    """And the time in which a tier that came is empty; nothing where it was refused."""
    old, spans = chain_of(cpu(), disk(tmp_path)), list[tuple[float, float]]()
    pending, going_back = PendingChange(), PendingChange()
    pending.before = old
    going_back.end(3, "another change came")
    changes = Mock(version=2, request=Mock(return_value=going_back))
    changes.review.return_value.refused = ("no rank has room for it",)

    def saved(since: float, until: float, count: int) -> list[Saved]:
        spans.append((since, until))
        return parts(0.3 if len(spans) == 1 else 0.1, 0.01, count)

    asked = time.monotonic()
    watched = ChangeWatch(changes, saved, pending, seconds=0.4)
    time.sleep(0.5)
    pending.end(2, refused)
    ended = time.monotonic()
    wait_until(lambda: watched.verdict.outcome != "watching")
    if refused:
        assert watched.verdict.outcome == "not applied" and not spans
        return
    before, after = spans
    assert asked - 0.4 <= before[0] and before[1] < ended - 0.1
    assert ended + 0.1 <= after[0] and after[1] - after[0] == pytest.approx(0.3)
    assert watched.verdict.why_not_back == "another change came" and not watched.verdict.went_back
    changes.request.assert_called_once_with(old, 2)


def test_a_change_can_be_asked_for_and_withdrawn_by_its_number(tmp_path: Path) -> None:
    old, new = chain_of(cpu(), disk(tmp_path)), chain_of(disk(tmp_path), cpu())
    with running(old) as engine:
        verbs = ChangeVerbs(changes_of(engine), History(0.3, 0.3).saved)
        number = verbs.apply({"chain": new.model_dump(mode="json")})["change"]
        assert not verbs.change({"change": number})["over"]
        found = verbs.change({"change": number, "withdraw": True})
        assert found["over"] and "no step" in found["why"]
        for later in range(1, KEPT):
            assert verbs.pause({"tier": "cpu"})["change"] == number + later
        assert "no step" in verbs.change({"change": number})["why"]
        verbs.pause({"tier": "cpu"})
        for gone in ({"change": number}, {"change": "0"}):
            with pytest.raises((QuestionRefused, ValidationError)):
                verbs.change(gone)
        with pytest.raises(QuestionRefused, match="no tier is called 'dsik'; use one of cpu, disk"):
            verbs.pause({"tier": "dsik", "paused": "both"})


def test_a_change_that_ends_while_it_is_asked_for_has_its_own_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = chain_of(cpu(), disk(tmp_path)), chain_of(disk(tmp_path), cpu())
    with running(old) as engine:
        verbs = ChangeVerbs(changes_of(engine), History(0.3, 0.3).saved)
        number = verbs.apply({"chain": new.model_dump(mode="json")})["change"]
        wait = PendingChange.wait

        def late(pending: PendingChange, seconds: float) -> bool:
            monkeypatch.setattr(PendingChange, "wait", wait)
            finish(engine, pending)
            return True

        monkeypatch.setattr(PendingChange, "wait", late)
        found = verbs.change({"change": number})
        assert found["over"] and found["version"] == changes_of(engine).version == 2


def test_what_was_saved_is_that_of_each_part(tmp_path: Path) -> None:
    chain = chain_of(cpu())
    clock = Clock()
    with running(chain, ranks=1) as engine:
        assert engine.connector is not None
        board = StatusBoard(engine.connector, clock)
        began = clock.now
        for number in range(60):
            clock.now += 10
            of_tenant = {"tenant_prefill_seconds": 3.0, "tenant_load_seconds": 1.0}
            if number >= 30:
                of_tenant["tenant_prefill_seconds"] = 5.0
            stats = {"tenant (other)": of_tenant, CHAIN: {"prompt_tokens": 500.0}}
            board.measured({"": TierStats({name: dict(m) for name, m in stats.items()})})
        halves = [Saved(5000.0, 20.0)] * 2 + [Saved(5000.0, 40.0)] * 2
        assert board.saved(began + 100, began + 500, 4) == halves
        for _ in range(8000):  # steps that follow each other fast
            clock.now += 0.001
            board.measured({})
        assert board.saved(began + 100, began + 500, 4) == halves
        assert len(board.saved(began - 300, began + 300, 6)) == 3, "before the start is nothing"
