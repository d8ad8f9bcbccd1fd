"""Simulations in several processes."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.connection import Connection, wait

from tiers.errors import KVTiersError
from tiers.tuning.machine import Machine
from tiers.tuning.report import Report
from tiers.tuning.simulation.sim_chain import SimChain
from tiers.tuning.simulation.simulate import simulate
from tiers.tuning.simulation.workload import Workload

SimJob = tuple[SimChain, float, float]
"""A chain, the fraction of the requests at which serving ends, and the one where counting
begins."""
INTERRUPT_SECONDS = 0.2
"""An interrupt is noticed within them."""


@contextmanager
def interrupts() -> Iterator[Callable[[], bool]]:
    """Hold an interrupt back, and report whether there was one; a second one ends all at once.

    Python raises an interrupt anywhere, and swallows it in its own work after a fork or in a
    destructor. Only a program's main thread can hold it back.
    """
    seen: list[int] = []

    def note(number: int, frame: object) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(seen)
    finally:
        signal.signal(signal.SIGINT, before)


class Simulations(AbstractContextManager["Simulations"]):
    """Reports of chains on one workload. A context manager; one thread.

    `processes`: how many simulate besides this one, which only waits; 0: this one simulates. They
    are forked, so that the workload is not copied; make this before any thread is started.
    `is_interrupted`: see `interrupts`.
    """

    def __init__(
        self,
        workload: Workload,
        machine: Machine,
        processes: int = 0,
        is_interrupted: Callable[[], bool] = lambda: False,
    ) -> None:
        self._is_interrupted = is_interrupted
        self._workload = workload
        self.machine = machine
        self._workers: list[_Worker] = []
        for _ in range(processes):
            pipes = [worker.pipe for worker in self._workers]
            self._workers.append(_Worker(workload, machine, pipes))

    def __exit__(self, *error: object) -> None:
        for worker in self._workers:
            worker.end()

    def run(
        self, jobs: Iterable[SimJob], is_over: Callable[[], bool] = lambda: False
    ) -> Iterator[tuple[SimJob, Report]]:
        """Each job once, with its report, as they end; once `is_over`, those that were begun.

        Raises KVTiersError if a process dies, KeyboardInterrupt, and what `simulate` raises.
        """
        rest = list(dict.fromkeys(jobs))[::-1]
        busy: dict[Connection, tuple[_Worker, SimJob]] = {}
        free = list(self._workers)
        while rest or busy:
            if self._is_interrupted():
                raise KeyboardInterrupt
            if is_over():
                rest.clear()
            if rest and not self._workers:
                job = rest.pop()
                yield job, _simulate(self._workload, self.machine, job)
            while rest and free:
                job, worker = rest.pop(), free.pop()
                worker.pipe.send(job)
                busy[worker.pipe] = worker, job
            for pipe in wait(list(busy), INTERRUPT_SECONDS) if busy else ():
                assert isinstance(pipe, Connection)
                worker, job = busy.pop(pipe)
                report = worker.answer()
                free.append(worker)
                yield job, report


class _Worker:
    """A forked process that simulates the jobs of its pipe."""

    def __init__(self, workload: Workload, machine: Machine, others: Sequence[Connection]) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        ours = [self.pipe, *others]
        self._process = context.Process(
            target=_serve, args=(workload, machine, theirs, ours), daemon=True
        )
        self._process.start()
        theirs.close()

    def answer(self) -> Report:
        try:
            found = self.pipe.recv()
        except EOFError:
            self._process.join()
            raise KVTiersError(
                f"a simulating process ended with status {self._process.exitcode}: if it was "
                "killed for memory, give a shorter trace or fewer processes"
            ) from None
        if isinstance(found, str):
            raise KVTiersError(found)
        assert isinstance(found, Report)
        return found

    def end(self) -> None:
        self.pipe.close()
        self._process.terminate()
        self._process.join()


def _serve(
    workload: Workload, machine: Machine, pipe: Connection, parents: Sequence[Connection]
) -> None:
    for one in parents:
        one.close()  # the parent's ends, which were forked too: else its death is no end of file
    # An interrupt from the terminal reaches this process too; its parent ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        while True:
            job = pipe.recv()
            try:
                answer: Report | str = _simulate(workload, machine, job)
            except KVTiersError as error:
                answer = str(error)
            pipe.send(answer)
    except (EOFError, OSError):
        return  # the parent is gone


def _simulate(workload: Workload, machine: Machine, job: SimJob) -> Report:
    chain, end, start = job
    part = workload.until(end)
    return simulate(part, workload.block_tokens, chain, machine, warm=start / end)
