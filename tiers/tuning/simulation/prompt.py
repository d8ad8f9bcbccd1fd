"""Prompt: one request on its way through the simulation."""

from __future__ import annotations

from collections.abc import Sequence

from tiers.tuning.simulation.spaces import Part
from tiers.tuning.simulation.workload import Workload

Offer = tuple[list[Part], Sequence[int]]
"""Blocks of a prompt in a row, as parts of runs, and the runs whose first block is among them."""


class Prompt:
    """A request: its prompt's runs, and how far it is.

    `has_begun`: it has its blocks of the engine's. `done`: tokens loaded or computed. `offered`:
    blocks offered to the tiers; `parts`: those that the step under way completes. `reserved`:
    blocks of the engine's that it holds beyond the prefix cache. `place`: the run, and the block in
    it, where it began to load. `woken`: prompts that wait for what this one loads.
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
        "number",
        "offered",
        "parts",
        "path",
        "place",
        "reserved",
        "tokens",
        "woken",
    )

    def __init__(
        self,
        number: int,
        arrival: float,
        tokens: int,
        answer: int,
        path: Sequence[int],
        blocks: int,
    ) -> None:
        self.number = number
        self.arrival = arrival
        self.tokens = tokens
        self.answer = answer
        self.path = path
        self.blocks = blocks
        self.done = self.offered = self.reserved = 0
        self._at = self._depth = 0  # the run that `offered` is in, and the blocks before that run
        self.place = (-1, 0)
        self.parts: list[Part] = []
        self.has_begun = self.is_answering = False
        self.woken: list[Prompt] = []

    def offer(self, last: int, workload: Workload) -> Offer:
        """The blocks from `offered` on to `last`, which is beyond it and becomes `offered`."""
        path, lengths, masks = self.path, workload.lengths, workload.masks
        first, at, depth = self.offered, self._at, self._depth
        while (stop := depth + lengths[path[at]]) <= first:
            at += 1
            depth = stop
        begin = at if depth == first else at + 1
        parts: list[Part] = []
        while True:
            run = path[at]
            blocks = masks[run] if stop <= last else (1 << last - depth) - 1
            if depth < first:
                blocks = blocks >> first - depth << first - depth
            parts.append((run, blocks))
            if stop >= last:
                break
            at += 1
            depth = stop
            stop += lengths[path[at]]
        self._at, self._depth, self.offered = at, depth, last
        self.parts = parts
        return parts, path[begin : at + 1]

    def first(self, blocks: int, workload: Workload) -> list[Part]:
        """The first blocks."""
        parts: list[Part] = []
        for run in self.path:
            if blocks <= 0:
                break
            length = workload.lengths[run]
            mask = workload.masks[run]
            parts.append((run, mask if blocks >= length else (1 << blocks) - 1))
            blocks -= length
        return parts
