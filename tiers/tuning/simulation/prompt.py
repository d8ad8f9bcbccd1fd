"""Prompt: one request on its way through the simulation."""

from __future__ import annotations

from collections.abc import Sequence


class Prompt:
    """A request: its prompt's runs, and how far it is.

    `has_begun`: it has its blocks of the engine's. `done`: tokens loaded or computed. `offered`:
    blocks offered to the tiers. `reserved`: blocks of the engine's that it holds beyond the prefix
    cache. `place`: the run, and the block in it, where it began to load. `woken`: prompts that
    wait for what this one loads.
    """

    __slots__ = (
        "answer",
        "arrival",
        "blocks",
        "done",
        "has_begun",
        "is_answering",
        "number",
        "offered",
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
        self.place = (-1, 0)
        self.has_begun = self.is_answering = False
        self.woken: list[Prompt] = []
