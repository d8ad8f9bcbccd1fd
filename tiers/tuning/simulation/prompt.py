"""Prompt: one request on its way through the simulation."""

from __future__ import annotations

from collections.abc import Sequence

from tiers.tuning.simulation.spaces import Job, Part
from tiers.tuning.simulation.workload import Workload

Offer = tuple[Job, Sequence[int]]
"""Blocks of a prompt in a row, and the runs whose first block is among them."""


class Prompt:
    """A request: its prompt's runs, and how far it is. `whole`: all its full blocks at once.

    `has_begun`: it has its blocks of the engine's. `done`: tokens loaded or computed; `own` and
    `loaded`: those that the engine's cache and tiers had. `offered`: blocks offered to the tiers;
    `parts`: those that the step under way completes. `reserved`: blocks of the engine's that it
    holds beyond the prefix cache. `place`: the run, and the block in it, where it began to load.
    `woken`: prompts that wait for what this one loads.
    """

    __slots__ = (
        "_at",
        "_depth",
        "answer",
        "arrival",
        "blocks",
        "done",
        "has_begun",
        "is_answering",
        "loaded",
        "number",
        "offered",
        "own",
        "parts",
        "path",
        "place",
        "reserved",
        "tokens",
        "whole",
        "woken",
    )

    def __init__(self, number: int, arrival: float, tokens: int, answer: int, job: Job) -> None:
        self.number = number
        self.arrival = arrival
        self.tokens = tokens
        self.answer = answer
        self.whole = job
        _, self.blocks, self.path = job
        self.done = self.own = self.loaded = self.offered = self.reserved = 0
        self._at = self._depth = 0  # a run at or before `offered`, and the blocks before that run
        self.place = (-1, 0)
        self.parts: Sequence[Part] = ()
        self.has_begun = self.is_answering = False
        self.woken: list[Prompt] = []

    def offer(self, last: int, workload: Workload) -> Offer:
        """The blocks from `offered` on to `last`, which is beyond it and becomes `offered`."""
        first = self.offered
        self.offered = last
        if not first and last == self.blocks:
            self.parts = self.whole[0]
            return self.whole, self.path
        path, lengths = self.path, workload.lengths
        at, depth = self._at, self._depth
        while (stop := depth + lengths[run := path[at]]) <= first:
            at += 1
            depth = stop
        begin = at if depth == first else at + 1
        before = (1 << first - depth) - 1
        parts: list[Part] = []
        while stop < last:
            parts.append((run, workload.masks[run] ^ before) if before else workload.parts[run])
            before = 0
            at += 1
            run = path[at]
            depth = stop
            stop += lengths[run]
        parts.append((run, (1 << last - depth) - 1 ^ before))
        self.parts = parts
        self._at, self._depth = at, depth
        return (parts, last - first, path), path[begin : at + 1]

    def first(self, blocks: int, workload: Workload) -> list[Part]:
        """The first blocks."""
        parts: list[Part] = []
        for run in self.path:
            if blocks <= 0:
                break
            part = workload.parts[run]
            length = workload.lengths[run]
            parts.append(part if blocks >= length else (run, (1 << blocks) - 1))
            blocks -= length
        return parts
