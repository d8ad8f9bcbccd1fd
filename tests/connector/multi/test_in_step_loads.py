"""Connectors that load within a step: what others find of that meanwhile is not stored by ours."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from bench.scheduled import Step
from tests.support.children import Tier
from tests.support.fake_requests import FakeNewRequest, FakeRequest
from tiers.connector.multi.multi_connector import MultiWorkerMetadata
from tiers.connector.multi.multi_scheduler import MultiScheduler, MultiSettings
from tiers.connector.policy.request_table import RequestTable
from tiers.contract.engine_info import EngineInfo
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
    """Blocks of four tokens, and hashes of what a request had that goes on after its answer."""

    def __init__(self) -> None:
        self.child: Any = InStep()
        info = EngineInfo({}, 4, 4, 0, caches_prefixes=False, goes_on_right=False)
        requests = RequestTable(info)
        children: list[Any] = [self.child]
        self.multi = MultiScheduler(children, settings=MultiSettings(requests=requests))
        self.orders: list[Any] = []

    def begins(
        self,
        name: str,
        computed: int,
        table: list[int],
        loads: int = 0,
        prompt: int = 40,
        goes_on: bool = False,
    ) -> FakeNewRequest:
        """A request begins with tokens that are computed, and others that are loaded."""
        request: Any = FakeRequest(name, prompt)
        request.resumable, self.child.tokens = goes_on, loads
        assert self.multi.get_num_new_matched_tokens(request, computed) == (loads, False)
        blocks: Any = SimpleNamespace(get_block_ids=lambda: (table,))
        self.multi.update_state_after_alloc(request, blocks, loads)
        return FakeNewRequest(name, computed + loads, (table,))

    def step(
        self, *new: FakeNewRequest, copied: tuple[int, int] | None = None, **again: tuple[int, ...]
    ) -> list[str]:
        """New requests compute four tokens each; others go on from a token, with so many more, and
        with more blocks. Of which nothing is stored from now on."""
        tokens = {one.req_id: 4 for one in new} | {name: run[1] for name, run in again.items()}
        runs = again.values()
        more: list[Any] = [([*run[2:]],) if run[2:] else None for run in runs]
        cached = CachedRequests([*again], set(), more, [run[0] for run in runs])
        began: Any = [*new]
        step = Step(began, tokens, cached)
        if copied:
            pair = SimpleNamespace(src_block_id=copied[0], dst_block_id=copied[1])
            vars(step)["kv_cache_block_copies"] = [pair]
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


def test_what_failed_and_what_was_computed_behind_it_stays_in_doubt_until_it_is_given_anew(
    engine: Engine,
) -> None:
    """Also once it is computed again, which may end before, or go on in the middle of a block."""
    engine.step(engine.begins("a", 0, [1, 2, 3, 4], 12), engine.begins("b", 12, [1, 2, 3, 5]))
    engine.ends(2)
    assert engine.step(engine.begins("c", 4, [1, 6])) == [], "what precedes it is right"
    engine.ends()
    assert engine.step(engine.begins("d", 12, [1, 2, 3, 7]), a=(4, 4)) == ["a", "d"], "3 is not"
    engine.ends()
    assert engine.step(a=(8, 8), b=(14, 2)) == ["a", "b"]
    engine.ends()
    assert engine.step(engine.begins("f", 16, [1, 2, 3, 5, 9])) == ["f"]
    engine.ends()
    assert engine.step(engine.begins("g", 0, [2, 3, 5])) == [], "they are its own"
    assert engine.step(engine.begins("h", 12, [2, 3, 5, 10]), c=(8, 4, 4)) == []
    assert engine.step(engine.begins("i", 12, [1, 6, 4, 11])) == [], "as was the fourth"


def test_a_step_is_judged_by_what_failed_before_it_whenever_it_is_heard(engine: Engine) -> None:
    """What failed is being computed again by then."""
    engine.step(engine.begins("a", 0, [1, 2, 3, 4], 12))
    engine.step(engine.begins("b", 12, [1, 2, 3, 5]))
    engine.ends(2)
    engine.step(a=(4, 12))
    engine.ends()
    assert engine.step(engine.begins("c", 16, [1, 2, 3, 5, 6])) == ["c"]


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


@pytest.mark.parametrize("fails", [True, False])
def test_a_copy_of_a_part_is_as_wrong_as_what_it_was_copied_from(
    engine: Engine, fails: bool
) -> None:
    engine.step(engine.begins("a", 0, [1, 2, 3], 8))
    assert engine.step(engine.begins("b", 0, [5, 6], 0), copied=(2, 5)) == ["b"]
    engine.ends(*[2] * fails)
    assert engine.step(engine.begins("c", 0, [7, 8]), copied=(2, 7)) == ["c"], "b's is not heard"
    engine.ends()
    engine.ends()
    assert engine.step(engine.begins("d", 4, [5, 9])) == ["d"] * fails
    assert engine.step(engine.begins("e", 4, [7, 10])) == ["e"] * fails
    assert engine.step(engine.begins("f", 0, [11, 12]), copied=(2, 11)) == ["f"] * fails


def test_blocks_that_are_given_to_others_are_right(engine: Engine) -> None:
    engine.step(engine.begins("a", 0, [1, 2, 3, 4], 12))
    engine.ends(1, 2)
    assert engine.step(engine.begins("b", 0, [1, 2])) == []
    engine.begins("c", 0, [3, 4])  # a load beside the steps, say
    assert engine.step(engine.begins("d", 4, [1, 5]), engine.begins("e", 8, [3, 4, 6])) == []


def test_what_was_computed_behind_the_first_turn_of_what_goes_on_has_hashes_of_other_tokens(
    engine: Engine,
) -> None:
    """The engine has them found from when it gives them, by parts too, and after the end. What
    precedes them is right."""
    goes_on = engine.begins("a", 0, [1, 2, 3], prompt=8, goes_on=True)
    assert "b" in engine.step(goes_on, engine.begins("b", 12, [1, 2, 3, 4]))
    assert engine.step(engine.begins("c", 8, [1, 2, 5])) == [], "it had the same system prompt"
    engine.step(a=(13, 1, 6))
    assert engine.step(engine.begins("d", 8, [1, 2, 7]), copied=(6, 7)) == ["d"]
    engine.multi.request_finished(FakeRequest("a"), [])
    assert engine.step(engine.begins("e", 16, [1, 2, 3, 6, 8])) == ["e"]
    while engine.orders:
        engine.ends()
    assert engine.step(engine.begins("f", 20, [1, 2, 3, 6, 8, 9])) == ["f"], "behind them"
    assert engine.step(engine.begins("g", 8, [1, 2, 3])) == [], "it is given anew"
    assert engine.step(engine.begins("h", 12, [1, 2, 3, 10])) == []
    assert engine.step(engine.begins("i", 12, [1, 2, 4, 11])) == ["i"], "b's is not"


def test_what_is_behind_a_wrong_block_stays_so_when_that_is_given_anew(engine: Engine) -> None:
    """As one behind a window, before its step is heard."""
    engine.step(engine.begins("a", 0, [1, 2], prompt=4, goes_on=True))
    engine.step(engine.begins("b", 8, [1, 2, 3]))
    assert engine.step(engine.begins("c", 0, [2]), b=(12, 4, 4)) == ["b"]
    for _ in range(3):
        engine.ends()
    assert engine.step(engine.begins("d", 16, [0, 0, 3, 4, 5])) == ["d"]
    assert engine.step(engine.begins("e", 4, [2, 6])) == []


# -- against an engine that knows what is right --------------------------------------------------

POOL = 18


class Drawn:
    """A drawn course of an engine that caches prefixes of blocks, some of which are loaded within a
    step, or are of a request that goes on after its answer; it knows what each holds. `ahead`:
    steps in flight."""

    def __init__(self, seed: int, ahead: int) -> None:
        self.random, self.ahead = Random(seed), ahead
        self.engine = Engine()
        self.free = [*range(1, POOL + 1)]
        """The least recently used first; what they hold is found until they are given away."""
        self.cached: dict[tuple[int, ...], int] = {}
        self.paths: dict[int, tuple[int, ...]] = {}
        self.is_right: dict[int, bool] = {}
        self.running: dict[str, tuple[tuple[int, ...], list[int]]] = {}
        self.done: dict[str, int] = {}
        """Blocks that are computed, or will be by the steps in flight."""
        self.barred: set[str] = set()
        self.sure: dict[str, int] = {}
        """Blocks of the first turn, of those that go on."""
        self.begun = 0
        self.checked = 0
        self.steps: list[tuple[dict[int, bool], list[tuple[list[int], int, bool, bool]]]] = []

    def take(self, path: tuple[int, ...]) -> int:
        block: int = self.free.pop(0)
        self.cached.pop(self.paths.pop(block, ()), None)
        if path not in self.cached:
            self.cached[path], self.paths[block] = block, path
        return block

    def step(self) -> None:
        new, again, ran = [], dict[str, tuple[int, ...]](), list[tuple[str, list[int], int]]()
        loaded: dict[int, bool] = {}
        for name, (path, table) in self.running.items():
            if (at := self.done[name]) < len(path) and self.free and self.random.random() < 0.7:
                more = [self.take(path[: at + 1])] if at == len(table) else []
                table += more
                again[name] = (4 * at, 4, *more)
                ran.append((name, table, at))
        if self.random.random() < 0.7 and len(self.free) > 6:
            path = tuple(self.random.randint(0, 1) for _ in range(self.random.randint(3, 6)))
            found = 0
            while found < len(path) - 1 and path[: found + 1] in self.cached:
                found += 1
            loads = self.random.choice((0, self.random.randint(0, len(path) - 1 - found)))
            if goes_on := self.random.random() < 0.2:
                loads = 0
            table = [self.cached[path[: n + 1]] for n in range(found)]
            self.free = [block for block in self.free if block not in table]
            mine = [self.take(path[: n + 1]) for n in range(found, found + loads + 1)]
            fails = self.random.random() < 0.3
            loaded = {block: not (fails and self.random.random() < 0.5) for block in mine[:loads]}
            name, self.begun = f"r{self.begun}", self.begun + 1
            table += mine
            prompt = 4 * len(table)
            new = [self.engine.begins(name, 4 * found, [*table], 4 * loads, prompt, goes_on)]
            if goes_on:
                self.sure[name] = len(table)
                self.barred.add(name)
            self.running[name] = path, table
            self.done[name] = found + loads
            ran.append((name, table, found + loads))
        self.barred.update(self.engine.step(*new, copied=None, **again))
        for name, _, at in ran:
            self.done[name] = at + 1
        ordered = [
            ([*table], at, name not in self.barred, at < self.sure.get(name, POOL))
            for name, table, at in ran
        ]
        self.steps.append((loaded, ordered))
        if len(self.steps) > self.ahead:
            self.end()
        for name in [name for name in self.running if self.random.random() < 0.15]:
            self.forget(name)

    def end(self) -> None:
        """The first step in flight runs: loads are there before anything is computed."""
        loaded, ran = self.steps.pop(0)
        self.is_right.update(loaded)
        for table, at, _, named in sorted(ran, key=lambda run: run[1]):
            self.is_right[table[at]] = named and all(self.is_right[block] for block in table[:at])
        for table, at, may_store, _ in ran:
            self.checked += may_store
            assert not may_store or all(self.is_right[block] for block in table[: at + 1])
        failed = {block for block, right in loaded.items() if not right}
        self.engine.ends(*failed)
        for name, (_, table) in self.running.items():
            if bad := [place for place, block in enumerate(table) if block in failed]:
                self.done[name] = min(self.done[name], *bad)

    def forget(self, name: str) -> None:
        _, table = self.running.pop(name)
        self.engine.multi.request_finished(FakeRequest(name), [])
        kept = {block for _, other in self.running.values() for block in other}
        self.free += [block for block in reversed(table) if block not in kept]


@pytest.mark.parametrize("ahead", [0, 1])
def test_nothing_wrong_is_stored_whatever_fails_ends_or_runs_ahead(ahead: int) -> None:
    checked = 0
    for seed in range(170):
        drawn = Drawn(seed, ahead)
        for _ in range(40):
            drawn.step()
        while drawn.steps:
            drawn.end()
        checked += drawn.checked
        assert not drawn.engine.multi._doubts._unheard
    assert checked > 3000
