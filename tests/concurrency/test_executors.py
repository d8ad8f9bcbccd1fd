"""Threads that may leave the engine's compute cores to it."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import wait
from multiprocessing.connection import Connection

import pytest

from tiers.concurrency.executors import IoExecutor, in_background, spread

ALLOWED = os.sched_getaffinity(0)


def _worker(answer: Connection, env: dict[str, str]) -> None:
    """What an engine's worker does: its first thread is bound to the cores that compute."""
    for name in ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"):
        os.environ.pop(name, None)
    os.environ.update(env)
    os.sched_setaffinity(0, {min(ALLOWED)})
    with IoExecutor(1, "test") as pool:
        cores = pool.submit(os.sched_getaffinity, 0).result()
    assert in_background(lambda: os.sched_getaffinity(0), "test").result() == cores
    answer.send(cores)


def cores_of_a_workers_thread(**env: str) -> set[int]:
    ours, theirs = multiprocessing.Pipe()
    worker = multiprocessing.get_context("spawn").Process(target=_worker, args=(theirs, env))
    worker.start()
    cores: set[int] = ours.recv()
    worker.join()
    return cores


@pytest.mark.skipif(len(ALLOWED) < 2, reason="with one core there is no other")
def test_a_workers_threads_are_not_bound_to_the_cores_that_compute() -> None:
    assert {min(ALLOWED)} < cores_of_a_workers_thread(OMP_PROC_BIND="true") <= ALLOWED


@pytest.mark.parametrize("env", [{}, {"OMP_PROC_BIND": "false"}])
def test_what_an_operator_binds_a_worker_to_holds_for_its_threads(env: dict[str, str]) -> None:
    assert cores_of_a_workers_thread(**env) == {min(ALLOWED)}


def test_what_an_operator_binds_a_whole_engine_to_holds_for_its_threads() -> None:
    os.sched_setaffinity(0, {min(ALLOWED)})
    try:
        assert cores_of_a_workers_thread(OMP_PROC_BIND="true") == {min(ALLOWED)}
    finally:
        os.sched_setaffinity(0, ALLOWED)


@pytest.mark.parametrize("had", [0, 2])
def test_threads_that_can_t_be_had_now_are_told_now(
    had: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, begun = threading.Thread.start, list[threading.Thread]()

    def start(thread: threading.Thread) -> None:
        if len(begun) == had:
            raise RuntimeError("can't start new thread")
        begun.append(thread)
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="new thread"):
        IoExecutor(4, "test")
    assert not any(thread.is_alive() for thread in begun)


def test_threads_that_are_started_are_all_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with IoExecutor(4, "test") as pool:
        monkeypatch.setattr(threading.Thread, "start", None)
        together = threading.Barrier(4)
        for place in [pool.submit(together.wait, 10) for _ in range(4)]:
            place.result()


def test_what_is_left_of_an_executor_ends() -> None:
    pool = IoExecutor(2, "test")
    done = pool.submit(threading.get_ident)
    del pool
    for thread in [one for one in threading.enumerate() if one.ident == done.result()]:
        thread.join(60)
        assert not thread.is_alive()


def test_a_shut_executor_cancels_what_waits_and_takes_no_more() -> None:
    go_on, begun = threading.Event(), threading.Barrier(2)
    pool = IoExecutor(1, "test")
    first = pool.submit(lambda: begun.wait(60) >= 0 and go_on.wait(60))
    second = pool.submit(int)
    begun.wait(60)
    pool.shutdown(wait=False, cancel_futures=True)
    assert second.cancelled()
    assert not wait([second], 20).not_done, "who waits for it goes on"
    assert not first.done()
    with pytest.raises(RuntimeError, match="shut down"):
        pool.submit(int)
    go_on.set()
    pool.shutdown()
    assert first.result()


def test_an_error_that_is_read_and_gone_keeps_no_memory() -> None:
    class Memory:
        pass

    memory = Memory()
    gone = weakref.ref(memory)

    def fail(_: Memory) -> None:
        raise SystemExit("of a store")

    with IoExecutor(1, "test") as pool:
        failed = pool.submit(fail, memory)
        del memory
        assert isinstance(failed.exception(), SystemExit)
        assert pool.submit(int).result() == 0  # the thread is through with it
        del failed
    assert gone() is None


_SUBMITS_LATE = """
import atexit

def submit():
    try:
        pool.submit(print, "ran").result(60)
    except RuntimeError:
        print("refused")

atexit.register(submit)  # the last registered comes first: ours leave the threads before this
from tiers.concurrency.executors import IoExecutor, in_background, spread
pool = IoExecutor(1, "test")
"""


def test_what_an_ending_process_submits_is_refused_and_not_waited_for() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _SUBMITS_LATE], capture_output=True, text=True, timeout=50
    )
    assert (ended.stdout, ended.stderr) == ("refused\n", "")


def test_work_that_is_interrupted_ends_with_what_is_in_flight() -> None:
    """As by Ctrl-C of a command that reads a tier."""
    here, done = threading.current_thread(), list[int]()

    def job(item: int) -> None:
        if threading.current_thread() is here:
            raise KeyboardInterrupt
        time.sleep(0.01)
        done.append(item)

    with IoExecutor(3, "test") as threads, pytest.raises(KeyboardInterrupt):
        spread(job, range(400), threads, 4)
    assert len(done) < 200
