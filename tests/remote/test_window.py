"""The window grows with the way to the server, and not beyond what is good for either end."""

from __future__ import annotations

from tiers.remote.window import LEAST_BYTES, MOST_BYTES, Window

FAST = 2_000_000_000


def settled(trip: float, rate: float) -> int:
    """The window after a while over a way of that many seconds and that rate, which it limits."""
    window = Window()
    for _ in range(20):
        window.answered(trip)
        reached = min(rate, window.num_bytes / trip)
        window.moved(64 << 20, (64 << 20) / reached)
    return window.num_bytes


def test_before_anything_is_known_it_is_small() -> None:
    assert Window().num_bytes == LEAST_BYTES


def test_loopback_gets_little_and_a_long_way_what_it_holds() -> None:
    assert settled(50e-6, FAST) == LEAST_BYTES
    assert settled(2e-3, FAST) > 3.8e-3 * FAST  # from 2 MiB, which alone allow half of it
    assert settled(0.1, FAST) == MOST_BYTES


def test_one_slow_answer_changes_nothing() -> None:
    window = Window()
    window.answered(1e-3)
    window.moved(FAST, 1.0)
    before = window.num_bytes
    window.answered(2.0)
    assert window.num_bytes == before
