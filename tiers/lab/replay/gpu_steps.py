"""Steps of the replay's GPUs, and what came of the requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from tiers.connector.multi.multi_connector import MultiConnectorMetadata
from tiers.lab.replay.requests import Step, describe_run
from tiers.lab.replay.trace_requests import TracedRequest
from tiers.tuning.report import Served


@dataclass
class Chunk:
    """Tokens of a request that a step computes, from `start` to `stop`."""

    request: TracedRequest
    start: int
    stop: int

    def full(self, block_tokens: int) -> range:
        """The blocks of the request that it completes."""
        stop = min(self.stop // block_tokens, len(self.request.ids))
        return range(self.start // block_tokens, stop)


@dataclass
class GpuStep:
    """A step on a GPU, until the moment `ends`; `orders`: what the chain does with it."""

    chunks: list[Chunk]
    began: float
    ends: float
    orders: MultiConnectorMetadata


class Gpus:
    """The steps under way, one on each of some GPUs at most."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._steps: list[GpuStep] = []

    @property
    def has_idle(self) -> bool:
        """Whether a step could begin."""
        return len(self._steps) < self._count

    def begin(self, step: GpuStep) -> None:
        """A step takes a GPU."""
        self._steps.append(step)

    def ends(self) -> list[float]:
        """When the steps end."""
        return [step.ends for step in self._steps]

    def take_ended(self, now: float) -> GpuStep | None:
        """The step that was over first, if any is; its GPU is idle."""
        first = min(self._steps, key=lambda step: step.ends, default=None)
        if first is None or first.ends > now:
            return None
        self._steps.remove(first)
        return first


@dataclass
class Outcome:
    """What came of the requests that count. Tokens by what they are from; `served`: in the
    order in which prompts ended; `busy`: seconds of all GPUs together."""

    requests: int = 0
    prompt_tokens: int = 0
    own_tokens: int = 0
    computed_tokens: int = 0
    tier_tokens: Counter[str] = field(default_factory=Counter)
    served: list[Served] = field(default_factory=list)
    busy: float = 0.0

    def count(self, request: TracedRequest, moment: float) -> None:
        """The prompt of a request that counts has ended."""
        self.requests += 1
        self.prompt_tokens += request.num_tokens
        self.own_tokens += request.own
        self.computed_tokens += request.computed
        self.tier_tokens.update(request.loaded_by)
        loaded = sum(request.loaded_by.values())
        self.served.append(Served(moment - request.arrival, request.computed, loaded))


def take(request: TracedRequest, budget: int, chunks: list[Chunk]) -> int:
    """Let a step compute as much of a request as its budget allows; how many tokens that is."""
    start = request.num_computed_tokens
    stop = min(request.num_tokens, start + budget)
    request.on_gpu = True
    request.num_computed_tokens = stop
    chunks.append(Chunk(request, start, stop))
    return stop - start


def answer_step(request: TracedRequest, new_pages: Sequence[int]) -> Step:
    """A step that computes a whole answer, which has ended."""
    chunk = Chunk(request, request.prompt_tokens, request.num_computed_tokens)
    step = Step(num_scheduled_tokens={request.request_id: chunk.stop - chunk.start})
    describe_run(request, step, [list(new_pages)], chunk.start)
    return step
