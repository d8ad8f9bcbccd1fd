"""Threads that leave the engine's compute cores to it."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.connection import Connection

import pytest

from tiers.threads import threads

ALLOWED = os.sched_getaffinity(0)


def _bound_worker(answer: Connection) -> None:
    """What an engine's worker does: bind its first thread to the cores that compute."""
    os.sched_setaffinity(0, {min(ALLOWED)})
    with threads(1, "test") as pool:
        answer.send((pool.submit(os.sched_getaffinity, 0).result(), os.sched_getaffinity(0)))


@pytest.mark.skipif(len(ALLOWED) < 2, reason="with one core there is no other")
def test_a_workers_threads_are_not_bound_to_the_cores_that_compute() -> None:
    ours, theirs = multiprocessing.Pipe()
    worker = multiprocessing.get_context("spawn").Process(target=_bound_worker, args=(theirs,))
    worker.start()
    spread, bound = ours.recv()
    worker.join()
    assert bound == {min(ALLOWED)}
    assert bound < spread <= ALLOWED


def test_what_an_operator_binds_a_whole_process_to_holds_for_its_threads() -> None:
    os.sched_setaffinity(0, {min(ALLOWED)})
    try:
        with threads(1, "test") as pool:
            assert pool.submit(os.sched_getaffinity, 0).result() == {min(ALLOWED)}
    finally:
        os.sched_setaffinity(0, ALLOWED)
