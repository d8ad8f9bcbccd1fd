"""What a request may say of its own loading and storing."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.fake_requests import FakeRequest
from tiers.connector.policy.request_limits import UNLIMITED, read_limits


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": True}, ["odd"]])
def test_a_request_that_says_nothing_has_no_limits(params: Any) -> None:
    assert read_limits(FakeRequest(kv_transfer_params=params)) == (UNLIMITED, None)
    other: Any = object()
    assert read_limits(other) == (UNLIMITED, None), "engines without such parameters"


def test_limits_are_read() -> None:
    said = {"max_load_tokens": 12, "tiers": ["cpu", "disk"], "store": False}
    limits, problem = read_limits(FakeRequest(kv_transfer_params={"kvtiers": said}))
    assert problem is None
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
    ],
)
def test_malformed_limits_are_none_and_the_problem_is_named(said: Any, named: str) -> None:
    limits, problem = read_limits(FakeRequest(kv_transfer_params={"kvtiers": said}))
    assert limits == UNLIMITED
    assert problem is not None and named in problem
