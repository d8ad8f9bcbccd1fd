"""What is kept of requests is bounded, in number and in bytes, whatever the engine does."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from tests.support.fake_requests import FakeRequest, first_step
from tests.support.kept import kept
from tiers.connector.policy.choice import Choice
from tiers.explain import explanations
from tiers.explain.accounts import lines
from tiers.explain.explanations import Explanations, answer
from tiers.explain.notes import MAX_ATTEMPTS

TIERS = 4


def request(number: int) -> Any:
    return FakeRequest(f"request-{number:06}", num_tokens=64)


def wordy(number: int) -> Any:
    """Whose client chose a long name, and sends much in its trace context."""
    one: Any = FakeRequest(f"{number:06}\u2603".ljust(5000), num_tokens=64)
    one.trace_headers = {"traceparent": "00-", "tracestate": "x" * 5000 * (number % 2)}
    return one


def serve(known: Explanations, one: Any, attempts: int = 1) -> None:
    """One request from its arrival to its end, in which all tiers answer and load."""
    known.arrived(one)
    for _ in range(attempts):
        notes = known.asked(one, 0)
        for tier in range(TIERS):
            notes.watch(tier, lambda blocks: [0] * len(blocks))(range(16))
        shares = {tier: [range(4 * tier, 4 * tier + 4)] for tier in range(TIERS)}
        known.begins(one, Choice(64, True, shares), shares, 64, {})
        known.runs(first_step(one.request_id, 0, 64))
    known.ended(one)


def ask(known: Explanations, **question: Any) -> list[str]:
    return [account["request"] for account in answer(known, question)]


def test_the_last_requests_are_kept() -> None:
    known = Explanations([*map(str, range(TIERS))], 4, max_requests=5)
    for number in range(20):
        serve(known, request(number))
    assert [one.request_id for one in known.all()] == [f"request-{n:06}" for n in range(15, 20)]


@pytest.mark.parametrize("request_", [request, wordy])
def test_their_bytes_are_counted_and_bounded(
    monkeypatch: pytest.MonkeyPatch, request_: Callable[[int], Any]
) -> None:
    """By an estimate that is no less than what they take."""
    monkeypatch.setattr(explanations, "MAX_BYTES", 200_000)
    known = Explanations([*map(str, range(TIERS))], 4)
    for number in range(400):
        serve(known, request_(number), attempts=1 + number % 3)
    held = known.all()
    assert 0 < len(held) < 400
    real = sum(deep_size(one, set()) for one in held)
    estimate = sum(one.bytes for one in held)
    assert real <= estimate < 3 * real
    assert 200_000 - 2 * max(one.bytes for one in held) < estimate <= 200_000


def deep_size(thing: Any, seen: set[int]) -> int:
    if id(thing) in seen or isinstance(thing, type) or callable(thing):
        return 0
    seen.add(id(thing))
    inner = gc.get_referents(thing) if gc.is_tracked(thing) or isinstance(thing, tuple) else []
    slots = getattr(type(thing), "__slots__", ())
    inner += [getattr(thing, slot) for slot in slots if hasattr(thing, slot)]
    return sys.getsizeof(thing) + sum(deep_size(one, seen) for one in inner)


def test_a_request_that_begins_again_and_again_stays_small() -> None:
    known = Explanations([*map(str, range(TIERS))], 4)
    serve(known, request(0), attempts=100)
    (one,) = known.all()
    assert (len(one.attempts), one.left_out) == (MAX_ATTEMPTS, 100 - MAX_ATTEMPTS)
    assert one.external == sum(one.hits.values()) == 6400
    (told,) = answer(known, {"last": 1})
    numbers = [line.split()[1] for line in lines(told) if line.startswith("  attempt ")]
    assert numbers == ["1", "2", "3", "4", "97", "98", "99", "100"]


def test_too_many_requests_in_flight_are_not_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explanations, "MAX_IN_FLIGHT", 3)
    known = Explanations(["0"], 4)
    before = kept(known)
    for number in range(10):
        known.arrived(request(number))
        known.asked(request(number), 0).begin(64, 0, 0)
    assert len(known.all()) == 3
    for number in range(10):
        known.ended(request(number))
    assert len(known.all()) == 3
    assert kept(known) == before + 3, "those that ended"


def test_questions() -> None:
    known = Explanations([*map(str, range(TIERS))], 4)
    for number in range(12):
        serve(known, request(number))
    for number, notes in enumerate(known.all()):
        notes.attempts[0].loaded_at = (notes.attempts[0].allocated or 0.0) + number % 7
    assert ask(known, request="request-000003") == ["request-000003"]
    assert ask(known, request="request-00001") == ["request-000010", "request-000011"]
    assert ask(known, last=2) == ["request-000010", "request-000011"]
    assert ask(known, slowest=1) == ["request-000006"]
    assert ask(known, request="nobody") == []


@pytest.mark.parametrize("parameters", [{"last": 0}, {"last": "1"}, {"drop": 1}, {"last": [1]}])
def test_what_is_no_question_is_refused(parameters: Any) -> None:
    with pytest.raises(ValidationError):
        answer(Explanations(["0"], 4), parameters)


def test_a_status_is_told_as_the_engine_says_it() -> None:
    known = Explanations(["0"], 4)
    one = SimpleNamespace(request_id="r", num_prompt_tokens=4, num_tokens=4)
    one.status = SimpleNamespace(name="FINISHED_ABORTED")
    known.arrived(one)
    known.ended(one)
    assert known.all()[0].ended == "aborted"
