"""A get that is given up in its midst, over a slow link to a real server."""

from __future__ import annotations

import pytest

from tests.support.redis_verbs import get, opened, put
from tests.support.servers import RedisServer
from tests.support.topologies import Link
from tiers.errors import TierUnavailable
from tiers.store import Waiting
from tiers.testing import Memory, make_key

PAYLOAD = 256 << 10
BLOCKS = 64


@pytest.mark.fault
def test_a_get_that_is_given_up_keeps_what_came_and_asks_no_more_of_the_link(
    shared_server: RedisServer,
) -> None:
    keys = [make_key() for _ in range(BLOCKS)]
    with Link(shared_server) as link, opened(link.url, PAYLOAD, timeout="60s") as store:
        put(store, *keys, payload_bytes=PAYLOAD)
        connections, before = link.accepted, link.passed
        link.rate = 5e6
        memory = Memory(keys, PAYLOAD)
        with Waiting(lambda: 60.0 if link.passed - before < 4 * PAYLOAD else 0.0):
            hits = store.get(memory.blocks)
        assert 0 < sum(hits) < BLOCKS // 2 and hits == sorted(hits, reverse=True)
        assert all(memory.holds(index) for index, hit in enumerate(hits) if hit)
        link.heal()
        # What was still to come would be taken for the next answer.
        assert get(store, *keys, payload_bytes=PAYLOAD) == [True] * BLOCKS
        assert link.accepted == connections + 1
        assert link.passed - before < (BLOCKS + BLOCKS // 2) * PAYLOAD


@pytest.mark.fault
def test_nothing_is_asked_for_whom_nobody_waits(shared_server: RedisServer) -> None:
    key = make_key()
    with Link(shared_server) as link, opened(link.url) as store:
        put(store, key)
        before = link.passed
        with Waiting(lambda: 0.0), pytest.raises(TierUnavailable):
            get(store, key)
        assert link.passed == before
        assert get(store, key) == [True]
