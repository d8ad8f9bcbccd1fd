"""A request that waits for room is asked about in every step: it is answered as a new one would be,
and nothing is looked up again that can't have changed."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, count
from typing import Any, ClassVar

import pytest

from bench.scheduled import Output, Step
from bench.scheduler import HASH_BYTES, NAMESPACE, PAYLOAD, TOKENS, Prompt
from spec.chain import LOAD_POLICIES, ChainSpec, LoadPolicy
from tests.support.clock import Clock, wait_for
from tests.support.kept import kept
from tests.support.lookups import IndexedNames, Names, look_up
from tiers.connector.assembly import scheduler_parts
from tiers.connector.multi.multi_connector import MultiWorkerMetadata
from tiers.connector.multi.multi_scheduler import MultiScheduler
from tiers.connector.policy.choice import Choice
from tiers.connector.policy.request_state import RequestState
from tiers.connector.scheduler.lookups import HeldLog, Lookup, LookupPace
from tiers.connector.scheduler.offloading_scheduler import LOOK_SECONDS
from tiers.connector.scheduler.store_manager import StoreManager
from tiers.connector.scheduler.store_uses import StoreUses
from tiers.contract.block_groups import GROUP_BYTES
from tiers.contract.engine_info import EngineInfo, KVGroup
from tiers.contract.generation import Generation, space_of
from tiers.contract.messages import (
    NO_PLACE,
    JobResult,
    OffloadingWorkerMetadata,
    PromptPlace,
    StoreJob,
    WorkerHandshake,
)
from tiers.cpu.spec import CpuSpec
from tiers.host.slots import slot_stride
from tiers.lab.replay.requests import CachedRequests, NewRequest
from tiers.loading.comparison import FIRST_PATIENCE
from tiers.store import batch_blocks
from tiers.testing import GivenSpec
from tiers.wrappers.guard import FAILED, HEALTHY, Guarded

RANKS = 2
BLOCKS = 200
SPACES = [bytes([rank]) + NAMESPACE[1:] for rank in range(RANKS)]


class IndexSpec(GivenSpec):
    is_prompt: ClassVar[bool] = True
    verifies: ClassVar[bool] = True


MADE: list[Halves] = []


@pytest.fixture(autouse=True)
def _closes_halves() -> Iterator[None]:
    yield
    while MADE:
        MADE.pop().chain.shutdown()


class Halves:
    """The scheduler halves of a chain, whose stores end in the step that begins them."""

    def __init__(
        self,
        cpu_blocks: int,
        load: LoadPolicy = "stitched",
        in_flight: int = 1 << 20,
        opens: bool = True,
        groups: tuple[KVGroup, ...] = (),
        store: Names | None = None,
        **more: Any,
    ) -> None:
        """`in_flight`: blocks that the index takes at once. `opens`: now, else by `open`. `store`:
        one without an index, in its place. `more`: other keys of the chain."""
        self.clock, self.index = Clock(100.0), store or IndexedNames()
        slot = slot_stride(PAYLOAD) * RANKS
        most = in_flight * slot
        spec = ChainSpec(
            version=1,
            load_policy=load,
            staging=4 * BLOCKS * slot,
            tiers=(
                CpuSpec(capacity=cpu_blocks * slot),
                IndexSpec(type="index", name="index", max_inflight=most).over(self.index),
            ),
            **{"load_when": "always", **more},
        )
        facts: dict[str, Any] = {"world_size": RANKS, "caches_prefixes": False, "groups": groups}
        engine = EngineInfo({}, TOKENS, TOKENS, 1, **facts)
        self.chain = MultiScheduler(*scheduler_parts(spec, engine, self.clock))
        MADE.append(self)
        self.asks = 0
        if opens:
            self.open()

    def open(self) -> None:
        """The workers tell of themselves."""
        shakes = {rank: WorkerHandshake(rank, SPACES[rank], PAYLOAD) for rank in range(RANKS)}
        self.hear([OffloadingWorkerMetadata(handshakes=shakes) for _ in range(2)])
        index: Any = self.chain.children[1]
        # Else it would hold questions back: most tests ask more at once than an engine does.
        index.manager.pace = LookupPace(RANKS, count().__next__)

    def hear(self, said: Sequence[OffloadingWorkerMetadata], *loaded: Prompt) -> None:
        """The workers say this; of these requests all loads have ended."""
        output = Output(MultiWorkerMetadata(tuple(said)))
        output.finished_recving = {prompt.request_id for prompt in loaded}
        self.chain.update_connector_output(output)

    def ask(self, prompt: Prompt) -> tuple[int, Any]:
        """Blocks that are found of it, and who is to load which."""
        tokens, _ = self.chain.get_num_new_matched_tokens(prompt, 0)
        assert tokens is not None
        state = self.chain._requests.of(prompt)
        return tokens // TOKENS, state.choice.shares

    def ask_anew(self, number: int) -> tuple[int, Any]:
        """The same for a new request of that prompt."""
        self.asks += 1
        prompt = Prompt(number, BLOCKS, self.asks)
        found = self.ask(prompt)
        self.chain.request_finished(prompt, [])
        return found

    def store(self, number: int, blocks: int, tiers: str = "ci", fails: bool = False) -> None:
        """A request computes the head of a prompt, and tiers store it: (c)pu and the (i)ndex."""
        self.asks += 1
        prompt = Prompt(number, BLOCKS, self.asks)
        self.chain.get_num_new_matched_tokens(prompt, 0)
        self.chain.update_state_after_alloc(prompt, prompt, 0)
        new = NewRequest(prompt.request_id, prompt.get_block_ids(), 0)
        orders = self.chain.build_connector_meta(Step([new], {prompt.request_id: blocks * TOKENS}))
        said = []
        for name, one in zip("ci", orders.metadata, strict=True):
            ends = {}
            for job in one.reqs_to_store:
                failed = {*range(len(job.items))} if fails or name not in tiers else set()
                ends[job.job_id] = JobResult(RANKS, failed)
                if name == "i" and not failed:
                    keys = [item.key for item in job.items]
                    self.index.names |= self._names(keys)
            said.append(OffloadingWorkerMetadata(jobs=ends))
        self.hear(said)
        self.chain.request_finished(prompt, [])

    def drop_elsewhere(self, number: int, blocks: range) -> None:
        """Another engine evicts these from the index."""
        hashes = Prompt(number, BLOCKS).block_hashes[blocks.start : blocks.stop]
        generation = self.chain._requests.generation
        keys = [generation.key(one + bytes(GROUP_BYTES)) for one in hashes]
        self.index.names -= self._names(keys)

    def _names(self, keys: Sequence[bytes]) -> set[bytes]:
        tag = self.chain._requests.generation.tag
        return {space_of(space, tag) + key for space in SPACES for key in keys}


@pytest.mark.parametrize(("answers", "held", "waits"), [(0.0, 6.0, True), (6.0, 0.0, False)])
def test_what_a_request_waits_for_the_engine_is_no_time_of_a_lookup(
    answers: float, held: float, waits: bool
) -> None:
    """A step whose prompts take all that it may compute asks nobody else. A prompt takes 3.2 s to
    compute."""
    halves = Halves(BLOCKS, store=Names(), load_when="sooner", max_wait="100s")
    halves.chain.computed(1000, 1.0)
    is_asked = threading.Event()
    has = halves.index.has

    def slow(keys: Sequence[bytes]) -> list[bool]:
        assert is_asked.wait(20)
        is_asked.clear()
        return has(keys)

    halves.index.has = slow  # type: ignore[method-assign]
    for number in range(8):
        prompt = Prompt(number, BLOCKS)
        assert halves.chain.get_num_new_matched_tokens(prompt, 0)[0] is None or not waits
        halves.clock.now += answers
        is_asked.set()
        tier: Any = halves.chain.children[1]
        asked = tier._tier.request(halves.chain._requests.of(prompt)).lookup.asked
        wait_for(asked.answer.done)
        halves.clock.now += held
        halves.chain.get_num_new_matched_tokens(prompt, 0)
        halves.chain.update_state_after_alloc(prompt, prompt, 0)
        halves.chain.request_finished(prompt, [])
    assert (halves.chain.get_num_new_matched_tokens(Prompt(9, BLOCKS), 0)[0] is None) == waits
    is_asked.set()


def test_a_load_is_no_measure_beyond_its_own_time_limit() -> None:
    """A worker that was frozen for an hour during the first load of a tier."""
    halves = Halves(BLOCKS, load_when="sooner")
    halves.store(1, BLOCKS, tiers="i")
    prompt = Prompt(1, BLOCKS, 9)
    halves.chain.get_num_new_matched_tokens(prompt, 0)
    halves.chain.update_state_after_alloc(prompt, prompt, BLOCKS * TOKENS)
    (job,) = halves.chain.build_connector_meta(Step([], {})).metadata[1].reqs_to_load
    ends = {job.job_id: JobResult(RANKS, seconds=3600.0)}
    halves.hear([OffloadingWorkerMetadata(), OffloadingWorkerMetadata(jobs=ends)])
    tier: Any = halves.chain.children[1]
    assert job.seconds == FIRST_PATIENCE
    assert tier.load_cost.seconds(BLOCKS * TOKENS) == pytest.approx(FIRST_PATIENCE)
    halves.chain.request_finished(prompt, [])


def test_a_prompt_that_waits_is_looked_up_once() -> None:
    halves = Halves(cpu_blocks=2 * BLOCKS)
    halves.store(1, BLOCKS)
    halves.store(1, BLOCKS // 2)
    waiting = Prompt(1, BLOCKS)
    found = halves.ask(waiting)
    assert found == (BLOCKS, {0: [range(BLOCKS)]})
    halves.index.asked = 0
    for number in range(50):
        halves.store(2 + number % 3, 5)
        assert halves.ask(waiting) == found
    assert halves.index.asked <= 50 * (5 + 64 + 256) * RANKS, "what the others are asked for"
    before = halves.index.asked
    for _ in range(50):
        assert halves.ask(waiting) == found
    assert halves.index.asked == before


def test_what_is_stored_meanwhile_is_found_without_another_look() -> None:
    halves = Halves(cpu_blocks=2 * BLOCKS)
    halves.store(1, 100, tiers="i")
    waiting = Prompt(1, BLOCKS)
    assert halves.ask(waiting)[0] == 100
    halves.store(1, 150, tiers="c")
    halves.index.asked = 0
    assert halves.ask(waiting) == (150, {0: [range(150)]})
    assert halves.index.asked <= 64 * RANKS, "the blocks behind, which nobody had asked for"


def test_what_others_evict_is_noticed_within_seconds_and_a_few_lookups_a_step() -> None:
    halves = Halves(cpu_blocks=2 * BLOCKS)
    halves.store(1, BLOCKS, tiers="i")
    waiting = Prompt(1, BLOCKS)
    assert halves.ask(waiting)[0] == BLOCKS
    halves.drop_elsewhere(1, range(120, BLOCKS))
    asked, found = 0, BLOCKS
    for _ in range(5):
        halves.clock.now += 0.04
        halves.index.asked = 0
        found = halves.ask(waiting)[0]
        asked = max(asked, halves.index.asked)
    assert found == 120
    assert 0 < asked <= 256, "0.04 seconds of 6,400 names a second"


def test_all_that_wait_share_what_a_step_compares_and_each_has_its_turn() -> None:
    index, clock = IndexedNames(), Clock(5.0)
    manager = StoreManager(Guarded(index, "tier"), SPACES, Generation(), clock)
    manager.pace = LookupPace(RANKS, count().__next__)
    prompts = [[b"%2d %3d" % (number, block) for block in range(100)] for number in range(20)]
    index.names = {space + key for space in SPACES for keys in prompts for key in keys}
    waiting = [(Lookup(), keys) for keys in prompts]

    def ask() -> list[bool]:
        """Of which prompts the tier has all."""
        return [all(manager.coverage(*one, range(100)) or ()) for one in waiting]

    assert ask() == [True] * 20
    index.names = {name for name in index.names if not name.endswith(b"99")}
    noticed, step = [20], 0.02 * StoreManager.CHECKS
    for _ in range(int(20 * 100 * RANKS / step) + 5):
        index.asked, clock.now = 0, clock.now + 0.02
        noticed.append(sum(ask()))
        assert index.asked <= step + StoreManager.CHECKED_AT_ONCE
    assert noticed[-1] == 0 and noticed == sorted(noticed, reverse=True)
    assert noticed[2] == 19, "the first of the queue begins soonest"
    manager.close()


class InGroups(Prompt):
    """A prompt of an engine with two KV cache groups."""

    def get_block_ids(self) -> tuple[list[int], ...]:
        return self._table, self._table


def test_nobody_is_asked_about_in_a_step_behind_one_that_has_no_room_to_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Room for its load is what it waits for, and those behind it would find none either."""
    groups = (KVGroup(TOKENS), KVGroup(TOKENS, 2 * TOKENS))
    halves, free = Halves(cpu_blocks=2 * BLOCKS, groups=groups), 0
    chain = halves.chain
    chain._room.free_blocks = lambda: free
    monkeypatch.setattr(halves.index, "peek", lambda keys: [True] * len(keys))
    asked, choose = list[str](), chain._chooser.choose

    def choosing(request_state: RequestState, *more: Any) -> Choice:
        asked.append(request_state.request.request_id)
        return choose(request_state, *more)

    monkeypatch.setattr(chain._chooser, "choose", choosing)
    loading, *waiting = (InGroups(number, BLOCKS) for number in range(6))

    def step(*more: Prompt) -> list[int | None]:
        chain.build_connector_meta(Step([], {}))
        asked.clear()
        return [chain.get_num_new_matched_tokens(one, 0)[0] for one in (*waiting, *more)]

    tokens = BLOCKS * TOKENS
    assert step() == [tokens] * 5
    chain.get_num_new_matched_tokens(loading, 0)
    chain.update_state_after_alloc(loading, loading, tokens)
    assert step() == [None] * 5 and len(asked) == 5
    for _ in range(3):
        assert step() == [None] * 5 and asked == ["1.0"]
    monkeypatch.setattr(halves.index, "peek", lambda keys: [False] * len(keys))
    assert step(InGroups(9, BLOCKS))[-1] == 0, "who has nothing to load needs no room for it"
    assert chain.get_num_new_matched_tokens(waiting[-1], tokens) == (0, False), "nor who has it now"
    monkeypatch.setattr(halves.index, "peek", lambda keys: [True] * len(keys))
    free = 10**6
    assert step() == [tokens] * 5 and asked == [one.request_id for one in waiting]


@pytest.mark.parametrize("load", LOAD_POLICIES)
def test_a_waiting_request_is_answered_as_a_new_one(load: LoadPolicy) -> None:
    rng = random.Random(0)
    halves = Halves(cpu_blocks=BLOCKS, load=load)
    waiting = {number: Prompt(number, BLOCKS) for number in range(3)}
    changed = 0
    for _ in range(80):
        what, number = rng.random(), rng.randrange(5)
        if what < 0.8:
            blocks, tiers = rng.randrange(1, BLOCKS), rng.choice(["c", "i", "ci"])
            halves.store(number, blocks, tiers, fails=rng.random() < 0.1)
        elif what < 0.9:
            start = rng.randrange(BLOCKS)
            halves.drop_elsewhere(number, range(start, start + rng.randrange(1, 60)))
            for prompt in waiting.values():
                halves.clock.now += 1.0  # all of it is compared with the index again
                halves.ask(prompt)
        elif what < 0.93:
            halves.chain.reset_cache()
        else:
            halves.clock.now += rng.random() / 100
        for number, one in waiting.items():
            before = halves.chain._requests.of(one).choice
            assert halves.ask(one) == halves.ask_anew(number)
            changed += before != halves.chain._requests.of(one).choice
    assert changed > 10


def test_a_tier_that_is_down_has_nothing_for_a_request_that_waits() -> None:
    halves = Halves(cpu_blocks=2 * BLOCKS)
    halves.store(1, BLOCKS, tiers="i")
    waiting = Prompt(1, BLOCKS)
    assert halves.ask(waiting)[0] == BLOCKS
    manager: Any = halves.chain.children[1].manager  # type: ignore[attr-defined]
    health = manager.health
    manager.health = lambda: health()._replace(reads=False)
    assert halves.ask(waiting)[0] == 0
    manager.health = health
    assert halves.ask(waiting)[0] == BLOCKS


def test_a_request_that_begins_is_asked_about_anew() -> None:
    """A load that failed changes what its tier has for the request."""
    halves = Halves(cpu_blocks=2 * BLOCKS)
    halves.store(1, BLOCKS, tiers="i")
    waiting = Prompt(1, BLOCKS)
    assert halves.ask(waiting)[0] == BLOCKS
    halves.chain.update_state_after_alloc(waiting, waiting, BLOCKS * TOKENS)
    orders = halves.chain.build_connector_meta(Step([], {}))
    (job,) = orders.metadata[1].reqs_to_load
    failed = {*range(len(job.items))}
    ended = OffloadingWorkerMetadata(jobs={job.job_id: JobResult(RANKS, failed, lost=failed)})
    halves.hear([OffloadingWorkerMetadata(), ended])
    assert halves.ask(waiting)[0] == 0


def test_a_request_that_was_loaded_in_vain_holds_up_no_engine_without_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM 0.32 asks such a request before those whose loads are of use, and reserves room for it
    twice where it would be loaded again: neither it nor those may ever be begun. Where there is no
    room to compute it, they are asked where it waits. A tier that looks yet is waited for."""
    halves = Halves(cpu_blocks=2 * BLOCKS, explain={})
    halves.store(1, BLOCKS)
    waiting = Prompt(1, BLOCKS)
    halves.chain.on_new_request(waiting)
    found, shares = halves.ask(waiting)
    assert found == BLOCKS and [*shares] == [0]
    halves.chain.update_state_after_alloc(waiting, waiting, BLOCKS * TOKENS)
    (job,) = halves.chain.build_connector_meta(Step([], {})).metadata[0].reqs_to_load
    failed = {*range(len(job.items))}
    ended = OffloadingWorkerMetadata(jobs={job.job_id: JobResult(RANKS, failed)})
    halves.hear([ended, OffloadingWorkerMetadata()])
    pace = halves.chain.children[1].manager.pace  # type: ignore[attr-defined]
    with monkeypatch.context() as busy:
        busy.setattr(pace, "take", lambda blocks: 0)
        assert halves.chain.get_num_new_matched_tokens(waiting, 0)[0] is None, "a tier looks yet"
    assert halves.ask(waiting) == (BLOCKS, {1: [range(BLOCKS)]}), "the other tier has it"
    answers = [halves.chain.get_num_new_matched_tokens(waiting, 0)[0] for _ in range(7)]
    found = BLOCKS * TOKENS
    assert answers[:5] == [0, None, found, 0, None], "there was no room for that, nor to compute it"
    halves.chain.update_state_after_alloc(waiting, waiting, 0)
    (notes,) = halves.chain.explainer.all()
    told = halves.chain.explainer.accounts.of(notes)["attempts"][-1]["tiers"]
    assert [tier["why"] for tier in told] == ["failed_before", "room"]
    assert (told[1]["held_blocks"], told[1]["asked_blocks"]) == (BLOCKS, BLOCKS)


def test_a_request_is_computed_where_the_engine_has_room_for_that_alone_and_stands_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM 0.32 keeps room free for one whose load was in vain, also where that waits behind."""
    halves = Halves(cpu_blocks=2 * BLOCKS)
    halves.store(1, BLOCKS)
    halves.store(2, BLOCKS, tiers="i")
    waiting, loading = Prompt(1, BLOCKS), Prompt(1, BLOCKS, 99)
    assert halves.ask(loading)[0] == halves.ask(waiting)[0] == BLOCKS

    def stand(steps: int = RANKS + 1) -> list[Any]:
        return [halves.chain.build_connector_meta(Step([], {})) for _ in range(steps)]

    halves.chain.update_state_after_alloc(loading, loading, BLOCKS * TOKENS)
    (job,) = stand(50)[0].metadata[0].reqs_to_load
    assert halves.ask(waiting)[0] == BLOCKS, "another's load will make room"
    ended = OffloadingWorkerMetadata(jobs={job.job_id: JobResult(RANKS, set())})
    halves.hear([ended, OffloadingWorkerMetadata()], loading)
    stand()
    assert halves.ask(waiting)[0] == BLOCKS, "steps in flight may make room"
    stand(1)
    late = Prompt(1, BLOCKS, 100)
    assert halves.ask(late)[0] == BLOCKS, "it may have room to load"
    for _ in range(2):
        both = [halves.chain.get_num_new_matched_tokens(one, 0)[0] for one in (waiting, late)]
        assert both == [None, None], "it has not, and one that has loaded may be asked behind them"
    looking, pace = Prompt(2, BLOCKS, 101), halves.chain.children[1].manager.pace  # type: ignore[attr-defined]
    with monkeypatch.context() as busy:
        busy.setattr(pace, "take", lambda blocks: 0)
        assert halves.chain.get_num_new_matched_tokens(looking, 0)[0] is None
    assert halves.ask(looking)[0] == BLOCKS, "what it looked for is told"
    halves.chain.update_state_after_alloc(loading, loading, 0)
    assert halves.ask(waiting)[0] == BLOCKS
    assert halves.ask(waiting)[0] == 0
    new = NewRequest(waiting.request_id, waiting.get_block_ids(), 0)
    halves.chain.build_connector_meta(Step([new], {waiting.request_id: TOKENS}))
    assert halves.ask(waiting)[0] == BLOCKS, "another runs again"


def test_what_a_step_completes_of_all_requests_is_asked_for_at_once() -> None:
    halves = Halves(cpu_blocks=2 * BLOCKS)
    halves.store(3, 4)
    prompts = [Prompt(number, BLOCKS) for number in range(6)]
    for prompt in prompts:
        halves.ask(prompt)
        halves.chain.update_state_after_alloc(prompt, prompt, 0)
    halves.index.asked = halves.index.calls = 0
    new = [NewRequest(prompt.request_id, prompt.get_block_ids(), 0) for prompt in prompts]
    each = {prompt.request_id: 5 * TOKENS for prompt in prompts}
    orders = halves.chain.build_connector_meta(Step(new, each))
    assert halves.index.calls == 0, "the tier remembers what it has stored, and what it missed"
    lacks = [one.block_hashes[4 if one is prompts[3] else 0 : 5] for one in prompts]
    for one in orders.metadata:
        (job,) = one.reqs_to_store
        assert [item.key[:HASH_BYTES] for item in job.items] == [*chain.from_iterable(lacks)]
    names, before = [*each], [5 * TOKENS] * 6
    again = CachedRequests(names, set(), [None] * 6, before)
    halves.chain.build_connector_meta(Step([], dict.fromkeys(names, TOKENS), again))
    assert halves.index.asked == 6
    assert halves.index.calls <= RANKS


def _begin(halves: Halves, prompts: Sequence[Prompt], blocks: int) -> list[list[StoreJob]]:
    """Requests compute so many blocks in one step; what each tier is to store."""
    for prompt in prompts:
        halves.ask(prompt)
        halves.chain.update_state_after_alloc(prompt, prompt, 0)
    new = [NewRequest(prompt.request_id, prompt.get_block_ids(), 0) for prompt in prompts]
    each = {prompt.request_id: blocks * TOKENS for prompt in prompts}
    orders = halves.chain.build_connector_meta(Step(new, each))
    return [one.reqs_to_store for one in orders.metadata]


def test_what_becomes_of_each_request_is_told_apart_in_a_job_of_several() -> None:
    halves = Halves(cpu_blocks=2 * BLOCKS)
    prompts = [Prompt(number, BLOCKS) for number in range(3)]
    (cpu,), (index,) = _begin(halves, prompts, blocks=2)
    assert len(index.items) == 6
    failed = {1, 4}  # the second block of the first request, the first one of the last
    ends = [{cpu.job_id: JobResult(RANKS, {*range(6)})}, {index.job_id: JobResult(RANKS, failed)}]
    halves.index.names |= halves._names([index.items[at].key for at in (0, 2, 3, 5)])
    halves.hear([OffloadingWorkerMetadata(jobs=jobs) for jobs in ends])
    assert [halves.ask_anew(number)[0] for number in range(3)] == [1, 2, 0]


def test_a_job_has_what_one_call_of_a_store_takes_and_one_adapters_blocks() -> None:
    halves = Halves(cpu_blocks=2 * BLOCKS)
    prompts = [Prompt(number, BLOCKS) for number in range(5)]
    for prompt, adapter in zip(prompts, (b"", b"", b"", b"one", b"one"), strict=True):
        state = halves.chain._requests.of(prompt)
        state.mark = replace(state.mark, adapter=adapter)
    assert batch_blocks(slot_stride(PAYLOAD)) == 64
    jobs, *_ = _begin(halves, prompts, blocks=30)
    assert [(len(job.items), job.adapter) for job in jobs] == [(60, b""), (30, b""), (60, b"one")]
    halves.chain.reset_cache()
    jobs, *_ = _begin(halves, [Prompt(7, BLOCKS), Prompt(8, BLOCKS)], blocks=BLOCKS)
    assert [len(job.items) for job in jobs] == [BLOCKS, BLOCKS], "what is longer is a job by itself"


def test_a_job_has_an_eighth_of_what_may_be_in_flight() -> None:
    """Else a tier that lags had nothing to do while the next blocks come."""
    halves = Halves(cpu_blocks=2 * BLOCKS, in_flight=32)
    together, some = _begin(halves, [Prompt(number, BLOCKS) for number in range(8)], blocks=2)
    assert [len(job.items) for job in together] == [16]
    assert [len(job.items) for job in some] == [4, 4, 4, 4]


def test_a_store_that_packs_prompts_has_a_job_for_each() -> None:
    halves = Halves(cpu_blocks=2 * BLOCKS)
    manager: Any = halves.chain.children[1].manager  # type: ignore[attr-defined]
    manager.place = PromptPlace
    prompts = [Prompt(number, BLOCKS) for number in range(3)]
    together, alone = _begin(halves, prompts, blocks=2)
    assert [len(job.items) for job in together] == [6]
    for prompt, job in zip(prompts, alone, strict=True):
        assert [item.key for item in job.items] == job.place.keys[:2]
        assert job.place.keys[0].startswith(prompt.block_hashes[0])


def test_what_found_no_room_is_offered_again_in_a_step_that_completes_nothing() -> None:
    halves = Halves(cpu_blocks=2 * BLOCKS, in_flight=1)
    prompt = Prompt(1, 3)
    _, (job,) = _begin(halves, [prompt], blocks=3)
    tokens = 3 * TOKENS + 1
    for stored in (1, 1, 1, 0):
        assert len(job.items) == stored
        halves.hear([OffloadingWorkerMetadata(), _ended(job)])
        (job,) = _answer(halves, prompt, tokens)[1] or [StoreJob(0, [])]
        tokens += 1
    assert not halves.chain._requests.step.scheduled, "all of it is stored"


def test_what_requests_share_is_stored_once() -> None:
    halves = Halves(cpu_blocks=2 * BLOCKS)
    for jobs in _begin(halves, [Prompt(1, BLOCKS, asks) for asks in range(2)], blocks=3):
        assert sum(len(job.items) for job in jobs) == 3
    index: Any = halves.chain.children[1]
    assert index._tier.admission.acceptance._offered == 3


def test_what_waited_for_room_until_its_tier_was_down_is_lost() -> None:
    halves = Halves(cpu_blocks=2 * BLOCKS, in_flight=1)
    prompt, index = Prompt(1, 4), halves.chain.children[1]
    _, (job,) = _begin(halves, [prompt], blocks=3)
    tier: Any = index._tier  # type: ignore[attr-defined]
    tier.update({0: HEALTHY._replace(writes=False, writes_up=False)})
    halves.hear([OffloadingWorkerMetadata(), _ended(job)])
    assert _answer(halves, prompt, 3 * TOKENS + 1)[1] == []
    assert tier.stats.data["index"]["store_dropped_down"] == 1, "as many as there is room for"
    assert +tier.admission.acceptance._lost == {"store_dropped_inflight": 2}
    tier.update({0: HEALTHY})
    halves.index.names |= halves._names([prompt.block_hashes[2] + bytes(GROUP_BYTES)])
    assert _answer(halves, prompt, 3 * TOKENS + 2, TOKENS - 2)[1] == [], "behind what is lost"


def test_nothing_is_stored_behind_a_block_that_found_no_slot() -> None:
    """It could not be loaded, without that one."""
    halves = Halves(cpu_blocks=2 * BLOCKS)
    pool: Any = halves.chain.children[0].pool  # type: ignore[attr-defined]
    claim, refused = pool.claim, Prompt(1, 4).block_hashes[1]
    pool.claim = lambda key: None if key.startswith(refused) else claim(key)
    prompt = Prompt(1, 4)
    for (job,) in _begin(halves, [prompt], blocks=4):
        assert len(job.items) == 1
    del pool.claim
    for (job,) in _answer(halves, prompt, 4 * TOKENS):
        assert len(job.items) == 3


def test_nothing_is_stored_behind_what_a_tier_that_was_down_did_not_get() -> None:
    halves = Halves(cpu_blocks=2 * BLOCKS)
    index: Any = halves.chain.children[1]
    index._tier.update({0: HEALTHY._replace(writes=False, writes_up=False)})
    prompt = Prompt(1, 4)
    together, nothing = _begin(halves, [prompt], blocks=2)
    assert together and not nothing
    index._tier.update({0: HEALTHY})
    together, nothing = _answer(halves, prompt, 2 * TOKENS, TOKENS)
    assert together and not nothing


def test_a_block_that_is_asked_for_too_seldom_holds_up_none_behind_it() -> None:
    """Each is asked for as often as its prompt, in whichever step."""
    halves = Halves(cpu_blocks=2 * BLOCKS)
    index: Any = halves.chain.children[1]
    twice = index._spec.model_copy(update={"store_threshold": 2})
    index._tier.admission.use(twice, is_only_tier=False)
    for asks, stored in ((0, 0), (1, 2)):
        prompt = Prompt(1, 4, asks)
        steps = [
            _begin(halves, [prompt], blocks=2)[1],
            _answer(halves, prompt, 2 * TOKENS, 2 * TOKENS)[1],
        ]
        assert [sum(len(job.items) for job in jobs) for jobs in steps] == [stored] * 2


def test_a_tier_is_as_large_as_it_was_made() -> None:
    halves = Halves(cpu_blocks=2 * BLOCKS)
    cpu: Any = halves.chain.children[0]
    assert cpu._tier.open.max_blocks == 2 * BLOCKS
    half = cpu._spec.model_copy(update={"capacity": cpu._spec.capacity_bytes // 2})
    cpu.retune(half, cpu._chain)
    assert cpu._tier.open.max_blocks == BLOCKS


def test_how_a_tier_does_is_looked_at_where_something_was_measured_or_now_and_then() -> None:
    """In a step that computes; another may be the last one for long."""
    halves = Halves(cpu_blocks=2 * BLOCKS)
    index: Any = halves.chain.children[1]
    prompt, later = Prompt(1, 3), halves.clock.now + LOOK_SECONDS
    _begin(halves, [prompt], blocks=3)

    def seen(fails: bool, computed: int = 1, measured: bool = False) -> float | None:
        says = FAILED if fails else HEALTHY
        halves.hear([OffloadingWorkerMetadata(), OffloadingWorkerMetadata(health={0: says})])
        if computed:
            _answer(halves, prompt, 3 * TOKENS + computed)
        else:
            halves.chain.build_connector_meta(Step([], {}))
        index.count(stored_blocks=measured)
        stats = index.get_kv_connector_stats()
        return None if stats is None else stats["index"]["reads_up"]

    assert seen(fails=True) == 0
    assert seen(fails=False, computed=2) is None
    assert seen(fails=False, computed=3, measured=True) == 1
    assert seen(fails=True, computed=4) is None
    halves.clock.now = later
    assert seen(fails=True, computed=5) == 0
    assert seen(fails=False, computed=0) == 1


def test_a_tier_that_leaves_the_chain_is_given_nothing() -> None:
    halves = Halves(cpu_blocks=2 * BLOCKS)
    index: Any = halves.chain.children[1]
    index.drain()
    together, nothing = _begin(halves, [Prompt(1, 3)], blocks=3)
    assert together and not nothing


def test_a_tier_that_may_have_less_in_flight_by_now_is_offered_nothing_again() -> None:
    halves = Halves(cpu_blocks=2 * BLOCKS, in_flight=3)
    index: Any = halves.chain.children[1]
    prompt = Prompt(1, 5)
    _, (job,) = _begin(halves, [prompt], blocks=5)
    assert len(job.items) == 3
    less = index._spec.model_copy(update={"max_inflight": index.block_bytes})
    index._tier.admission.use(less, is_only_tier=True)
    assert _answer(halves, prompt, 5 * TOKENS + 1)[1] == []


@pytest.mark.parametrize("stored_first", [False, True])
def test_a_prefix_that_is_stored_in_steps_is_used_again_as_one(stored_first: bool) -> None:
    """A store evicts first what was stored first: else the head would go before its tail."""
    halves = Halves(cpu_blocks=2 * BLOCKS)
    used = _used(halves)
    prompt = Prompt(1, 5)
    _, (job,) = _begin(halves, [prompt], blocks=2)
    for blocks in (2, 3, 4):
        halves.hear([OffloadingWorkerMetadata(), _ended(job)])
        _, (job,) = _answer(halves, prompt, blocks * TOKENS, TOKENS)
    if stored_first:
        halves.hear([OffloadingWorkerMetadata(), _ended(job)])
    assert used == [4]
    halves.chain.request_finished(prompt, [])
    if not stored_first:
        halves.hear([OffloadingWorkerMetadata(), _ended(job)])
    assert used == [4, 5]


@pytest.mark.parametrize(
    ("place", "renewed"), [(NO_PLACE, 0), (NO_PLACE, 1), (PromptPlace([b""]), 0)]
)
def test_a_prefix_that_one_job_stores_is_used_already(place: PromptPlace, renewed: int) -> None:
    """Its last batch is put first; not of packs, and not of blocks that the store had before."""
    halves = Halves(cpu_blocks=2 * BLOCKS)
    manager: Any = halves.chain.children[1].manager  # type: ignore[attr-defined]
    manager.place = lambda *_: place
    used, count = _used(halves), 2 * batch_blocks(slot_stride(PAYLOAD))
    prompt = Prompt(1, count)
    _, (job,) = _begin(halves, [prompt], blocks=count)
    ended = {job.job_id: JobResult(RANKS, renewed=renewed)}
    halves.hear([OffloadingWorkerMetadata(), OffloadingWorkerMetadata(jobs=ended)])
    halves.chain.request_finished(prompt, [])
    assert used == ([count] if renewed or place is not NO_PLACE else [])


def test_a_prefix_whose_last_block_is_there_already_is_used_again_as_one() -> None:
    """An engine that schedules ahead has completed it when the request has ended."""
    halves = Halves(cpu_blocks=2 * BLOCKS)
    used = _used(halves)
    prompt, hashes = Prompt(1, 5), Prompt(1, 5).block_hashes
    _, (job,) = _begin(halves, [prompt], blocks=3)
    for known in (5, 4):
        halves.hear([OffloadingWorkerMetadata(), _ended(job)])
        prompt.block_hashes = hashes[:known]
        _, jobs = _answer(halves, prompt, (8 - known) * TOKENS, TOKENS)
        (job,) = jobs or [job]
    assert not jobs, "its last token is not known"
    halves.index.names |= halves._names([hashes[4] + bytes(GROUP_BYTES)])
    prompt.block_hashes, prompt.num_computed_tokens = hashes, 5 * TOKENS
    halves.chain.request_finished(prompt, prompt.get_block_ids()[0])
    assert not used
    assert not halves.chain.build_connector_meta(Step([], {})).metadata[1].reqs_to_store
    assert used == [5]


def _used(halves: Halves) -> list[int]:
    """How many blocks of a prefix are counted as used, each time that they are."""
    manager: Any = halves.chain.children[1].manager  # type: ignore[attr-defined]
    used: list[int] = []
    manager.touch_prefix = lambda keys: used.append(len(keys))
    return used


def _ended(job: StoreJob) -> OffloadingWorkerMetadata:
    return OffloadingWorkerMetadata(jobs={job.job_id: JobResult(RANKS)})


def _answer(halves: Halves, prompt: Prompt, tokens: int, more: int = 1) -> list[list[StoreJob]]:
    """A request that has computed so many computes more; what each tier is to store."""
    again = CachedRequests([prompt.request_id], set(), [None], [tokens])
    orders = halves.chain.build_connector_meta(Step([], {prompt.request_id: more}, again))
    return [one.reqs_to_store for one in orders.metadata]


def test_the_last_block_of_a_request_is_not_read_once_another_has_it() -> None:
    """It is completed when the request has ended, and read after the next step."""
    halves = Halves(cpu_blocks=2 * BLOCKS)
    prompt, other, hashes = Prompt(1, 4), Prompt(2, 4), Prompt(1, 4).block_hashes
    prompt.block_hashes = hashes[:3]
    _begin(halves, [prompt], blocks=4)
    prompt.block_hashes, prompt.num_computed_tokens = hashes, 4 * TOKENS
    halves.chain.request_finished(prompt, prompt.get_block_ids()[0])
    for (job,) in _begin(halves, [other], blocks=1):
        assert [item.key[:HASH_BYTES] for item in job.items] == other.block_hashes[:1]


def test_an_older_job_that_ends_lets_nobody_overwrite_what_a_younger_one_reads() -> None:
    halves = Halves(cpu_blocks=2 * BLOCKS)
    (older,), (younger,) = (_begin(halves, [Prompt(number, 3)], blocks=3)[0] for number in range(2))
    halves.hear([_ended(older), OffloadingWorkerMetadata()])
    third = Prompt(2, 3)
    halves.ask(third)
    halves.chain.update_state_after_alloc(third, third, 0)
    new = NewRequest(third.request_id, third.get_block_ids(), 0)
    orders = halves.chain.build_connector_meta(Step([new], {third.request_id: TOKENS}))
    assert orders.metadata[0].jobs_to_flush == [younger.job_id]


def test_a_tier_that_opens_late_or_was_paused_takes_what_is_there_in_the_next_step() -> None:
    """The engine's blocks are others' as soon as the request has ended."""
    halves = Halves(cpu_blocks=2 * BLOCKS, opens=False)
    index: Any = halves.chain.children[1]
    index._stores.is_paused = True
    prompt, tokens = Prompt(1, 3), 3 * TOKENS + 1
    assert _begin(halves, [prompt], blocks=3) == _answer(halves, prompt, tokens) == [[], []]
    halves.open()
    (job,), nothing = _answer(halves, prompt, tokens + 1)
    assert len(job.items) == 3 and not nothing
    index._stores.is_paused = False
    nothing, (job,) = _answer(halves, prompt, tokens + 2)
    assert len(job.items) == 3 and not nothing
    assert _answer(halves, prompt, tokens + 3) == [[], []]
    assert not halves.chain._requests.step.scheduled


def test_a_tier_that_never_opens_costs_an_answer_nothing() -> None:
    halves = Halves(cpu_blocks=2 * BLOCKS)
    index: Any = halves.chain.children[1]
    index._tier.failed("it is refused")
    prompt, tokens = Prompt(1, 3), 3 * TOKENS + 1
    together, nothing = _begin(halves, [prompt], blocks=3)
    assert together and not nothing
    assert _answer(halves, prompt, tokens) == [[], []]
    assert not halves.chain._requests.step.scheduled


def test_changes_beyond_what_is_kept_are_looked_up() -> None:
    changes, answers = HeldLog(), Lookup()
    keys = [number.to_bytes(2, "big") for number in range(10)]
    held = dict.fromkeys(keys, False)

    def take() -> list[bool]:
        answers.follow(changes, keys)
        answers.add([held[keys[number]] for number in answers.unknown(range(10), changes)])
        return answers.of(range(10))

    assert take() == [False] * 10
    held[keys[3]] = True
    changes.note(keys[3], held=True)
    assert take() == [False] * 3 + [True] + [False] * 6
    held[keys[4]] = True
    changes.note(keys[4], held=True)
    for number in range(3 * HeldLog.LIMIT):
        changes.note(b"other %d" % number, held=True)
    assert kept(changes) <= 2 * 3 * HeldLog.LIMIT
    assert take() == [False] * 3 + [True] * 2 + [False] * 5
    held[keys[4]] = False
    changes.forget()
    assert take() == [False] * 3 + [True] + [False] * 6


class Told(Names):
    def __init__(self) -> None:
        super().__init__()
        self.told: list[list[bytes]] = []

    def touch(self, keys: Sequence[bytes]) -> None:
        self.told.append(list(keys))


class ToldIndex(Told, IndexedNames):
    pass


def test_an_index_is_told_of_uses_a_few_at_a_time_and_of_the_head_last() -> None:
    index, clock = ToldIndex(), Clock(5.0)
    manager = StoreManager(Guarded(index, "tier"), SPACES, Generation(), clock)
    keys = [b"%5d" % number for number in range(2000)]
    manager.touch_prefix(keys)
    manager.touch_and_list_missing([b"another"])
    assert [len(names) for names in index.told] == [StoreUses.USES_AT_ONCE], "no time has passed"
    while sum(map(len, index.told)) < RANKS * len(keys):
        clock.now += 0.02
        manager.touch_and_list_missing([b"another"])
    assert max(map(len, index.told)) <= StoreUses.USES_AT_ONCE
    last_first = [name for names in reversed(index.told) for name in names]
    assert last_first == [space + key for key in keys for space in SPACES]
    clock.now += 1.0
    manager.touch_prefix(keys)
    manager.reset()
    index.told.clear()
    clock.now += 1.0
    manager.touch_and_list_missing([b"another"])
    assert not index.told, "there are other keys"
    manager.close()


def test_an_index_is_told_of_what_is_pinned_as_long_as_it_is() -> None:
    index, clock = ToldIndex(), Clock(5.0)
    manager = StoreManager(Guarded(index, "tier"), [b"space"], Generation(), clock)
    manager.pin([b"a", b"b"])
    for pinned in ({b"spacea", b"spaceb"}, {b"spaceb"}, set[bytes]()):
        index.told.clear()
        manager.renew_pins(17, 16)  # and has begun another lap
        assert {name for names in index.told for name in names} == pinned
        manager.unpin([b"b"] if len(pinned) == 1 else [b"a"])
    manager.close()


def test_a_store_behind_a_network_is_told_of_uses_too() -> None:
    store = Told()
    manager = StoreManager(Guarded(store, "tier"), SPACES, Generation(), Clock(5.0))
    assert manager.pinnable([b"a"]) == [], "it can't be asked at once"
    manager.touch_prefix([b"a", b"b"])
    wait_for(lambda: bool(store.told))
    assert store.told == [[space + key for key in (b"a", b"b") for space in SPACES]]
    manager.close()


def test_an_index_that_lacks_the_first_ranks_part_is_not_asked_for_the_others() -> None:
    index = IndexedNames()
    spaces = [bytes([rank]) * 16 for rank in range(8)]
    manager = StoreManager(Guarded(index, "tier"), spaces, Generation(), Clock(5.0))
    keys = [b"%5d" % number for number in range(100)]
    assert manager.coverage(Lookup(), keys, range(100)) == [False] * 100
    assert index.asked == 100
    index.names = {space + key for space in spaces for key in keys[:10]}
    index.names -= {spaces[0] + keys[3], spaces[5] + keys[4]}
    held = [number < 10 and number not in (3, 4) for number in range(100)]
    assert manager.coverage(Lookup(), keys, range(100)) == held
    assert index.asked == 100 + 100 + 7 * 9
    manager.close()


@pytest.mark.parametrize(("ranks", "waits"), [(1, 1), (8, 5)])
def test_a_long_prompt_is_looked_up_in_several_steps(ranks: int, waits: int) -> None:
    index, clock = IndexedNames(), Clock(5.0)
    spaces = [bytes([rank]) * 16 for rank in range(ranks)]
    manager = StoreManager(Guarded(index, "tier"), spaces, Generation(), clock)
    manager.pace = LookupPace(len(spaces), clock)
    keys = [b"%5d" % number for number in range(8192)]
    index.names = {space + key for space in spaces for key in keys[:7000]}
    lookup, steps = Lookup(), 0
    while (held := manager.coverage(lookup, keys, range(len(keys)))) is None:
        most = LookupPace.AT_ONCE * ranks / (ranks + LookupPace.OF_A_BLOCK)
        assert 0 < index.asked <= most + 0.02 * StoreManager.CHECKS
        index.asked, steps, short = 0, steps + 1, range(100)
        assert manager.coverage(Lookup(), keys[:100], short) == [True] * 100, "as at any time"
        assert manager.coverage(lookup, keys, range(len(keys))) is None, "no time has passed"
        assert index.asked == 100 * len(spaces)
        index.asked, clock.now = 0, clock.now + 0.02
    assert held == [True] * 7000 + [False] * 1192
    assert steps == waits
    manager.close()


def test_many_long_prompts_together_are_given_no_more_of_a_step() -> None:
    """However long the index takes: that time does not allow for the next of them."""
    clock = Clock(5.0)

    class Slow(IndexedNames):
        def peek(self, keys: Sequence[bytes]) -> list[bool]:
            assert keys, "of a plugin nobody knows what it says to that"
            clock.now += len(keys) * 1e-6
            return super().has(keys)

    index = Slow()
    spaces = [bytes([rank]) * 16 for rank in range(8)]
    manager = StoreManager(Guarded(index, "tier"), spaces, Generation(), clock)
    manager.pace = LookupPace(len(spaces), clock)
    keys = [b"%5d" % number for number in range(4096)]
    index.names = {space + key for space in spaces for key in keys}
    waiting = [Lookup() for _ in range(20)]
    for _ in range(4):
        index.asked, clock.now = 0, clock.now + 0.02
        answers = [manager.coverage(one, keys, range(len(keys))) for one in waiting]
        assert 0 < index.asked <= LookupPace.AT_ONCE + len(waiting) * 0.1 * StoreManager.CHECKS
    assert answers.count(None) == 19, "each takes three steps"
    manager.close()


def test_a_burst_of_short_questions_is_answered_over_several_steps_the_oldest_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They wait as those of long prompts do, and both together take no step longer."""
    monkeypatch.setattr(StoreManager, "CHECKS", 0.0)
    index, clock = IndexedNames(), Clock(5.0)
    manager = StoreManager(Guarded(index, "tier"), SPACES, Generation(), clock)
    manager.pace = LookupPace(RANKS, clock)
    sizes = [[1024, 60, 8192][number % 3] for number in range(60)]
    prompts = [[b"%3d %5d" % (n, block) for block in range(size)] for n, size in enumerate(sizes)]
    index.names = {space + key for space in SPACES for keys in prompts for key in keys}
    waiting = {number: Lookup() for number in range(60)}
    most = LookupPace.AT_ONCE * (1 + LookupPace.OF_SHORT) + LookupPace.FEW
    served: list[int] = []
    while waiting:
        index.asked, clock.now = 0, clock.now + 0.02
        for number, lookup in [*waiting.items()]:
            if (found := look_up(manager, prompts[number], lookup)) is not None:
                assert found == sizes[number]
                served.append(number)
                del waiting[number]
        assert 0 < index.asked / RANKS * (RANKS + LookupPace.OF_A_BLOCK) <= most
    assert [n for n in served if sizes[n] == 8192] == [*range(2, 60, 3)]
    manager.close()


@pytest.mark.parametrize("load", LOAD_POLICIES)
def test_a_request_waits_for_all_of_a_long_answer(
    load: LoadPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    halves = Halves(cpu_blocks=2 * BLOCKS, load=load)
    halves.store(1, BLOCKS, tiers="i")
    monkeypatch.setattr(LookupPace, "AT_ONCE", 100)
    monkeypatch.setattr(LookupPace, "FEW", 8)
    manager: Any = halves.chain.children[1].manager  # type: ignore[attr-defined]
    manager.pace = LookupPace(RANKS, halves.clock)
    prompt, asks = Prompt(1, BLOCKS, 77), 1
    while halves.chain.get_num_new_matched_tokens(prompt, 0)[0] is None:
        halves.clock.now += 0.02
        asks += 1
    assert asks > 2
    assert halves.ask(prompt)[0] == BLOCKS
