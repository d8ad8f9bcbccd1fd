"""Messages between the two halves of a tier.

`OffloadingConnectorMetadata` crosses to every worker once per step, `OffloadingWorkerMetadata`
crosses back; both are plain dataclasses that pickle.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

from tiers.contract.stats import Measures, merge
from tiers.store import Prefix
from tiers.wrappers.guard import Health

T = TypeVar("T", bound=tuple[Any, ...])


@dataclass(frozen=True)
class WorkerHandshake:
    """A worker's report of itself, before the first request or soon after.

    `namespace`: digest under which its blocks are known; empty for a tier whose blocks only this
    engine finds. `payload_bytes`: bytes of one block.
    `host`: see `EngineInfo`. `slots`: how many it has; None: as many as the chain asks for.
    `shortage`: why it has no memory for the host tiers; empty: it has. `weights`: what names the
    model's weights to other engines; empty: not known.
    """

    rank: int
    namespace: bytes
    payload_bytes: int
    host: str = ""
    slots: int | None = None
    shortage: str = ""
    weights: str = ""


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


class PromptPlace(NamedTuple):
    """Where a job's blocks are in their prompt, for stores with `Packs`: keys in a row, from the
    beginning of a `group` of so many blocks on, and of each item its number among them. `packed`:
    of each part of a block, whether the store keeps such together. Empty: no store asks."""

    keys: Sequence[bytes] = ()
    places: Sequence[int] = ()
    group: int = 1
    packed: Sequence[bool] = (True,)

    def prefixes(self, space: bytes, count: int) -> Sequence[Prefix | None]:
        """Of each of a job's `count` items its prefix, under the names of a `space`; None of one
        that stands alone. Each part of a block has prefixes of its own."""
        if not self.keys:
            return [None] * count
        parts = len(self.packed)
        of_parts = [[space + key for key in self.keys[part::parts]] for part in range(parts)]
        return [
            Prefix(of_parts[place % parts], place // parts, self.group)
            if self.packed[place % parts]
            else None
            for place in self.places
        ]


NO_PLACE = PromptPlace()


@dataclass(frozen=True)
class StoreJob:
    """Blocks in flight into a tier, of one request or a few of several. `generation`: that of their
    keys. `adapter`: what they were computed with (see `RequestMark`). `place`: where they are in
    the one request's prompt."""

    job_id: int
    items: list[StoreItem]
    generation: bytes = b""
    adapter: bytes = b""
    place: PromptPlace = NO_PLACE

    def __reduce__(self) -> tuple[Any, ...]:
        return _job, (StoreJob, StoreItem, _columns(self))


@dataclass(frozen=True)
class LoadJob:
    """Blocks of one request in flight to the engine, for `seconds` at most. `generation`:
    that of their keys. `place`: where they are in its prompt. `first`: the first paged block of all
    that the request loads, if a part is of no use; None: a part is of use."""

    job_id: int
    request_id: str
    items: list[LoadItem]
    seconds: float = math.inf
    generation: bytes = b""
    place: PromptPlace = NO_PLACE
    first: int | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _job, (LoadJob, LoadItem, _columns(self))


class SlotMove(NamedTuple):
    """A block of the host pool that is to lie in another slot, `target`."""

    key: bytes
    source: int
    target: int


@dataclass(frozen=True)
class MoveJob:
    """Blocks in flight out of slots that will be given back."""

    job_id: int
    items: list[SlotMove]


class Vacated(NamedTuple):
    """No slot from number `slots` on is in use, or will be before the pool has been resized more
    than `resizes` times: its memory may be given back."""

    slots: int
    resizes: int


def _columns(job: StoreJob | LoadJob) -> dict[str, Any]:
    """The fields of a job, its items by column. A load of 128k tokens has 8,192: one by one the
    scheduler takes 6 ms to pickle them, and each worker 2 ms to read them."""
    return {**vars(job), "items": [*zip(*job.items, strict=True)]}


def items_of(kind: type[T], *columns: Iterable[Any]) -> list[T]:
    """Items by their columns, in a third of the time that one by one takes."""
    return [*map(partial(tuple.__new__, kind), zip(*columns, strict=True))]


def _job(kind: type[Any], item: type[Any], fields: dict[str, Any]) -> Any:
    """What `_columns` was made of."""
    fields["items"] = items_of(item, *fields["items"])
    return kind(**fields)


@dataclass
class OffloadingConnectorMetadata:
    """One step's orders to the workers of one tier.

    `slots_to_fill`: loads of no request, into slots, which are their items' targets.
    `jobs_to_flush`: store jobs whose paged blocks are about to be overwritten.
    `idle`: the step computes nothing, so a worker may wait a moment for its transfers.
    `one_writer`: all ranks find one record of a block, which rank 0 stores.
    `moves`, `vacated`: of a host pool that is made smaller.
    """

    reqs_to_load: list[LoadJob] = field(default_factory=list)
    reqs_to_store: list[StoreJob] = field(default_factory=list)
    slots_to_fill: list[LoadJob] = field(default_factory=list)
    jobs_to_flush: list[int] = field(default_factory=list)
    idle: bool = False
    one_writer: bool = False
    moves: MoveJob | None = None
    vacated: Vacated | None = None


class LoadTimes(NamedTuple):
    """Parts of a load on one rank, in seconds: waiting for a thread and for `load_rate`, reading
    from a store, checking host memory, and copying into the engine. A store checks each piece as
    it reads it, so that its checks are part of `load`; what it reads during a copy is not."""

    queue: float = 0.0
    load: float = 0.0
    check: float = 0.0
    copy: float = 0.0


NO_TIMES = LoadTimes()


class LookupTimes(NamedTuple):
    """Parts of a lookup, in seconds. `answer`: from the question to the tier's answer. `notice`:
    from there to the engine's step that took it. `waited`: from the step in which the engine asked
    first to that one; a question may have come up before."""

    answer: float = 0.0
    notice: float = 0.0
    waited: float = 0.0


NO_LOOKUP_TIMES = LookupTimes()


@dataclass
class JobResult:
    """How a job ended on `ranks` ranks. `failed`: items that failed on any of them. `seconds`,
    `times`: what moving them took on the slowest. `lost`: failed items that the tier no longer
    has; it may have the others. `already_stored`: items that the store had before, says rank 0.
    `renewed`: items of a store that a rank did not send, since the store had them. `late`: a load's
    time was over on some rank. `outdated`: it failed on some rank since the weights had changed.
    `bytes`: what all ranks have moved, as they count it."""

    ranks: int = 0
    failed: set[int] = field(default_factory=set)
    seconds: float = 0.0
    lost: set[int] = field(default_factory=set)
    times: LoadTimes = NO_TIMES
    already_stored: Set[int] = frozenset()
    renewed: int = 0
    late: bool = False
    outdated: bool = False
    bytes: int = 0

    def fold(self, other: JobResult) -> None:
        self.ranks += other.ranks
        self.bytes += other.bytes
        self.renewed += other.renewed
        if other.failed:
            self.failed |= other.failed
            self.lost |= other.lost
        self.late |= other.late
        self.outdated |= other.outdated
        if other.already_stored:
            self.already_stored |= other.already_stored
        if other.seconds > self.seconds:
            self.seconds, self.times = other.seconds, other.times


@dataclass
class OffloadingWorkerMetadata:
    """What the workers of one tier finished since the last step, and, where that has changed,
    whether the tier works for each rank."""

    jobs: dict[int, JobResult] = field(default_factory=dict)
    handshakes: dict[int, WorkerHandshake] = field(default_factory=dict)
    health: dict[int, Health] = field(default_factory=dict)
    unusable: str | None = None
    measures: Measures = field(default_factory=dict)

    def aggregate(self, other: OffloadingWorkerMetadata) -> OffloadingWorkerMetadata:
        """Fold another rank's metadata into this one, which is returned."""
        for job_id, theirs in other.jobs.items():
            mine = self.jobs.get(job_id)
            if mine is None:
                mine = self.jobs[job_id] = JobResult()
            mine.fold(theirs)
        self.handshakes.update(other.handshakes)
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
