"""What an account tells where tiers are late, and where the engine takes what others have."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.children import BlockTier
from tests.support.explaining import Told, tier_of
from tests.support.fake_requests import BLOCKS, FakeRequest, first_step
from tiers.connector.multi.multi_scheduler import MultiScheduler, MultiSettings
from tiers.connector.policy.request_table import RequestTable
from tiers.explain.accounts import lines
from tiers.explain.explanations import Explanations
from tiers.explain.notes import count_answers


class Engine:
    """Asks a chain for one request of 40 tokens, as an engine would."""

    def __init__(self, *children: Any) -> None:
        names = [f"tier-{place}" for place in range(len(children))]
        self.known = Explanations(names, 4)
        requests = RequestTable.of_connectors(4)
        settings = MultiSettings(
            requests, "stitched", explainer=self.known, observers=(self.known,)
        )
        self.chain = MultiScheduler(children, settings, names)
        self.request = FakeRequest(num_tokens=42)

    def begin(self, computed: int = 0, takes: int | None = None) -> None:
        self.known.arrived(self.request)
        tokens, _ = self.chain.get_num_new_matched_tokens(self.request, computed)
        assert tokens is not None
        taken = tokens if takes is None else takes
        self.chain.update_state_after_alloc(self.request, BLOCKS, taken)

    def run(self, computed: int) -> None:
        self.chain.build_connector_meta(first_step("r", computed, 42 - computed))

    def told(self) -> Told:
        (notes,) = self.known.all()
        return self.known.accounts.of(notes)


def test_one_that_has_not_answered_in_time() -> None:
    engine = Engine(BlockTier(""), BlockTier(None))
    engine.chain.computed(1_000_000_000, 0.001)  # so fast that nothing is waited for twice
    engine.known.arrived(engine.request)
    assert engine.chain.get_num_new_matched_tokens(engine.request, 0) == (None, False)
    engine.begin()
    engine.run(0)
    told = engine.told()
    assert [tier_of(told, f"tier-{place}")["why"] for place in (0, 1)] == ["miss", "late"]


@pytest.mark.parametrize(("held", "why"), [("x" * 10, "elsewhere"), ("", "miss")])
def test_the_engine_takes_what_another_connector_has(held: str, why: str) -> None:
    """Under vLLM's own MultiConnector ours hears of no tokens, and the request runs with some."""
    engine = Engine(BlockTier(held))
    engine.begin(takes=0)
    assert engine.told()["state"] == "running", "it loads nothing"
    engine.run(24)
    told = engine.told()
    (attempt,) = told["attempts"]
    assert (attempt["elsewhere"], attempt["computed"], attempt["loaded"]) == (24, 18, {})
    assert told["holds"]
    assert tier_of(told, "tier-0")["why"] == why and attempt["milliseconds"]["load"] == 0.0
    assert [*lines(told)][:2] == [
        "request r: running, 42 prompt tokens",
        "  42 tokens = 0 own cache + 24 elsewhere (another connector, or part of a block) + "
        "18 computed",
    ]


def test_attempts_are_numbered_as_if_none_were_left_out() -> None:
    engine = Engine(BlockTier())
    engine.begin()
    told = engine.told()
    told["attempts"] = [{**told["attempts"][0], "preempted": number} for number in range(5)]
    told["attempts_left_out"] = 3
    numbered = [line for line in lines(told) if line.startswith("  attempt ")]
    assert numbered == [
        "  attempt 1 of 8",
        *(f"  attempt {number} of 8, after a preemption" for number in (2, 3, 4, 8)),
    ]


def test_a_tier_that_lacks_the_first_block_alone() -> None:
    engine = Engine(BlockTier(".xxxxxxxxx"))
    engine.begin()
    engine.run(0)
    told = tier_of(engine.told(), "tier-0")
    assert (told["why"], told["held_blocks"], told["miss"]) == ("miss", 9, 0)
    (line,) = (line for line in lines(engine.told()) if "tier-0" in line)
    assert line == ("    tier-0: 0 tokens, it does not have block 0; held 9 of 10 blocks asked for")


def test_the_times_of_a_request() -> None:
    engine = Engine(BlockTier("x" * 10))
    engine.begin()
    (notes,) = engine.known.all()
    (attempt,) = notes.attempts
    attempt.asked, attempt.joined, attempt.allocated = 10.0, 10.5, 11.0
    until_begun = {"lookup": 0.0, "notice": 0.0, "other_load": 500.0, "until_begun": 1000.0}
    (told,) = engine.told()["attempts"]
    assert told["milliseconds"] == {**until_begun, "load": None, "until_run": None}
    assert engine.told()["state"] == "loading"
    attempt.part_ended(0, None, 0, attempt.parts[0].times)
    attempt.part_usable(0, 10)
    engine.run(40)
    attempt.loaded_at, attempt.started_at, attempt.parts[0].seconds = 13.0, 14.0, 2.0
    (told,) = engine.told()["attempts"]
    assert told["milliseconds"] == {**until_begun, "load": 2000.0, "until_run": 4000.0}
    shown = [
        "request r: running, 42 prompt tokens",
        "  42 tokens = 0 own cache + 40 tier-0 + 2 computed",
        "    tier-0: 40 tokens, it loaded the blocks; held 10 of 10 blocks asked for; "
        "2000 ms (queue 0, load 0, check 0, copy 0, steps 2000)",
        "    ms: other load 500, until begun 1000, load 2000, until run 4000",
    ]
    assert [*lines(engine.told())] == shown and "waited_for" not in told
    attempt.waits_for = "r0\n"
    assert [*lines(engine.told())] == [*shown, r"    waited for the load of request r0\n"]
    assert notes.attempts[0].waited == 2.5


def test_the_engine_takes_less_of_its_own_cache() -> None:
    engine = Engine(BlockTier(""))
    engine.begin(computed=24)
    engine.run(16)
    (attempt,) = engine.told()["attempts"]
    assert (attempt["own_cache"], attempt["computed"], attempt["holds"]) == (16, 26, True)


def test_counts_that_do_not_agree_are_told() -> None:
    engine = Engine(BlockTier("x" * 10))
    engine.begin()
    (notes,) = engine.known.all()
    attempt = notes.attempts[0]
    attempt.part_ended(0, None, 0, attempt.parts[0].times)
    attempt.part_usable(0, 10)
    engine.run(20)
    assert engine.told()["attempts"][0]["holds"] is False
    assert engine.told()["holds"] is False
    assert "THE COUNTS DO NOT AGREE" in [*lines(engine.told())][-1]
    attempt.started = 40
    assert engine.told()["holds"] is True
    assert "THE COUNTS DO NOT AGREE" not in "".join(lines(engine.told()))
    notes.external += 4
    assert engine.told()["holds"] is False, "the engine counted other hits than the tiers"


@pytest.mark.parametrize(
    ("waves", "told"),
    [
        ([(range(4, 6), [1, 0]), (range(6, 9), [0, 1, 1])], (4, 5, 3, 5)),
        ([(range(2), [2, 2]), (range(2, 4), [1, 0])], (0, 4, 3, 3)),
        ([(range(2), [1, 1]), (range(2, 3), [1])], (0, 3, 3, None)),
    ],
)
def test_what_a_tier_answers_in_waves_is_one_answer(
    waves: list[tuple[range, list[int]]], told: tuple[int, int, int, int | None]
) -> None:
    raw = [(child, *wave) for wave in waves for child in (0, 1)]
    first, second = count_answers(raw, FakeRequest(), {})
    assert first[:5] == (0, *told) and second[:5] == (1, *told)


def test_a_tier_whose_load_is_of_no_use_since_another_failed_before() -> None:
    engine = Engine(BlockTier("x" * 5), BlockTier("x" * 10))
    engine.begin()
    (notes,) = engine.known.all()
    attempt = notes.attempts[0]
    times = attempt.parts[0].times
    attempt.part_ended(0, 2, 0, times)
    attempt.part_ended(5, None, 0, times)
    attempt.part_usable(0, 2)
    attempt.part_usable(5, 0)
    engine.run(8)
    told = engine.told()
    assert told["holds"]
    assert tier_of(told, "tier-0")["why"] == "load_failed"
    assert tier_of(told, "tier-1")["why"] == "earlier"
    assert told["attempts"][0]["computed"] == 34
