"""Workload: a trace's requests by runs of blocks, made once and simulated many times."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from operator import neg

from tiers.errors import TraceError
from tiers.traces.trace import TraceRequest
from tiers.tuning.simulation.spaces import Job, Part


@dataclass(frozen=True)
class Workload:
    """Requests whose prompts are paths of runs; nothing in it changes.

    A run is a longest row of blocks that every request has all of, in order, or none of. An id
    stands for its block and all before it, so two neighbours are in one run if they occur equally
    often. What decides on a run decides on all its blocks; only room ends within one. All lists
    have one item per request, but `lengths`, the blocks of each run, and `masks`.
    """

    block_tokens: int
    lengths: Sequence[int]
    masks: Sequence[int]
    """For each run as many ones as it has blocks."""
    times: Sequence[float]
    """Arrivals, in seconds."""
    tokens: Sequence[int]
    answers: Sequence[int]
    """Tokens of the answers."""
    prompts: Sequence[tuple[int, Sequence[int]]]
    """Full blocks of each prompt, and its runs."""
    answer_paths: Sequence[tuple[int, ...]]
    """The runs that each answer filled, where that was recorded; they go on from the prompt's."""

    def __len__(self) -> int:
        return len(self.times)

    @classmethod
    def of(cls, requests: Iterable[TraceRequest], block_tokens: int) -> Workload:
        """Compile requests. Raises TraceError where an id does not stand for its block and all
        before it."""
        requests, uses = list(requests), Counter[int]()
        for request in requests:
            uses.update(request.blocks)
            if request.answer_blocks:
                # Else a run could go on from a prompt into its answer.
                uses.update([*request.blocks, *request.answer_blocks])
        runs: dict[int, int] = {}
        lengths, prompts, answers = list[int](), [], []
        for number, request in enumerate(requests):
            blocks = request.blocks
            if request.answer_blocks:
                blocks = [*blocks, *request.answer_blocks]
            path = _path(number, blocks, uses, runs, lengths)
            prompt, depth = 0, 0
            while depth < len(request.blocks):
                depth += lengths[path[prompt]]
                prompt += 1
            prompts.append((len(request.blocks), path[:prompt]))
            answers.append(path[prompt:])
        return cls(
            block_tokens,
            lengths,
            [(1 << length) - 1 for length in lengths],
            [request.timestamp / 1000 for request in requests],
            [max(1, request.input_length) for request in requests],
            [request.output_length for request in requests],
            prompts,
            answers,
        )

    def until(self, share: float) -> Workload:
        """The requests up to this share of them, such as the first half."""
        lists = ("times", "tokens", "answers", "prompts", "answer_paths")
        count = int(len(self) * share)
        return replace(self, **{name: getattr(self, name)[:count] for name in lists})


def _path(
    number: int, blocks: Sequence[int], uses: Counter[int], runs: dict[int, int], lengths: list[int]
) -> tuple[int, ...]:
    """The runs of a prompt; new ones are added to `runs`, by their first block, and `lengths`."""
    path = []
    counts = list(map(uses.__getitem__, blocks))
    at, end = 0, len(blocks)
    while at < end:
        # Counts never grow with depth, so that the end of equal ones is found by bisection.
        stop = bisect_right(counts, -counts[at], lo=at, key=neg)
        run = runs.get(blocks[at])
        if run is None:
            run = runs[blocks[at]] = len(lengths)
            lengths.append(stop - at)
        elif lengths[run] != stop - at:
            raise TraceError(
                f"request {number + 1}: found block {blocks[at]} before other blocks than in an "
                "earlier request; ids must stand for a block and all blocks before it"
            )
        path.append(run)
        at = stop
    return tuple(path)


Offer = tuple[Job, Sequence[int]]
"""Blocks of a prompt in a row, and the runs whose first block is among them."""


@dataclass(slots=True, eq=False)
class Prompt:
    """A request in simulation: its prompt's runs, and its progress."""

    number: int
    arrival: float
    tokens: int
    answer: int
    blocks: int
    path: Sequence[int]
    has_begun: bool = False
    """It has its blocks of the engine's."""
    is_answering: bool = False
    done: int = 0
    """Tokens loaded or computed."""
    own: int = 0
    """Tokens from the engine's cache."""
    loaded: int = 0
    """Tokens from tiers."""
    loads: int = 0
    """Blocks that it set out to load."""
    offered: int = 0
    """Blocks offered to the tiers, or left out."""
    offers_from: int = 0
    """The first run of its path of which it offers blocks."""
    parts: Sequence[Part] = ()
    """Blocks that the step in flight completes."""
    reserved: int = 0
    """Blocks of the engine's that it holds beyond the prefix cache."""
    place: tuple[int, int] = (-1, 0)
    """The run, and the block in it, where it began to load."""
    woken: list[Prompt] = field(default_factory=list)
    """Prompts that wait for the load of this one."""

    @property
    def offered_path(self) -> Sequence[int]:
        return self.path[self.offers_from :]

    def offer(self, last: int, workload: Workload) -> Offer:
        """The blocks from `offered` on to `last`, which is beyond it and becomes `offered`."""
        self.parts = parts = self.between(self.offered, last, workload)
        job = parts, last - self.offered, self.offered_path
        self.offered = last
        return job, [run for run, blocks in parts if blocks & 1]

    def between(self, first: int, last: int, workload: Workload) -> list[Part]:
        parts: list[Part] = []
        depth = 0
        for run in self.path:
            if depth >= last:
                break
            blocks = workload.masks[run] & (1 << last - depth) - 1
            if depth < first:
                blocks &= -1 << first - depth
            if blocks:
                parts.append((run, blocks))
            depth += workload.lengths[run]
        return parts
