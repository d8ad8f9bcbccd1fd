"""What a chain knows of its requests, and which of their blocks are not stored."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bench.scheduled import Step
from tests.support.clock import Clock
from tests.support.fake_requests import (
    BLOCKS,
    IDLE_STEP,
    FakeNewRequest,
    FakeRequest,
    FakeStep,
    first_step,
)
from tiers.connector.policy.choice import Choice
from tiers.connector.policy.request_params import UNLIMITED
from tiers.connector.policy.request_state import NO_BLOCKS, RequestState, WaitBudget
from tiers.connector.policy.request_table import RequestTable
from tiers.contract.engine_info import EngineInfo, KVGroup
from tiers.contract.marks import MediaMark, MediaMarks, RequestMark, RequestMarks
from tiers.contract.protocols import Request
from tiers.contract.stats import CHAIN
from tiers.lab.replay.requests import CachedRequests, NewRequest


def test_media_are_waited_for_while_their_request_is_asked_about(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine with as many requests as may run asks nobody."""
    clock, request = Clock(), FakeRequest("a", 8, [b"1", b"2"])
    table = RequestTable(EngineInfo({}, 4, 4, num_blocks=9), now=clock, max_wait=3.0)
    monkeypatch.setattr(MediaMarks, "ready", lambda *_: False)
    monkeypatch.setattr(MediaMarks, "give_up", lambda *_, late: late)
    for _ in range(3):
        assert not table.is_marked(request, wait=True) and not table.take_measures()
        clock.now += 60
    table.is_marked(request, wait=True)
    assert table.take_measures()[CHAIN]["media_timeouts"] == 1
    monkeypatch.undo()
    assert table.of(request).wait_budget.left() == 0.0


@pytest.mark.parametrize(
    ("before", "loads", "omitted"),
    [
        (0, NO_BLOCKS, ()),
        (8, NO_BLOCKS, (range(2),)),
        (39, NO_BLOCKS, (range(10),)),
        (38, NO_BLOCKS, (range(9),)),
        (8, range(2), ()),
        (16, range(1, 3), (range(1), range(3, 4))),
        (8, range(1, 5), (range(1),)),
    ],
    ids=[
        "nothing was there",
        "the engine's own, or from another connector",
        "all, of which the last token is computed again",
        "all but a token of a whole block",
        "from tiers",
        "own, tiers, another connector",
        "tiers failed in the midst",
    ],
)
def test_blocks_that_neither_engine_nor_tiers_brought_are_not_stored(
    before: int, loads: range, omitted: tuple[range, ...]
) -> None:
    """Blocks of four tokens; of another request all are."""
    table = RequestTable(EngineInfo({}, 4, 4, 100), store="computed")
    params = {"kvtiers": {"store": True}}
    requests = FakeRequest(), FakeRequest("other", kv_transfer_params=params)
    for request in requests:
        request_state = table.of(request)
        request_state.load_range, request_state.tables = loads, ([*range(10)],)
        table.begin_step(first_step(request.request_id, before, 1))
        again = CachedRequests([request.request_id], set(), [None], [before + 1])
        table.begin_step(Step([], {request.request_id: 1}, again))
    first, other = (table.of(request).omitted for request in requests)
    assert (first, other) == (omitted, ())


def test_a_turn_of_what_goes_on_is_no_beginning() -> None:
    """vLLM runs each as if it were new. What it computed before is its own, and the prompt's rate
    is of what it computes then. One that was preempted does begin."""
    table = RequestTable(EngineInfo({}, 4, 4, 100), store="computed")
    request = FakeRequest("r", 8, [b"a", b"b"])
    state, found = table.of(request), []
    for tokens, before, is_asked in ((8, 0, True), (20, 9, False), (20, 9, False), (24, 4, True)):
        request.num_tokens = tokens
        if is_asked:
            state.is_asked = state.is_undecided = True
        table.allocated(request, Given([1, 2, 3, 4, 5, 6]))
        state.is_undecided = False
        new = FakeNewRequest("r", before, ([1, 2, 3, 4, 5, 6],))
        step = table.begin_step(FakeStep({"r": 16}, new))
        found.append((step.scheduled[0].is_new, state.omitted, step.prompt_tokens))
    assert found == [(True, (), 8), (False, (), 11), (False, (), 11), (True, (range(1),), 16)]


@pytest.mark.parametrize("right", [False, True])
def test_what_goes_on_after_its_answer_has_tiers_where_its_hashes_are_right(right: bool) -> None:
    table = RequestTable(EngineInfo({}, 4, 4, 100, goes_on_right=right))
    request: Any = FakeRequest("session")
    request.resumable = True
    state = table.of(request)
    assert state.stores is state.limits.may_load("any") is right
    assert table.of(FakeRequest("other")).stores


def test_a_request_may_ask_that_nothing_of_it_is_stored() -> None:
    table = RequestTable(EngineInfo({}, 4, 4, 100))
    for store in (False, True):
        params = {"kvtiers": {"store": store}}
        assert table.of(FakeRequest(str(store), kv_transfer_params=params)).stores is store


def test_a_step_that_completes_no_block_is_one_of_an_answer_unless_it_computes_a_prompt() -> None:
    table = RequestTable(EngineInfo({}, 4, 4, 100))
    request_state = table.of(FakeRequest("r", block_hashes=[b"a", b"b"]))
    request_state.prompt_tokens = 6
    step = table.begin_step(FakeStep({"r": 5}, FakeNewRequest("r", 0, ([3, 4],))))
    assert step.overwritten == {3, 4}
    found = []
    for before in (5, 6, 7):
        again = CachedRequests(["r"], set(), [None], [before])
        step = table.begin_step(Step([], {"r": 1}, again))
        found.append((step.prompt_tokens, [run.complete for run in step.scheduled]))
        assert step.overwritten == {4}, "whoever reads it yet must have ended"
    assert found == [(1, [1]), (0, []), (0, [2])]
    assert request_state.computed == 8
    request_state.to_offer_again.add("a tier that is to be offered some blocks again")
    step = table.begin_step(Step([], {}, CachedRequests(["r"], set(), [None], [8])))
    assert [run.after for run in step.scheduled] == [8]


def test_what_an_answer_computes_since_the_weights_changed_is_not_older() -> None:
    """A group of small blocks has completed some of which another request finds, and stores on."""
    table = RequestTable(EngineInfo({}, 8, 8, 100, groups=(KVGroup(8), KVGroup(4))))
    table.reset()
    first, other = (table.of(FakeRequest(name, block_hashes=[b"a", b"b"])) for name in "ro")
    first.prompt_tokens = 8
    table.begin_step(FakeStep({"r": 8}, FakeNewRequest("r", 0, ([1], [2, 3]))))
    added = {8: ([4], [5]), 12: ([], [6])}
    for before in range(8, 16):
        again = CachedRequests(["r"], set(), [added.get(before)], [before])
        table.begin_step(Step([], {"r": 1}, again))
    table.begin_step(FakeStep({"o": 1}, FakeNewRequest("o", 16, ([1, 4, 7], [2, 3, 5, 6, 8]))))
    assert not other.is_outdated


@pytest.mark.parametrize("why", ["limits", "a reset", "its adapter", "its media"])
def test_what_may_not_be_stored_is_not(why: str) -> None:
    marks = RequestMark(shared=why != "its adapter"), MediaMark(shared=why != "its media")
    budget = WaitBudget(Clock())
    state = RequestState(FakeRequest(), UNLIMITED, *marks, budget, why != "limits", "all")
    state.is_outdated = why == "a reset"
    assert not state.stores


class Marks(RequestMarks):
    """Of a request whose adapter workers have yet to report."""

    def __init__(self) -> None:
        self.mark = RequestMark(shared=False, adapter=b"sql", may_load=False)
        self.is_ready = False

    def of(self, request: Request) -> RequestMark:
        return self.mark

    def ready(self, request: Request) -> bool:
        return self.is_ready


def test_a_request_has_no_keys_before_it_is_known_what_computes_it() -> None:
    """Else they would be those of other weights. What the files would now be may be known later."""
    marks, request = Marks(), FakeRequest(block_hashes=[b"a", b"b"])
    table = RequestTable(EngineInfo({}, 4, 4, 100, marks=marks))
    assert not table.is_marked(request, wait=True), "it can wait to load"
    request_state = table.of(request)
    assert (table.keys(request_state), table.loadable(request_state)) == ([], 0)
    marks.mark.shared, marks.mark.steps = True, [(0, b"weights")]
    plain = RequestTable(EngineInfo({}, 4, 4, 100))
    others = plain.keys(plain.of(request))
    assert len(others) == len({*table.keys(request_state)} - {*others}) == 2
    assert table.loadable(request_state) == 0
    marks.mark.may_load = marks.is_ready = True
    assert table.loadable(request_state) == 2 and table.is_marked(request, wait=True)


def test_weights_are_known_for_good_and_store_nothing_that_may_not_be() -> None:
    """A tier says nothing of them before its workers have told it."""
    table = RequestTable(EngineInfo({}, 4, 4, 100))
    entries: list[dict[str, Any]] = [{"weights": "others"}, {"weights": "ours"}]
    entries += [{"weights": "ours", "store": False}, {}]
    pulls = [{"kvtiers": entry, "do_remote_prefill": True} for entry in entries]
    requests = [FakeRequest(str(params), kv_transfer_params=params) for params in pulls]
    states = [table.of(request) for request in requests]
    assert [one.stores for one in states] == [True, True, False, True], "no tier is shared"
    table.know_weights("")
    assert [one.stores for one in states] == [False, False, False, True]
    assert [table.of(one).stores for one in requests] == [False, False, False, True]
    for known in ("ours", "", "ours"):
        table.know_weights(known)
        assert [one.stores for one in states] == [False, True, False, True]
        table.forget(requests[0])
        assert not table.of(requests[0]).stores


@pytest.mark.parametrize(
    ("engine", "blocks"),
    [
        ({}, 10),
        ({"drops_last": True}, 9),
        ({"groups": (KVGroup(4, window=8),)}, 9),
        ({"groups": (KVGroup(4, window=8),), "drops_last": True}, 9),
    ],
)
def test_where_the_last_token_s_block_decides_it_is_not_loaded(
    engine: dict[str, Any], blocks: int
) -> None:
    table = RequestTable(EngineInfo({}, 4, 4, 100, **engine))
    hashes = [b"%d" % number for number in range(10)]
    whole, more = (FakeRequest(str(tokens), tokens, hashes) for tokens in (40, 43))
    assert table.loadable(table.of(whole)) == blocks
    assert table.loadable(table.of(more)) == 10


def test_keys_follow_the_blocks_of_an_answer_in_all_parts() -> None:
    table = RequestTable(EngineInfo({}, 8, 8, 100, groups=(KVGroup(8), KVGroup(8))))
    request = FakeRequest(block_hashes=[b"a", b"b"])
    first = [*table.keys(table.of(request))]
    request.block_hashes += [b"c", b"d"]
    found = table.keys(table.of(request))
    assert len(first) == 4 and found[:4] == first and len({*found}) == 8


class Given:
    """Blocks that the engine has given a request."""

    def __init__(self, *tables: list[int]) -> None:
        self.tables = tables

    def get_block_ids(self) -> tuple[list[int], ...]:
        return self.tables


def test_what_ends_while_it_loads_again_has_computed_nothing() -> None:
    """It had run and was preempted; the blocks that it has now are what the load was to fill."""
    table = RequestTable(EngineInfo({}, 4, 4, 100))
    request = FakeRequest(block_hashes=[b"a", b"b"], num_computed_tokens=8)
    request_state = table.of(request)
    table.begin_step(first_step("r", 0, 8))
    table.allocated(request, Given([5, 6]))
    assert table.begin_step(IDLE_STEP).overwritten == {5, 6}
    assert table.begin_step(IDLE_STEP).overwritten == set()
    assert table.ended(request_state, ([5, 6],)).complete == 0


def test_blocks_that_a_step_copies_into_are_overwritten() -> None:
    step = Step([], {})
    vars(step)["kv_cache_block_copies"] = [SimpleNamespace(src_block_id=3, dst_block_id=7)]
    assert RequestTable(EngineInfo({}, 4, 4, 100)).begin_step(step).overwritten == {7}


def test_a_state_that_a_step_leaves_may_be_overwritten_by_the_next_one() -> None:
    """One that is at no block's end is of no use."""
    groups = (KVGroup(8), KVGroup(8, window=1, is_state=True))
    table = RequestTable(EngineInfo({}, 8, 8, 100, groups=groups))
    table.of(FakeRequest(block_hashes=[b"a", b"b"]))
    step = Step([NewRequest("r", ([1, 2], [3, 4]), 0)], {"r": 12})
    left = {"r": [(1, 3, 8), (1, 4, 12)]}
    vars(step)["kv_connector_block_state"] = SimpleNamespace(boundary_state_offloads=left)
    (run,) = table.begin_step(step).scheduled
    assert run.states == [(1, 3)]
    assert table.begin_step(IDLE_STEP).overwritten == {3}


def test_what_resumes_has_the_blocks_that_it_is_given_and_no_others() -> None:
    table = RequestTable(EngineInfo({}, 4, 4, 100))
    request_state = table.of(FakeRequest(block_hashes=[b"a", b"b", b"c"]))
    given: list[tuple[set[str], tuple[list[int], ...] | None, list[int]]] = [
        (set(), ([1, 2],), [1, 2]),  # nobody has said before that it runs
        (set(), ([3],), [1, 2, 3]),
        (set(), None, [1, 2, 3]),
        ({"r"}, ([7, 8],), [7, 8]),
        ({"r"}, None, []),
    ]
    for resumed, added, tables in given:
        cached = CachedRequests(["nobody knows it", "r"], resumed, [added, added], [0, 0])
        table.begin_step(Step([], {"r": 1}, cached))
        assert request_state.tables == (tables,)


SOME_STEP = FakeStep({"of another": 4})


def used_table() -> RequestTable:
    """That of an engine whose own cache has something."""
    table = RequestTable(EngineInfo({}, 4, 4, 100))
    assert table.begin_step(SOME_STEP).is_first
    return table


@pytest.mark.parametrize("resumes", [False, True])
def test_what_begins_with_blocks_of_before_the_weights_changed_is_not_stored(resumes: bool) -> None:
    """The engine kept them in its own cache."""
    table = used_table()
    request_state = table.of(FakeRequest(block_hashes=[b"a", b"b"]))
    table.reset()
    request_state = table.of(FakeRequest(block_hashes=[b"a", b"b"]))
    if resumes:
        table.begin_step(FakeStep({"r": 8}, FakeNewRequest("r", 0, ([1, 2],))))
        assert not request_state.is_outdated
        cached = CachedRequests(["r"], {"r"}, [([8, 9],)], [4])
        table.begin_step(Step([], {"r": 4}, cached))
    else:
        table.begin_step(FakeStep({"r": 4}, FakeNewRequest("r", 4, ([8, 9],))))
    assert request_state.is_outdated


def ask_again(table: RequestTable, found: int) -> RequestState:
    """A request of two blocks that finds this many tokens in the engine's own cache."""
    request_state = table.of(FakeRequest("again", 8, [b"a", b"b"]))
    left = FakeNewRequest("again", found, ([1, 2],))
    table.begin_step(FakeStep({"again": 8 - found}, left))
    return request_state


@pytest.mark.parametrize(
    ("resets", "is_older"),
    [
        (["reset"], True),
        (["reset", "reset"], True),
        (["reset", "emptied"], False),
        (["reset", "emptied", "reset"], False),
        (["reset", "reset", "reset", "emptied", "reset"], False),
        (["reset", "emptied", "step", "reset"], True),
        (["reset", "emptied", "idle step", "reset"], False),
        (["reset", "emptied", "idle step", "step", "reset", "reset"], True),
    ],
)
def test_what_a_reset_leaves_in_the_engines_own_cache_is_older(
    resets: list[str], is_older: bool
) -> None:
    """It refuses one while requests run. The chain is reset before each and, if it is asked to be,
    after each."""
    table = used_table()
    for what in resets:
        if what in ("step", "idle step"):
            step = table.begin_step(IDLE_STEP if what == "idle step" else SOME_STEP)
            assert step.is_first == (resets[resets.index(what) - 1] in ("emptied", "idle step"))
        else:
            table.reset() if what == "reset" else table.cache_emptied()
    assert ask_again(table, 4).is_outdated == is_older


def test_what_a_request_of_before_a_reset_computes_after_it_is_older() -> None:
    """It goes on with what it had: so does the block of which a part was computed before, and one
    that another had computed since."""
    table = used_table()
    table.of(FakeRequest("r", 6, [b"a", b"b"]))
    table.begin_step(FakeStep({"r": 6}, FakeNewRequest("r", 0, ([7, 1],))))
    table.reset()
    table.of(FakeRequest("ended", 4, [b"c"]))
    table.begin_step(FakeStep({"ended": 4}, FakeNewRequest("ended", 0, ([2],))))
    for before, added in ((6, None), (7, None), (8, ([2],))):
        again = CachedRequests(["r"], set(), [added], [before])
        table.begin_step(Step([], {"r": 1}, again))
    for blocks in ([1], [2]):
        other = table.of(FakeRequest("o", 8, [b"b", b"d"]))
        table.begin_step(FakeStep({"o": 4}, FakeNewRequest("o", 4, ([*blocks, 3],))))
        assert other.is_outdated
        table.forget(other.request)


@pytest.mark.parametrize("blocks", [1, 0])
def test_what_is_loaded_after_a_reset_is_not_older(blocks: int) -> None:
    """By tiers, or by another connector beside them."""
    table = used_table()
    table.reset()
    request_state = table.of(FakeRequest("r", 8, [b"a", b"b"]))
    request_state.load_range = range(blocks)
    table.begin_step(FakeStep({"r": 4}, FakeNewRequest("r", 4, ([1, 2],))))
    assert not request_state.is_outdated
    assert not ask_again(table, 7).is_outdated
    table.forget(request_state.request)
    request_state = table.of(FakeRequest("r", 12, [b"c", b"a", b"b"]))
    request_state.load_range = range(1, 1)
    request_state.choice = Choice(4, True, computed=4)
    table.begin_step(FakeStep({"r": 4}, FakeNewRequest("r", 8, ([3, 1, 2],))))
    assert request_state.is_outdated, "it had found the first block"


def test_who_begins_again_unasked_may_have_found_what_is_older() -> None:
    table = used_table()
    table.reset()
    request_state = table.of(FakeRequest("r", 8, [b"a", b"b"]))
    request_state.load_range = range(0)
    table.begin_step(FakeStep({"r": 8}, FakeNewRequest("r", 0, ([1, 2],))))
    assert not request_state.is_outdated
    step: Any = FakeStep({"r": 4})
    step.scheduled_cached_reqs = CachedRequests(["r"], {"r"}, [([7, 8],)], [4])
    table.begin_step(step)
    assert request_state.is_outdated


def test_a_part_of_a_block_that_was_found_after_a_reset_may_be_older() -> None:
    table = used_table()
    table.reset()
    request_state = table.of(FakeRequest("r", 8, [b"a", b"b"]))
    table.begin_step(FakeStep({"r": 6}, FakeNewRequest("r", 2, ([1, 2],))))
    assert request_state.is_outdated


@pytest.mark.parametrize("older", ["", "the part", "what is before it"])
def test_a_copy_of_a_part_of_a_block_is_as_old_as_the_block(older: str) -> None:
    """It lies where another had computed since, and so does what an older one goes on with."""
    table = used_table()
    table.reset()
    since = [3, 9, *[5] * (older != "the part"), *[8] * (older != "what is before it")]
    ended = table.of(FakeRequest("ended", 4 * len(since)))
    step: Any = FakeStep({"ended": 4 * len(since)}, FakeNewRequest("ended", 0, (since,)))
    table.begin_step(step)
    table.forget(ended.request)
    found = table.of(FakeRequest("r", 12, [b"a", b"b", b"c"]))
    step = FakeStep({"r": 6}, FakeNewRequest("r", 6, ([8, 9, 2],)))
    step.kv_cache_block_copies = [SimpleNamespace(src_block_id=5, dst_block_id=9)]
    table.begin_step(step)
    assert found.is_outdated == bool(older)
    table.forget(found.request)
    other = table.of(FakeRequest("o", 8, [b"b", b"d"]))
    table.begin_step(FakeStep({"o": 4}, FakeNewRequest("o", 4, ([9, 7],))))
    assert other.is_outdated == bool(older)


def test_where_prompts_alone_are_stored_an_answer_completes_no_block() -> None:
    table = RequestTable(EngineInfo({}, 4, 4, 100), store="prompt")
    table.of(FakeRequest("r", 8, [b"a", b"b", b"c"]))
    step = table.begin_step(FakeStep({"r": 12}, FakeNewRequest("r", 0, ([1, 2, 3],))))
    assert [run.complete for run in step.scheduled] == [2]


@pytest.mark.parametrize("is_resumed", [False, True])
def test_who_runs_is_not_loaded_beside_the_steps(is_resumed: bool) -> None:
    table, request = RequestTable(EngineInfo({}, 4, 4, 100)), FakeRequest()
    table.allocated(request, BLOCKS)
    assert table.loads_beside
    step: Any = FakeStep({"r": 4}, *[] if is_resumed else [FakeNewRequest("r", 0, ([1],))])
    if is_resumed:
        step.scheduled_cached_reqs = CachedRequests(["r"], {"r"}, [([1],)], [0])
    table.begin_step(step)
    assert not table.loads_beside


def test_what_an_answer_adds_after_a_reset_is_noted_with_its_blocks_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Hundreds answer, and each step would note the last block of each."""
    noted: list[int] = []
    note = RequestTable._note_older

    def counted(
        table: RequestTable, request_state: RequestState, before: int, begins: bool
    ) -> None:
        noted.append(before)
        note(table, request_state, before, begins)

    monkeypatch.setattr(RequestTable, "_note_older", counted)
    table = used_table()
    table.reset()
    request_state = table.of(FakeRequest("r", 4, [b"%d" % block for block in range(6)]))
    table.begin_step(FakeStep({"r": 4}, FakeNewRequest("r", 0, ([1, 2],))))
    for before in range(4, 20):
        added = ([before // 4 + 2],) if before % 4 == 0 and before > 4 else None
        step: Any = FakeStep({"r": 1})
        step.scheduled_cached_reqs = CachedRequests(["r"], set(), [added], [before])
        table.begin_step(step)
    assert len(noted) <= 8, "4 blocks, each of which is noted when it is given and when it is full"
    assert not request_state.is_outdated
    found = table.of(FakeRequest("again", 24, [b"%d" % block for block in range(6)]))
    table.begin_step(FakeStep({"again": 4}, FakeNewRequest("again", 20, ([1, 2, 4, 5, 6, 7],))))
    assert not found.is_outdated, "all of it was computed since"


def test_a_list_of_connectors_counts_no_older_request_which_its_chain_does() -> None:
    table = RequestTable.of_connectors(4)
    table.begin_step(SOME_STEP)
    table.reset()
    assert not ask_again(table, 4).is_outdated and not table.take_measures()
