"""The replay engine's requests, its steps, and the results of one."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tiers.lab.replay.blocks import Tables, chain_hash
from tiers.traces.trace import TraceRequest


class Status(enum.Enum):
    """Where a request is."""

    WAITING = enum.auto()
    LOADING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclass(eq=False)
class ReplayRequest:
    """A request; also the `Request` that connectors see.

    `local_tokens`: those found in the engine's own cache; `loaded_tokens`: those to be loaded.
    `is_computing`: a step in flight computes some of its tokens.
    """

    request_id: str
    prompt: list[int]
    max_tokens: int
    block_tokens: int
    cache_salt: str = ""
    kv_transfer_params: dict[str, Any] | None = None
    tokens: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    tables: Tables = field(default_factory=list)
    num_computed_tokens: int = 0
    status: Status = Status.WAITING
    local_tokens: int = 0
    loaded_tokens: int = 0
    is_computing: bool = False
    has_run: bool = False

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        self.hash_blocks()

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and answer so far."""
        return len(self.tokens)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt)

    @property
    def output(self) -> list[int]:
        """The answer so far."""
        return self.tokens[len(self.prompt) :]

    def contents(self, start: int, stop: int) -> list[int]:
        """The tokens from `start` to `stop`, as a worker needs them."""
        return self.tokens[start:stop]

    def hash_blocks(self, unknown: int = 0) -> None:
        """Extend `block_hashes` to all full blocks, without the last `unknown` tokens."""
        size = self.block_tokens
        for i in range(len(self.block_hashes), (len(self.tokens) - unknown) // size):
            parent = self.block_hashes[-1] if self.block_hashes else b""
            part = self.tokens[i * size : (i + 1) * size]
            self.block_hashes.append(chain_hash(parent, part, self.cache_salt))

    def get_block_ids(self) -> tuple[list[int], ...]:
        return tuple(list(table) for table in self.tables)


class TracedRequest(ReplayRequest):
    """A request of a trace, whose tokens are counts alone: `ids` are its full blocks'. Its answer
    takes some time of a clock, in place of a step for each token.

    `arrival`: seconds since the trace began. `answer_ids`: blocks of the answer, where they were
    recorded; not in `ids` until `answer`. `counts`: the report counts it. `loaded_by`: tokens of
    each tier.
    """

    def __init__(self, number: int, request: TraceRequest, block_tokens: int, counts: bool) -> None:
        salt = request.salt or ""
        super().__init__(f"request-{number}", [], request.output_length, block_tokens, salt)
        self.arrival = request.timestamp / 1000
        self.ids, self.answer_ids = list(request.blocks), list(request.answer_blocks)
        self.block_hashes = _hashes(self.ids)
        self.counts = counts
        self.loaded_by: dict[str, int] = {}
        self._prompt_tokens = self._num_tokens = max(1, request.input_length)

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and, once it has ended, answer."""
        return self._num_tokens

    @property
    def num_prompt_tokens(self) -> int:
        return self._prompt_tokens

    def contents(self, start: int, stop: int) -> list[int]:
        """The ids of the blocks that the tokens from `start` to `stop` complete."""
        return self.ids[start // self.block_tokens : stop // self.block_tokens]

    def end_load(self) -> None:
        """Take the tokens that did not arrive from the tiers: the last of the load."""
        lost = self.local_tokens + self.loaded_tokens - self.num_computed_tokens
        for tier in reversed(list(self.loaded_by)):
            taken = min(lost, self.loaded_by[tier])
            self.loaded_by[tier] -= taken
            lost -= taken

    def answer(self) -> None:
        self.ids += self.answer_ids
        self.block_hashes += _hashes(self.answer_ids)
        self._num_tokens += self.max_tokens


def _hashes(ids: Sequence[int]) -> list[bytes]:
    return [hashlib.blake2b(b"%d" % block, digest_size=32).digest() for block in ids]


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
    """Tokens of one request that a step computes; `tokens`: see `contents` of the request."""

    request_id: str
    tokens: list[int]
    start: int
    tables: tuple[list[int], ...]
    samples: bool


@dataclass
class Step:
    """A step: the `SchedulerOutput` of connectors, and the workers' work."""

    scheduled_new_reqs: list[NewRequest] = field(default_factory=list)
    scheduled_cached_reqs: CachedRequests = field(default_factory=CachedRequests)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    finished_req_ids: set[str] = field(default_factory=set)
    work: list[Work] = field(default_factory=list)
    kv_connector_metadata: Any = None


@dataclass
class StepOutput:
    """The results of a step, of one rank or of all."""

    sums: dict[str, int] = field(default_factory=dict)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)
    invalid_block_ids: set[int] = field(default_factory=set)
    kv_connector_worker_meta: Any = None
