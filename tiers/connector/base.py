"""What an engine and a connector say to each other.

The shapes are vLLM's, written down as protocols, so that its scheduler and runner (or the replay
engine) can pass their own objects unchanged. A connector has one role: the SCHEDULER half decides,
the WORKER half moves bytes. `OffloadingConnectorMetadata` crosses to every worker once per step,
`OffloadingWorkerMetadata` crosses back; both are plain dataclasses that pickle.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from tiers.connector.media import MediaMarks, NoMedia
from tiers.connector.stats import Measures, merge
from tiers.wrappers.guard import Health


class Role(enum.Enum):
    """Which half of a connector an object is."""

    SCHEDULER = 0
    WORKER = 1


class KVGroup(NamedTuple):
    """Layers that share a block table: one KV cache group of the engine.

    `tokens`: per paged block. `window`: how many tokens attention looks back, its own included;
    None: all. The engine keeps what a window reaches, and no more.
    """

    tokens: int
    window: int | None = None


def no_mark(request: Request) -> bytes:
    """For engines whose block hashes say all that a request's KV depends on."""
    return b""


class LateFacts(Protocol):
    """Facts of a worker that are not there when it is made."""

    def known(self, seconds: float = 0.0) -> Mapping[str, str] | None:
        """The facts; None: they are not known yet, also after waiting for so many seconds.

        Asked by one thread, for the first time when the paged KV is registered.
        """
        ...


@dataclass(frozen=True)
class EngineInfo:
    """What a connector must know of its engine.

    `facts`: everything but layout and rank that makes KV interchangeable (see `namespace`).
    `block_tokens`: tokens per block, whole in every group. `hash_tokens`: tokens per entry of
    `Request.block_hashes`. `num_blocks`: blocks in each worker's paged KV. `rank`: of this worker,
    0 in the scheduler. `kv_events`: whether the engine takes events; none are kept for one that
    does not. `caches_prefixes`: whether requests find in its paged KV what others computed or
    loaded. `drops_last`: whether it computes the last block of a prefix that it finds, for a
    drafter that needs what computing leaves behind. `groups`: its KV cache groups; none named:
    one, of full attention. `mark`: what a request's KV depends on beside its block hashes and its
    media, in at most 16 bytes. `media`: marks of requests with images and the like, which block
    hashes have by names only. `step_tokens`: what one step computes at most; 0: not known.
    `weights_change`: whether it is made to take other weights while it runs, so that its facts do
    not name them. `late_facts`: more facts, on a worker; a tier whose blocks others may find opens
    once they are known. `host`: where this process is, by a name that tells hosts, and containers
    with file systems of their own, apart; empty: not known. `ranks_here`: ranks that share this
    host's memory, those of the engine's replicas too; 0: all of this engine.
    """

    facts: Mapping[str, str]
    block_tokens: int
    hash_tokens: int
    num_blocks: int
    rank: int = 0
    world_size: int = 1
    kv_events: bool = False
    caches_prefixes: bool = True
    drops_last: bool = False
    groups: tuple[KVGroup, ...] = ()
    mark: Callable[[Request], bytes] = no_mark
    step_tokens: int = 0
    weights_change: bool = False
    media: MediaMarks = NoMedia()  # noqa: RUF009 - it has no state
    late_facts: LateFacts | None = None
    host: str = ""
    ranks_here: int = 0

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        """Its groups, one at least."""
        return self.groups or (KVGroup(self.block_tokens),)

    @property
    def loads_whole(self) -> bool:
        """Whether a load that fails in part is of no use at all.

        An engine can't tell which request a paged block is of where it has several groups. And
        what precedes a block that failed can't end a prefix where attention has a window, since
        its own window was not loaded.
        """
        return len(self.kv_groups) > 1 or any(g.window is not None for g in self.kv_groups)


class Request(Protocol):
    """A request as the scheduler sees it."""

    @property
    def request_id(self) -> str: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_computed_tokens(self) -> int: ...
    @property
    def block_hashes(self) -> Sequence[bytes]:
        """Chained hashes of the full blocks of all known tokens; it only grows."""
        ...


class Blocks(Protocol):
    """A request's blocks in the paged KV."""

    def get_block_ids(self) -> tuple[list[int], ...]: ...


class NewRequest(Protocol):
    """A request in the first step that runs it."""

    @property
    def req_id(self) -> str: ...
    @property
    def block_ids(self) -> tuple[list[int], ...]: ...
    @property
    def num_computed_tokens(self) -> int: ...


class CachedRequests(Protocol):
    """Requests that ran before; parallel lists."""

    @property
    def req_ids(self) -> Sequence[str]: ...
    @property
    def resumed_req_ids(self) -> set[str]: ...
    @property
    def new_block_ids(self) -> Sequence[tuple[list[int], ...] | None]: ...
    @property
    def num_computed_tokens(self) -> Sequence[int]: ...


class SchedulerOutput(Protocol):
    """What one step will run."""

    @property
    def scheduled_new_reqs(self) -> Sequence[NewRequest]: ...
    @property
    def scheduled_cached_reqs(self) -> CachedRequests: ...
    @property
    def num_scheduled_tokens(self) -> Mapping[str, int]: ...


class ConnectorOutput(Protocol):
    """What the workers of one step sent back, aggregated over ranks."""

    kv_connector_worker_meta: Any


@dataclass(frozen=True)
class Hello:
    """What a worker says of itself, before the first request or soon after.

    `namespace`: digest under which its blocks are known; empty for a tier whose blocks only this
    engine finds. `payload_bytes`: bytes of one block.
    `host`: see `EngineInfo`. `slots`: how many it has; None: as many as the chain asks for.
    `lacks`: why it has no memory for the host tiers; empty: it has.
    """

    rank: int
    namespace: bytes
    payload_bytes: int
    host: str = ""
    slots: int | None = None
    lacks: str = ""


class StoreItem(NamedTuple):
    """One block to store: its key, its slot, and the paged block to gather the slot's bytes from.

    `source` is None where another connector of the chain gathers the slot, or did so earlier.
    """

    key: bytes
    slot: int
    source: int | None


class LoadItem(NamedTuple):
    """One block to load into paged block `target`; `slot` holds it, None: ask the store."""

    key: bytes
    target: int
    slot: int | None


@dataclass(frozen=True)
class StoreJob:
    """Blocks of one request on their way into a tier. `generation`: that of their keys."""

    job_id: int
    items: list[StoreItem]
    generation: bytes = b""


@dataclass(frozen=True)
class LoadJob:
    """Blocks of one request on their way to the engine, within so many seconds. `generation`:
    that of their keys."""

    job_id: int
    request_id: str
    items: list[LoadItem]
    seconds: float = math.inf
    generation: bytes = b""


@dataclass
class OffloadingConnectorMetadata:
    """One step's orders to the workers of one tier.

    `jobs_to_flush`: store jobs whose paged blocks are about to be overwritten.
    `idle`: the step computes nothing, so a worker may wait a moment for its transfers.
    """

    reqs_to_load: list[LoadJob] = field(default_factory=list)
    reqs_to_store: list[StoreJob] = field(default_factory=list)
    jobs_to_flush: list[int] = field(default_factory=list)
    idle: bool = False


@dataclass
class JobResult:
    """How a job ended: on how many ranks, which of its items failed on any of them, and how many
    seconds moving them took on the slowest. `lost`: items that the tier was asked for and has no
    more; others that failed it may well have, when there is time."""

    ranks: int
    failed: set[int]
    seconds: float = 0.0
    lost: set[int] = field(default_factory=set)


@dataclass
class OffloadingWorkerMetadata:
    """What the workers of one tier finished since the last step, and, where that has changed,
    whether the tier works for each rank."""

    jobs: dict[int, JobResult] = field(default_factory=dict)
    hellos: dict[int, Hello] = field(default_factory=dict)
    health: dict[int, Health] = field(default_factory=dict)
    unusable: str | None = None
    measures: Measures = field(default_factory=dict)

    def aggregate(self, other: OffloadingWorkerMetadata) -> OffloadingWorkerMetadata:
        """Fold another rank's metadata into this one, which is returned."""
        for job_id, theirs in other.jobs.items():
            ours = self.jobs.setdefault(job_id, JobResult(0, set()))
            ours.ranks += theirs.ranks
            ours.failed |= theirs.failed
            ours.lost |= theirs.lost
            ours.seconds = max(ours.seconds, theirs.seconds)
        self.hellos.update(other.hellos)
        self.health.update(other.health)
        self.unusable = self.unusable or other.unusable
        merge(self.measures, other.measures)
        return self


@dataclass
class TransferResults:
    """Requests whose transfers ended on a worker; failed loads are among the received ones too."""

    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class BlockEvent:
    """Blocks of one KV cache group that a tier now holds (`stored`), or no longer holds.

    `hashes`: the engine's own. `block_tokens`: per block of the group. `group`: None, where the
    model has one only. Tiers that drop blocks
    elsewhere (a disk shared by processes, a server with a time to live) say so only when a load
    finds it out.
    """

    tier: str
    stored: bool
    hashes: tuple[bytes, ...]
    block_tokens: int
    group: int | None = None


class Copy(Protocol):
    """A copy under way."""

    def wait(self) -> None:
        """Return when the bytes have arrived; raise what made the copy fail."""
        ...


class Copier(Protocol):
    """Moves blocks between the engine's paged KV and rows of host memory (see `tiers.gpu`).

    `payload_bytes`: bytes of one block over all layers. `layout`: text that differs whenever the
    same bytes would mean something else.
    """

    @property
    def payload_bytes(self) -> int: ...
    @property
    def layout(self) -> str: ...
    @property
    def pin(self) -> bool:
        """Whether host memory should be pinned for this device."""
        ...

    def fence(self) -> object:
        """Mark what the engine's device has been told to do so far."""
        ...

    def gather(self, blocks: Sequence[int], rows: torch.Tensor, slots: Sequence[int]) -> Copy:
        """Begin copying paged `blocks[i]` to `rows[slots[i]]`, after all work queued so far."""
        ...

    def scatter(
        self, rows: torch.Tensor, slots: Sequence[int], blocks: Sequence[int], after: object
    ) -> None:
        """Copy `rows[slots[i]]` to paged `blocks[i]` once the fence `after` has passed; blocks."""
        ...

    def close(self) -> None:
        """Wait for copies under way and release threads and streams."""
        ...
