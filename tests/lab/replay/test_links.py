"""Links of a replay: what waits for what."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tests.support.topologies import wait_until
from tiers.lab.replay.clock import Clock
from tiers.lab.replay.links import QUANTUM_BYTES, Link, LinkedStore
from tiers.store import Block
from tiers.testing import MemoryStore
from tiers.tuning.machine import TierProfile


def test_a_load_has_turns_between_the_blocks_of_a_store_that_shares_its_link() -> None:
    clock = Clock()
    profile = TierProfile(
        load_bandwidth=2 * QUANTUM_BYTES, store_bandwidth=QUANTUM_BYTES, shared_link=True
    )
    link = Link(clock, profile, block_bytes=QUANTUM_BYTES)
    ended: dict[str, float] = {}

    def begin(name: str, transfer: Callable[[int, float], None], blocks: int) -> None:
        def work() -> None:
            transfer(blocks, 0.0)
            ended[name] = clock.now()

        sleepers = clock.sleepers
        threading.Thread(target=work, daemon=True).start()
        wait_until(lambda: clock.sleepers > sleepers)

    begin("store", link.store, 10)
    begin("load", link.load, 2)
    while len(ended) < 2:
        wait_until(lambda: clock.sleepers == 2 - len(ended))
        moment = clock.next_wake()
        if moment is not None:
            clock.advance(moment)
    assert ended == {"load": 3.0, "store": 11.0}


def test_what_a_store_has_is_not_sent_again() -> None:
    """It is offered again a minute after, to begin its time to live anew."""
    clock = Clock()
    clock.stop()  # nobody sleeps
    link = Link(clock, TierProfile(load_bandwidth=1, store_bandwidth=1), block_bytes=1)
    store = LinkedStore(MemoryStore(), link)
    one, other = (Block(key, memoryview(bytes(8))) for key in (b"one", b"other"))
    assert store.put([one]) == [True] and link.stores.busy == 1
    assert store.put([one, other]) == [True, True] and link.stores.busy == 2
