"""Fixtures that several test files share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from servers import RedisServer, binaries

pytest.register_assert_rewrite("tiers.testing")  # so that a failure shows what was compared


@pytest.fixture(scope="session", params=sorted(binaries()))
def shared_server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    """A server that stays up for all tests; use keys of your own and leave it as it is."""
    with RedisServer(binaries()[request.param]) as server:
        yield server


@pytest.fixture(params=sorted(binaries()))
def server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    """A server of the test's own, to be killed, hung or filled."""
    with RedisServer(binaries()[request.param]) as server:
        yield server
