"""Connectors that load within a step: what others find of that meanwhile is not stored by ours."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bench.scheduled import Step
from tests.support.children import Tier, chain
from tests.support.fake_requests import FakeNewRequest, FakeRequest
from tiers.connector.multi.multi_connector import MultiWorkerMetadata
from tiers.lab.replay.requests import CachedRequests


class InStep(Tier):
    """Loads within the step, and writes down of which requests nothing is stored."""

    limits_requests = False

    def __init__(self) -> None:
        super().__init__()
        self.disabled: list[str] = []

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> Any:
        return self.tokens, False

    def disable_store(self, request: Any) -> None:
        self.disabled.append(request.request_id)

    def update_connector_output(self, output: Any) -> None:
        pass


class Engine:
    """Blocks of four tokens; requests of 40."""

    def __init__(self) -> None:
        self.child: Any = InStep()
        self.multi = chain(self.child, load="first")
        self.orders: list[Any] = []

    def begins(self, name: str, computed: int, table: list[int], loads: int = 0) -> FakeNewRequest:
        """A request begins with tokens that are computed, and others that are loaded."""
        request, self.child.tokens = FakeRequest(name), loads
        assert self.multi.get_num_new_matched_tokens(request, computed) == (loads, False)
        blocks: Any = SimpleNamespace(get_block_ids=lambda: (table,))
        self.multi.update_state_after_alloc(request, blocks, loads)
        return FakeNewRequest(name, computed + loads, (table,))

    def step(self, *new: FakeNewRequest, **again: tuple[int, ...]) -> list[str]:
        """New requests compute four tokens each; others go on from a token, with so many more, and
        with more blocks. Of which nothing is stored from now on."""
        tokens = {one.req_id: 4 for one in new} | {name: run[1] for name, run in again.items()}
        runs = again.values()
        more: list[Any] = [([*run[2:]],) if run[2:] else None for run in runs]
        cached = CachedRequests([*again], set(), more, [run[0] for run in runs])
        began: Any = [*new]
        step = Step(began, tokens, cached)
        self.orders.append(self.multi.build_connector_meta(step))
        disabled, self.child.disabled = self.child.disabled, []
        return sorted(set(disabled))

    def ends(self, *failed: int) -> None:
        """The results of the first step that is in flight are here."""
        number = self.orders.pop(0).step
        whole = None if number is None else MultiWorkerMetadata((None,), number)
        output: Any = SimpleNamespace(
            kv_connector_worker_meta=whole, invalid_block_ids={*failed}, finished_recving=None
        )
        self.multi.update_connector_output(output)


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_whoever_finds_them_before_it_is_known_whether_they_are_right_is_not_stored(
    engine: Engine,
) -> None:
    first = engine.begins("a", 4, [1, 2, 3, 4], 8)
    other = engine.begins("b", 12, [1, 2, 3, 5])
    before = engine.begins("c", 4, [1, 6])
    assert engine.step(first, other, before) == ["a", "b"], "the own block before is right"
    queued = engine.begins("d", 16, [1, 2, 3, 5, 7])
    assert engine.step(queued) == ["d"], "asynchronous scheduling runs ahead of results"
    engine.ends()
    engine.ends()
    assert engine.step(engine.begins("e", 16, [1, 2, 3, 5, 8])) == [], "all are right"
    assert engine.orders[-1].step is None, "there is nothing to hear"


def test_what_failed_and_what_was_computed_behind_it_stays_in_doubt_until_it_is_computed_anew(
    engine: Engine,
) -> None:
    engine.step(engine.begins("a", 0, [1, 2, 3, 4], 12), engine.begins("b", 12, [1, 2, 3, 5]))
    engine.ends(2)
    assert engine.step(engine.begins("c", 4, [1, 6])) == [], "what precedes it is right"
    engine.ends()
    assert engine.step(engine.begins("d", 12, [1, 2, 3, 7]), a=(4, 4)) == ["d"], "2 is right, 3 not"
    engine.ends()
    assert engine.step(engine.begins("e", 8, [1, 2, 8])) == []
    engine.ends()
    assert engine.step(engine.begins("f", 16, [1, 2, 3, 5, 9]), a=(8, 8)) == ["f"]
    engine.ends()
    assert engine.step(engine.begins("g", 16, [1, 2, 3, 4, 10])) == []
    assert engine.step(engine.begins("h", 16, [1, 2, 3, 5, 11])) == ["h"], "b's is wrong yet"


def test_what_is_queued_behind_a_failed_load_stays_in_doubt_whatever_its_own_step_reports(
    engine: Engine,
) -> None:
    engine.step(engine.begins("a", 0, [1, 2, 3, 4], 12))
    engine.step(engine.begins("b", 12, [1, 2, 3, 5]))
    engine.ends(2)
    engine.ends()
    engine.step(a=(4, 12))
    assert engine.step(engine.begins("c", 16, [1, 2, 3, 5, *range(20, 26)])) == ["c"]
    engine.ends()
    engine.ends()
    assert engine.step(c=(40, 4, 7)) == ["c"], "it answers"
    engine.ends()
    engine.step(engine.begins("other", 0, [9]))
    engine.ends()
    assert engine.step(engine.begins("d", 24, [1, 2, 3, 4, 8, 7])) == ["d"]


def test_what_is_computed_anew_is_right_within_that_step(engine: Engine) -> None:
    engine.step(engine.begins("a", 0, [1, 2, 3, 4], 12), engine.begins("b", 12, [1, 2, 3, 5]))
    engine.ends(2)
    assert engine.step(a=(4, 12), b=(12, 4)) == []
    engine.ends()
    assert engine.step(engine.begins("c", 16, [1, 2, 3, 5, 6])) == []


def test_what_windows_reach_of_it_is_in_doubt_too(engine: Engine) -> None:
    """The engine's table has the null block for those that no window reaches."""
    first = engine.begins("a", 0, [1, 2, 3, 4], 12)
    second = engine.begins("b", 16, [0, 0, 0, 4, 5])
    third = engine.begins("c", 20, [0, 0, 0, 0, 5, 6])
    assert engine.step(first, second, third) == ["a", "b", "c"]
    engine.ends(1)
    assert engine.step(engine.begins("g", 20, [0, 0, 0, 0, 5, 12])) == ["g"]
    assert engine.step(engine.begins("d", 0, [0, 5, 7], 8)) == ["d"], "another block now"
    assert engine.step(engine.begins("e", 12, [0, 8, 9, 10])) == [], "the null block is none"
    for _ in range(3):
        engine.ends()
    assert engine.step(engine.begins("f", 8, [0, 5, 11])) == []


def test_blocks_that_are_given_to_others_are_right(engine: Engine) -> None:
    engine.step(engine.begins("a", 0, [1, 2, 3, 4], 12))
    engine.ends(1, 2)
    assert engine.step(engine.begins("b", 0, [1, 2])) == []
    engine.begins("c", 0, [3, 4])  # a load beside the steps, say
    assert engine.step(engine.begins("d", 4, [1, 5]), engine.begins("e", 8, [3, 4, 6])) == []
