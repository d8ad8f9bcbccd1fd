"""What a round that is off its target is said to spend its time on."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import cast

import pytest

from bench.report import Case, measure, spent
from bench.sampling import WAITING, Sampler, _kind
from tests.support.clock import wait_for


def looked(ready: Callable[[dict[str, float]], bool]) -> dict[str, float]:
    """Shares of this process, as soon as they are as they should be."""
    with Sampler() as sampler:
        wait_for(lambda: ready(sampler.shares()))
    return sampler.shares()


def test_a_thread_in_a_system_call_is_busy_with_it() -> None:
    read, write = os.pipe()
    thread = threading.Thread(target=lambda: os.read(read, 1))
    thread.start()
    try:
        shares = looked(lambda shares: "system call" in shares)
    finally:
        os.write(write, b"x")
        thread.join()
        os.close(read)
        os.close(write)
    assert shares["system call"] > 0
    assert sum(shares.values()) == pytest.approx(1, abs=0.01)


def test_a_thread_that_waits_is_not_busy() -> None:
    gate, begun = threading.Event(), threading.Event()

    def idle() -> None:
        begun.set()
        gate.wait()

    thread = threading.Thread(target=idle)
    thread.start()
    begun.wait()
    wait_for(lambda: _kind(sys._current_frames()[thread.ident or 0]) == WAITING)
    gate.set()
    thread.join()


def test_a_thread_that_enters_a_function_is_on_no_line_yet() -> None:
    entering = SimpleNamespace(f_code=_kind.__code__, f_lineno=None)
    assert _kind(cast(FrameType, entering)) == "Python in bench/sampling.py"


def test_a_row_off_its_target_says_what_it_did() -> None:
    def slow() -> float:
        time.sleep(0.05)
        return 1.0

    missed = measure(Case("s", "c", "GB/s", slow, target=2.0, of="ours"), 1)
    assert missed.met is False
    assert "%" in spent(missed)
    met = measure(Case("s", "c", "GB/s", slow, target=0.5, of="ours"), 1)
    assert met.met is True and met.spent == {}
