"""RateLimit: bytes over time."""

from __future__ import annotations

import threading
import time

from tiers.concurrency.rate_limit import RateLimit


def test_what_comes_behind_waits_for_its_time() -> None:
    throttle = RateLimit(rate=4e6, shares=2)
    began = time.monotonic()
    for _ in range(4):
        throttle.take(40_000)
    assert time.monotonic() - began >= 3 * 0.02


def test_threads_share_one_rate() -> None:
    throttle = RateLimit(rate=1e6)
    began = time.monotonic()
    threads = [threading.Thread(target=throttle.take, args=(20_000,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - began >= 3 * 0.02


def test_without_a_rate_nothing_waits_and_a_stopped_one_lets_go() -> None:
    RateLimit(rate=None).take(1 << 60)
    throttle = RateLimit(rate=1.0)
    throttle.take(1 << 30)
    stopped = threading.Timer(0.05, throttle.stop)
    stopped.start()
    throttle.take(1)  # would wait for 34 years
    stopped.join()
