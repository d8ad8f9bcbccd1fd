"""Threads for I/O, which may run on other cores than those that OpenMP computes on."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, ParamSpec, TypeVar

from tiers.concurrency.numa import bind, nodes
from tiers.errors import TierUnusable

P = ParamSpec("P")
T = TypeVar("T")
Item = TypeVar("Item")

_Call = tuple[Future[Any], Callable[[], Any]]

EXIT_SECONDS = 1.0
"""How long a process that ends waits for calls of its executors."""

_queues: weakref.WeakKeyDictionary[threading.Thread, SimpleQueue[_Call | None]]
_queues = weakref.WeakKeyDictionary()
"""What each thread of an executor is given."""
_ending = threading.Event()
"""Set once the process ends, and nothing runs any more what is submitted."""

BATCH_THREADS = 4
"""Threads by which a disk reads or writes a batch; 4 to 8 were fastest cold, and warm no slower
than one. A loader reads as many blocks for each, or one waits for another."""

IDLE_WAIT = 0.002
"""Seconds that a step with nothing to compute may wait for other threads, rather than spin."""

_BINDS = "OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"
"""Variables that make OpenMP (the standard, GNU's, Intel's) bind threads; nothing but the
environment tells whether it does."""
_BINDS_NOT = {"", "false", "none", "disabled"}


class IoExecutor(Executor):
    """An Executor of `count` daemon threads, named `kvtiers-NAME_N`, by `widen_affinity`: a call
    that hangs does not keep the process from its end. A process that ends waits `EXIT_SECONDS` for
    all calls of all executors, and leaves those that have not returned. The threads of an executor
    that nobody holds end with their calls."""

    def __init__(self, count: int, name: str) -> None:
        """The threads begin now: raises RuntimeError if they can't be had. Otherwise a `submit`, on
        the engine's thread perhaps, would raise it, and yet leave its call in the queue, for a
        thread that begins later."""
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._is_shut = False
        # Without it a call could be put behind the None that ends the threads, and never run.
        self._lock = threading.Lock()
        weakref.finalize(self, self._calls.put, None).atexit = False
        try:
            for number in range(count):
                thread = start_thread(partial(_serve, self._calls), f"{name}_{number}")
                self._threads.append(thread)
                _queues[thread] = self._calls
        except RuntimeError:
            self.shutdown()
            raise

    def bind(self, cpus: frozenset[int]) -> None:
        """Let its threads run on these processors alone; see `numa.bind`."""
        for thread in self._threads:
            if thread.native_id is not None:
                bind(cpus, thread.native_id)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue a call for the first thread that is free. Raises RuntimeError after `shutdown`, and
        when the process ends."""
        future: Future[T] = Future()
        with self._lock:
            if self._is_shut or _ending.is_set():
                raise RuntimeError("the executor has been shut down")
            self._calls.put((future, partial(fn, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls; cancel those that have not begun, or let them end. `wait` for all."""
        with self._lock:
            self._is_shut = True
            waiting = _drained(self._calls) if cancel_futures else []
            self._calls.put(None)
        for future, _ in waiting:
            future.cancel()
            future.set_running_or_notify_cancel()  # else `wait` would wait for it for ever
        if wait:
            for thread in self._threads:
                thread.join()


def _serve(calls: SimpleQueue[_Call | None]) -> None:
    while (call := calls.get()) is not None:
        future, run = call
        if future.set_running_or_notify_cancel():
            settle(future, run)
        del call, future, run  # an idle thread keeps nobody's memory
    calls.put(None)  # for the next thread


def _drained(calls: SimpleQueue[_Call | None]) -> list[_Call]:
    found: list[_Call] = []
    with suppress(Empty):
        while True:
            if (call := calls.get_nowait()) is not None:
                found.append(call)
    return found


def is_ending() -> bool:
    """Whether the process ends, and executors refuse what is submitted."""
    return _ending.is_set()


@atexit.register
def _leave_threads() -> None:
    """Let the threads end, and wait for them: one that is killed within a library that is being
    taken down could end the process by a signal."""
    _ending.set()
    until = time.monotonic() + EXIT_SECONDS
    threads = list(_queues.items())
    for _, calls in threads:
        calls.put(None)
    for thread, _ in threads:
        thread.join(max(0.0, until - time.monotonic()))


def wait_a_moment(in_flight: Collection[Future[Any]]) -> None:
    """Wait for any of these, `IDLE_WAIT` at most: an engine's step that has nothing to compute.

    An engine that steps on at once starves its other threads. Each time it lets go of the
    interpreter's lock it has the lock again before the thread that it woke has run: a first lookup
    in Redis took up to a second so, of which 10 ms were work.
    """
    if in_flight:
        wait(in_flight, IDLE_WAIT, FIRST_COMPLETED)


def spread(
    job: Callable[[Item], T], items: Sequence[Item], threads: Executor, count: int
) -> list[T]:
    """Run `job` on each item, on `count` threads at most, of which this is one; the results in
    order. Raises what a job raises, once none runs any more, and RuntimeError as `submit`."""
    # Each thread takes the next item when it is ready: with a share for each, all would wait
    # for the one that took longest. Warm loads gained 6%, direct stores from -1 to 11%.
    left = deque(enumerate(items))
    results: dict[int, T] = {}

    def run() -> None:
        while True:
            try:
                place, item = left.popleft()
            except IndexError:
                return
            results[place] = job(item)

    futures: list[Future[None]] = []
    try:
        futures.extend(threads.submit(run) for _ in range(min(count, len(items)) - 1))
        run()
    finally:
        left.clear()  # of what was interrupted, or has failed here
        wait(futures)  # a process that ends takes no more calls; none may outlive this one
    for future in futures:
        future.result()
    return [results[place] for place in range(len(items))]


def start_thread(run: Callable[[], object], name: str) -> threading.Thread:
    """Begin `run` on a thread of its own, named `kvtiers-NAME`, by `widen_affinity`. A daemon: one
    that hangs does not keep the process from its end. Raises RuntimeError without a thread."""

    def widened() -> None:
        widen_affinity()
        run()

    thread = threading.Thread(target=widened, name=f"kvtiers-{name}", daemon=True)
    thread.start()
    return thread


def in_background(call: Callable[[], T], name: str) -> Future[T]:
    """As `start_thread`, of a call whose result, or error, is asked for."""
    ended: Future[T] = Future()
    start_thread(partial(settle, ended, call), name)
    return ended


def close_result(opening: Future[Any]) -> None:
    """Close what a call has opened, if anything; for `add_done_callback`."""
    if not opening.cancelled() and (opened := opening.result()) is not None:
        opened.close()


def settle(future: Future[T], call: Callable[[], T]) -> None:
    """Run `call`, and hand its result to `future`, or whatever it raised."""
    try:
        future.set_result(call())
    except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
        future.set_exception(error)
    finally:
        del future, call  # or the error, whose traceback holds this frame, would keep their memory


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
    # Where the parent has ended, or /sys tells nothing, the thread stays bound, and works.
    with suppress(OSError, ValueError):
        ours = os.sched_getaffinity(0)
        near = os.sched_getaffinity(parent.pid) & _same_nodes(ours)
        if ours < near:
            os.sched_setaffinity(0, near)


def _same_nodes(cores: set[int]) -> set[int]:
    """All cores of the NUMA nodes that have some of these. Raises OSError and ValueError."""
    # Without NUMA nodes in /sys there is one.
    known = [*nodes().values()] or [set(range(os.cpu_count() or 1))]
    return set[int]().union(*(node for node in known if node & cores))


def require_unforked(pid: int, place: str) -> None:
    """Raise TierUnusable in a forked child of the process `pid`, which opened `place`: threads did
    not come along, so what is handed to them is waited for without end."""
    if os.getpid() != pid:
        raise TierUnusable(
            f"{place} was opened before this process was forked; start the process by spawn, or "
            "open the tier only after the fork"
        )
