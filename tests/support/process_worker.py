"""A rank of the replay engine in a process of its own, so that all that crosses is pickled."""

from __future__ import annotations

import multiprocessing
import traceback
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from typing import Any

import torch

from tests.support.replay import ReplayModel
from tests.support.replay.worker import LocalRank, OpenConnector
from tiers.lab.replay.requests import Step, StepOutput


def fresh() -> ForkServerContext:
    """Begins processes with nothing of this one but what they are given, as spawned ones are, and
    with what ranks import, which takes a spawned one two seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "tests.support.replay_chains"])
    return context


class ProcessWorker:
    """A `Rank` in a process of its own; steps and outputs cross as in a real engine."""

    def __init__(
        self, model: ReplayModel, num_blocks: int, rank: int, open_connector: OpenConnector
    ) -> None:
        context = fresh()
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=_serve, args=(theirs, model, num_blocks, rank, open_connector), daemon=True
        )
        self.process.start()
        theirs.close()
        self._handshake = self._receive()

    def handshake(self) -> Any:
        return self._handshake

    def begin(self, step: Step) -> None:
        """Send the step."""
        self._pipe.send(step)

    def end(self, step: Step) -> StepOutput:
        """Receive its results. Raises RuntimeError with the rank's own traceback."""
        output = self._receive()
        assert isinstance(output, StepOutput)
        return output

    def _receive(self) -> Any:
        failed, value = self._pipe.recv()
        if failed:
            raise RuntimeError(f"a worker failed:\n{value}")
        return value

    def close(self) -> None:
        """End the process."""
        self._pipe.send(None)
        self.process.join(timeout=30)
        self._pipe.close()


def _serve(
    pipe: Connection, model: ReplayModel, num_blocks: int, rank: int, open_connector: OpenConnector
) -> None:
    torch.set_num_threads(1)
    worker = LocalRank(model, num_blocks, rank, open_connector)
    try:
        pipe.send((False, worker.handshake()))
        while (step := pipe.recv()) is not None:
            pipe.send((False, worker.end(step)))
        worker.close()
    except (AssertionError, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError):
        pipe.send((True, traceback.format_exc()))
