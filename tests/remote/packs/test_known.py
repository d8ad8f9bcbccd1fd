"""What is known of packs is believed for a minute, since a pack may go."""

from __future__ import annotations

from tests.support.clock import Clock
from tiers.remote.packs.known import SECONDS, KnownPacks
from tiers.remote.packs.pack import pack_index, parse_index
from tiers.testing import make_key


def test_an_index_is_believed_for_a_minute_at_most_and_for_half_of_it_at_least() -> None:
    for first in (0.0, 0.3, 0.6, 0.9):
        clock = Clock(0.0)
        known = KnownPacks(clock)
        clock.now = first * SECONDS
        key = make_key()
        known.add(key, parse_index(pack_index([key], 4096)))
        clock.now += SECONDS / 2 - 0.1
        assert known.get(key) is not None
        clock.now += SECONDS / 2 + 0.2
        assert known.get(key) is None
