"""What a request may say of its prompt's blocks, and what is not obeyed."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.fake_requests import FakeRequest
from tiers.connector.policy.request_params import (
    MAX_ACTIONS,
    NO_HINTS,
    UNLIMITED,
    Demote,
    Hints,
    RequestLimits,
    RequestReader,
    Retain,
)

MANY = {str(number): 0 for number in range(33)}
"""What is reported field by field takes the engine's thread a while for each."""


def ours(said: Any) -> Any:
    return FakeRequest(kv_transfer_params={"kvtiers": {"hints": said}})


def passed_on(*actions: Any, **more: Any) -> Any:
    """A request with an engine's envelope, as vLLM 0.32 makes it."""
    request: Any = FakeRequest(**more)
    request.kv_hints = SimpleNamespace(protocol_version="1", message_id="m", actions=[*actions])
    return request


def routed(*actions: Any, **more: Any) -> Any:
    """A request with the envelope that Dynamo's router makes, as its engine gets it."""
    envelope = {"protocol_version": "0.1", "message_id": "m", "actions": [*actions]}
    return FakeRequest(kv_transfer_params={"kv_hint": envelope, **more})


def routed_action(name: Any, payload: Any, version: Any = "1") -> dict[str, Any]:
    return {**vars(action(name, payload, version))}


def action(name: Any, payload: Any, version: Any = "1") -> Any:
    fields = {"action_type": name, "action_version": version, "payload": payload}
    return SimpleNamespace(action_id="a", **fields)


def read(caplog: pytest.LogCaptureFixture, request: Any) -> tuple[RequestLimits, str]:
    """A request's limits, and what the log says of them."""
    caplog.clear()
    return RequestReader().limits(request), caplog.text


@pytest.mark.parametrize(
    "request_",
    [
        FakeRequest(),
        FakeRequest(kv_transfer_params={"kvtiers": {"store": False}}),
        FakeRequest(kv_transfer_params={"do_remote_prefill": True}),
        FakeRequest(kv_transfer_params=["odd"]),
        FakeRequest(kv_transfer_params={"kvtiers": "odd"}),
        ours({}),
        passed_on(),
    ],
)
def test_a_request_that_says_nothing_has_no_hints(request_: Any) -> None:
    reader = RequestReader()
    assert reader.hints(request_) is NO_HINTS
    assert not reader.ignored


@pytest.mark.parametrize(
    ("request_", "hints"),
    [
        (ours({"retain": {"ttl": 60}}), Hints(Retain(ttl=60))),
        (ours({"demote": {}}), Hints(demote=Demote())),
        (passed_on(action("retain", {"ttl": 0.5})), Hints(Retain(ttl=0.5))),
        (passed_on(action("demote", {})), Hints(demote=Demote())),
        (routed(routed_action("retain", {"ttl": 7})), Hints(Retain(ttl=7))),
        (routed(routed_action("demote", {}), do_remote_prefill=True), Hints(demote=Demote())),
        (routed(), NO_HINTS),
    ],
)
def test_hints_are_read_from_all_places(request_: Any, hints: Hints) -> None:
    reader = RequestReader()
    assert reader.hints(request_) == hints
    assert not reader.ignored


def test_the_engines_envelope_counts_where_both_say_something() -> None:
    said = {"kvtiers": {"hints": {"retain": {"ttl": 5}}}}
    request = passed_on(action("retain", {"ttl": 6}), kv_transfer_params=said)
    assert RequestReader().hints(request) == Hints(Retain(ttl=6))
    assert RequestReader().hints(
        routed(routed_action("retain", {"ttl": 6}), **said)
    ).retain == Retain(ttl=6)


@pytest.mark.parametrize(
    ("request_", "named"),
    [
        (ours({"retain": {}}), "retain.ttl"),
        (ours({"retain": {"ttl": "60"}}), "retain.ttl"),
        (ours({"retain": {"ttl": True}}), "retain.ttl"),
        (ours({"retain": {"ttl": 0}}), "retain.ttl"),
        (ours({"retain": {"ttl": -1}}), "retain.ttl"),
        (ours({"retain": {"ttl": 86_401}}), "retain.ttl"),
        (ours({"retain": {"ttl": float("inf")}}), "retain.ttl"),
        (ours({"retain": {"ttl": float("nan")}}), "retain.ttl"),
        (ours({"retain": {"ttl": 1, "tier": "cpu"}}), "retain.tier"),
        (ours({"retain": None}), "retain"),
        (ours({"retain": 60}), "retain"),
        (ours({"demote": True}), "demote"),
        (ours({"demote": {"to": "disk"}}), "demote.to"),
        (ours({"prefetch": {}}), "max_tokens 1"),
        (ours({"pin": {}}), "use retain or demote"),
        (ours({3: {}}), "use retain or demote"),
        (ours({"retain": MANY}), "retain: more than 32 items"),
        (ours({"retain": {"ttl": [0] * 33}}), "retain: more than 32 items"),
        (ours({"retain": {"x" * 1000: 0}}), "retain.ttl: Field required; retain.xxx"),
        (ours(["retain"]), "hints"),
        (ours("retain"), "hints"),
        (passed_on(action("retain", {"ttl": 1}, "2")), "version '2'"),
        (passed_on(action("retain", {"ttl": 1}, None)), "version None"),
        (passed_on(action("kvcr.pin", {})), "kvcr.pin"),
        (passed_on(action([], {})), "use retain or demote"),
        (passed_on(action("retain", {"ttl": 1}, [0] * 33)), "version a list"),
        (passed_on("odd"), "use retain or demote"),
        (routed(routed_action("kv.fetch", {"block_hashes": [1]}, "1.0")), "list the connector"),
        (routed(routed_action("retain", {"ttl": 1}, "1.0")), "version '1.0'"),
        (routed("odd"), "use retain or demote"),
        (FakeRequest(kv_transfer_params={"kv_hint": "odd"}), "kv_hint"),
        (FakeRequest(kv_transfer_params={"kv_hint": {"actions": {}}}), "kv_hint"),
    ],
)
def test_what_is_malformed_or_unknown_is_ignored_counted_and_said(
    request_: Any, named: str, caplog: pytest.LogCaptureFixture
) -> None:
    reader = RequestReader()
    with caplog.at_level(logging.WARNING):
        assert reader.hints(request_) == NO_HINTS
        assert reader.hints(request_) == NO_HINTS
    assert reader.ignored == 2
    (line,) = caplog.messages
    assert named in line and len(line) < 400


def test_one_bad_hint_spoils_neither_the_others_nor_the_limits(
    caplog: pytest.LogCaptureFixture,
) -> None:
    request = FakeRequest(
        kv_transfer_params={
            "kvtiers": {"max_load_tokens": 8, "hints": {"pin": {}, "retain": {"ttl": 9}}}
        }
    )
    assert RequestReader().hints(request) == Hints(Retain(ttl=9))
    limits, problem = read(caplog, request)
    assert (limits.max_load_tokens, problem) == (8, "")
    assert read(caplog, ours("odd")) == (UNLIMITED, "")


@pytest.mark.parametrize(
    "request_",
    [
        ours({str(number): {} for number in range(100_000)}),
        passed_on(*[action("pin", {})] * 100_000),
        routed(*[routed_action("pin", {})] * 100_000),
    ],
    ids=["ours", "passed on", "routed"],
)
def test_a_long_list_is_not_read_to_its_end(request_: Any) -> None:
    reader = RequestReader()
    assert reader.hints(request_) == NO_HINTS
    assert reader.ignored == MAX_ACTIONS + 1


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": True}, ["odd"]])
def test_a_request_that_says_nothing_has_no_limits(
    caplog: pytest.LogCaptureFixture, params: Any
) -> None:
    assert read(caplog, FakeRequest(kv_transfer_params=params)) == (UNLIMITED, "")
    other: Any = SimpleNamespace(request_id="r")
    assert read(caplog, other) == (UNLIMITED, ""), "engines without such parameters"


def test_limits_are_read(caplog: pytest.LogCaptureFixture) -> None:
    said = {"max_load_tokens": 12, "tiers": ["cpu", "disk"], "store": False}
    limits, problem = read(caplog, FakeRequest(kv_transfer_params={"kvtiers": said}))
    assert problem == ""
    assert limits.max_load_tokens == 12
    assert limits.tiers == ("cpu", "disk")
    assert limits.store is False


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ("all", "kvtiers"),
        ({"max_load_tokens": "12"}, "max_load_tokens"),
        ({"max_load_tokens": -1}, "max_load_tokens"),
        ({"max_load_tokens": True}, "max_load_tokens"),
        ({"tiers": "cpu"}, "tiers"),
        ({"tiers": [1]}, "tiers"),
        ({"store": "no"}, "store"),
        ({"stores": False}, "stores"),
        (MANY, "more than 32 items"),
        ({"tiers": ["cpu"] * 33}, "more than 32 items"),
        ({"tiers": [0] * 33}, "more than 32 items"),
    ],
)
def test_malformed_limits_are_none_and_the_problem_is_named(
    caplog: pytest.LogCaptureFixture, said: Any, named: str
) -> None:
    limits, problem = read(caplog, FakeRequest(kv_transfer_params={"kvtiers": said}))
    assert limits == UNLIMITED
    assert named in problem
    if isinstance(said, dict) and "store" not in said:
        unstored = FakeRequest(kv_transfer_params={"kvtiers": {**said, "store": False}})
        limits, problem = read(caplog, unstored)
        assert limits == RequestLimits(store=False), "what must not be stored never is"
        assert named in problem
