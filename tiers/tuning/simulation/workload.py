"""Workload: a trace's requests by runs of blocks, made once and simulated many times."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
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
    have one item per request, but `lengths`, the blocks of each run, `masks` and `parts`.
    """

    block_tokens: int
    lengths: Sequence[int]
    masks: Sequence[int]
    """For each run as many ones as it has blocks."""
    parts: Sequence[Part]
    """Each run, whole."""
    times: Sequence[float]
    """Arrivals, in seconds."""
    tokens: Sequence[int]
    answers: Sequence[int]
    """Tokens of the answers."""
    prompts: Sequence[Job]
    """Full blocks of each prompt, all at once."""
    answer_paths: Sequence[tuple[int, ...]]
    """The runs that each answer filled, where that was recorded; they go on from the prompt's."""

    @property
    def references(self) -> int:
        """Blocks of all prompts."""
        return sum(blocks for _, blocks, _ in self.prompts)

    def __len__(self) -> int:
        return len(self.times)

    @classmethod
    def of(
        cls, requests: Iterable[TraceRequest], block_tokens: int, single: bool = False
    ) -> Workload:
        """Compile requests. `single`: every block is a run of its own, which is slower and changes
        nothing but what ends within a run.

        Raises TraceError where an id does not stand for its block and all before it.
        """
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
            path = _path(number, blocks, uses, runs, lengths, single)
            prompt, depth = 0, 0
            while depth < len(request.blocks):
                depth += lengths[path[prompt]]
                prompt += 1
            prompts.append((len(request.blocks), path[:prompt]))
            answers.append(path[prompt:])
        masks = [(1 << length) - 1 for length in lengths]
        parts = list(enumerate(masks))
        return cls(
            block_tokens,
            lengths,
            masks,
            parts,
            [request.timestamp / 1000 for request in requests],
            [max(1, request.input_length) for request in requests],
            [request.output_length for request in requests],
            [([parts[run] for run in path], blocks, path) for blocks, path in prompts],
            answers,
        )

    def part(self, start: float, stop: float) -> Workload:
        """The requests from one fraction of all to another, such as the second half."""
        some = slice(int(len(self) * start), int(len(self) * stop))
        return replace(
            self,
            times=self.times[some],
            tokens=self.tokens[some],
            answers=self.answers[some],
            prompts=self.prompts[some],
            answer_paths=self.answer_paths[some],
        )


def _path(
    number: int,
    blocks: Sequence[int],
    uses: Counter[int],
    runs: dict[int, int],
    lengths: list[int],
    single: bool,
) -> tuple[int, ...]:
    """The runs of a prompt; new ones are added to `runs`, by their first block, and `lengths`."""
    path = []
    counts = list(map(uses.__getitem__, blocks))
    at, end = 0, len(blocks)
    while at < end:
        # Counts never grow with depth, so that the end of equal ones is found by bisection.
        stop = at + 1 if single else bisect_right(counts, -counts[at], lo=at, key=neg)
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
