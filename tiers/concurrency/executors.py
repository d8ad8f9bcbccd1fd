"""Threads for I/O, which may run on other cores than those that OpenMP computes on."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Collection
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

IDLE_WAIT = 0.002
"""Seconds that a step with nothing to compute may wait for other threads, rather than spin."""

_NODES = Path("/sys/devices/system/node")
_BINDS = "OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"
"""Variables that make OpenMP (the standard, GNU's, Intel's) bind threads; nothing but the
environment tells whether it does."""
_BINDS_NOT = {"", "false", "none", "disabled"}


def io_executor(count: int, name: str) -> ThreadPoolExecutor:
    """Make an executor of `count` threads, named `kvtiers-NAME_N`, by `widen_affinity`. They begin
    now: raises RuntimeError if they can't be had.

    Otherwise a `submit`, on the engine's thread perhaps, would raise it, and yet leave its call in
    the queue, for a thread that begins later.
    """
    executor = ThreadPoolExecutor(
        count, thread_name_prefix=f"kvtiers-{name}", initializer=widen_affinity
    )
    all_here = threading.Barrier(count)
    try:
        for _ in range(count):
            executor.submit(all_here.wait)
    except RuntimeError:
        all_here.abort()
        executor.shutdown()
        raise
    return executor


def wait_a_moment(under_way: Collection[Future[Any]]) -> None:
    """Wait for any of these, `IDLE_WAIT` at most: an engine's step that has nothing to compute.

    An engine that steps on at once starves its other threads. Each time it lets go of the
    interpreter's lock it has the lock again before the thread that it woke has run: a first lookup
    in Redis took up to a second so, of which 10 ms were work.
    """
    if under_way:
        wait(under_way, IDLE_WAIT, FIRST_COMPLETED)


def in_background(call: Callable[[], T], name: str) -> Future[T]:
    """Begin `call` on a thread of its own, named `kvtiers-NAME`, by `widen_affinity`. A daemon: a
    call that hangs does not keep the process from its end."""
    ended: Future[T] = Future()

    def run() -> None:
        widen_affinity()
        try:
            ended.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
            ended.set_exception(error)

    threading.Thread(target=run, name=f"kvtiers-{name}", daemon=True).start()
    return ended


def widen_affinity() -> None:
    """Let the calling thread run on more cores than those that OpenMP binds its process to.

    An engine on the CPU has OpenMP bind its worker's first thread to the cores that compute, and
    new threads inherit that: they would take time from the engine while other cores are idle. The
    worker's parent is not bound, so the parent's cores, on the NUMA nodes of the worker, are those
    that the operator meant. A binding of the whole process, parent included, holds.
    """
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None or not hasattr(os, "sched_setaffinity"):
        return
    if not any(os.environ.get(name, "").lower() not in _BINDS_NOT for name in _BINDS):
        return
    try:
        ours = os.sched_getaffinity(0)
        near = os.sched_getaffinity(parent.pid) & _same_nodes(ours)
        if ours < near:
            os.sched_setaffinity(0, near)
    except (OSError, ValueError):
        # The parent has ended, or /sys tells nothing: the thread stays bound, and works.
        return


def _same_nodes(cores: set[int]) -> set[int]:
    """All cores of the NUMA nodes that have some of these. Raises OSError and ValueError."""
    nodes = [_listed(file.read_text()) for file in _NODES.glob("node[0-9]*/cpulist")]
    # Without NUMA nodes in /sys there is one.
    known = nodes or [set(range(os.cpu_count() or 1))]
    return set[int]().union(*(node for node in known if node & cores))


def _listed(text: str) -> set[int]:
    """The kernel's list of numbers and ranges, such as `0-3,8`. Raises ValueError."""
    spans = [span.split("-") for span in text.strip().split(",") if span]
    return {core for span in spans for core in range(int(span[0]), int(span[-1]) + 1)}
