"""The replay engine's requests, and what one step of it runs and brings."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tiers.lab.replay.blocks import STATE, Tables, chain_hash


class Status(enum.Enum):
    """Where a request is."""

    WAITING = enum.auto()
    LOADING = enum.auto()
    RUNNING = enum.auto()
    ANSWERING = enum.auto()
    """Where time passes for a whole answer at once."""
    FINISHED = enum.auto()


@dataclass(eq=False)
class ReplayRequest:
    """A request; also the `Request` that connectors see."""

    request_id: str
    prompt: list[int]
    max_tokens: int
    block_tokens: int
    cache_salt: str = ""
    kv_transfer_params: dict[str, Any] | None = None
    kv_hints: Any = None
    tokens: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    tables: Tables = field(default_factory=list)
    num_computed_tokens: int = 0
    status: Status = Status.WAITING
    loaded_tokens: int = 0
    has_run: bool = False
    num_preemptions: int = 0
    skip_reading_prefix_cache: bool = False

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        self.hash_blocks()

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and answer so far."""
        return len(self.tokens)

    @property
    def num_prompt_tokens(self) -> int:
        """What of them is the prompt."""
        return len(self.prompt)

    @property
    def output(self) -> list[int]:
        """The answer so far."""
        return self.tokens[len(self.prompt) :]

    def hash_blocks(self, unknown: int = 0) -> None:
        """Extend `block_hashes` to all full blocks but for so many tokens, not known yet."""
        size = self.block_tokens
        for i in range(len(self.block_hashes), (len(self.tokens) - unknown) // size):
            parent = self.block_hashes[-1] if self.block_hashes else b""
            part = self.tokens[i * size : (i + 1) * size]
            self.block_hashes.append(chain_hash(parent, part, self.cache_salt))

    def get_block_ids(self) -> tuple[list[int], ...]:
        """The request's block tables, as connectors ask for them."""
        return tuple(list(table) for table in self.tables)


@dataclass(frozen=True)
class NewRequest:
    """A request in the first step that runs it."""

    req_id: str
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int


@dataclass
class CachedRequests:
    """Requests that ran before; parallel lists."""

    req_ids: list[str] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)
    new_block_ids: list[tuple[list[int], ...] | None] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Work:
    """Tokens of one request that a step computes."""

    request_id: str
    tokens: list[int]
    start: int
    tables: tuple[list[int], ...]
    samples: bool


@dataclass
class BlockState:
    """The states that a step leaves at the ends of blocks."""

    boundary_state_offloads: dict[str, list[tuple[int, int, int]]] = field(default_factory=dict)


@dataclass
class Step:
    """What one step runs: the `SchedulerOutput` of connectors, and the workers' work.
    `moves_states`: the step leaves nothing in the blocks from which it takes states."""

    scheduled_new_reqs: list[NewRequest] = field(default_factory=list)
    scheduled_cached_reqs: CachedRequests = field(default_factory=CachedRequests)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    finished_req_ids: set[str] = field(default_factory=set)
    work: list[Work] = field(default_factory=list)
    kv_connector_metadata: Any = None
    kv_connector_block_state: BlockState = field(default_factory=BlockState)
    moves_states: bool = False


@dataclass
class StepOutput:
    """What the workers made of a step, aggregated over ranks."""

    sums: dict[str, int] = field(default_factory=dict)
    finished_recving: set[str] = field(default_factory=set)
    finished_sending: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)
    invalid_block_ids: set[int] = field(default_factory=set)
    kv_connector_worker_meta: Any = None


class Runnable(Protocol):
    """A request that a step can run."""

    request_id: str
    has_run: bool

    def get_block_ids(self) -> tuple[list[int], ...]:
        """The request's block tables."""
        ...


def describe(requests: Sequence[ReplayRequest]) -> str:
    """One line per request, for the error of an engine that stopped moving."""
    return "\n".join(
        f"{r.request_id}: {r.status.name}, {r.num_computed_tokens}/{r.num_tokens} tokens"
        for r in requests
    )


def describe_run(
    request: Runnable, step: Step, added: Tables, start: int, resumed: bool = False
) -> None:
    """Tell a step that it runs a request from its token `start` on, which was given the blocks
    `added`. `resumed`: it was preempted before."""
    if not request.has_run:
        request.has_run = True
        step.scheduled_new_reqs.append(
            NewRequest(request.request_id, request.get_block_ids(), start)
        )
        return
    cached = step.scheduled_cached_reqs
    if resumed:
        cached.resumed_req_ids.add(request.request_id)
    blocks = request.get_block_ids() if resumed else tuple(added)
    cached.req_ids.append(request.request_id)
    cached.new_block_ids.append(blocks if any(blocks) else None)
    cached.num_computed_tokens.append(start)


def up_to_a_block(request: ReplayRequest, windows: Sequence[int | None], count: int) -> int:
    """How many of the next `count` tokens of a request a step computes.

    Where there are states, steps of a prompt end where blocks do, one of them at the last full one.
    """
    if STATE not in windows:
        return count
    start, size = request.num_computed_tokens, request.block_tokens
    last = request.num_tokens - request.num_tokens % size
    if start >= max(request.num_prompt_tokens, request.num_tokens - 1):
        return count
    if start + count < last:
        return count - count % size
    return last - start if start < last else count


def hand_over(
    request: ReplayRequest, step: Step, windows: Sequence[int | None], computed: int
) -> None:
    """Tell a step which states it leaves of a request, if it ends at a block's end."""
    blocks, rest = divmod(computed, request.block_tokens)
    if rest or blocks > len(request.block_hashes) or STATE not in windows:
        return
    step.kv_connector_block_state.boundary_state_offloads[request.request_id] = [
        (group, request.tables[group][blocks - 1], computed)
        for group, window in enumerate(windows)
        if window == STATE
    ]
