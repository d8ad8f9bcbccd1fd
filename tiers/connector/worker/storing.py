"""Storing: puts what a worker has gathered into one tier's store, on the tier's writer thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future
from typing import NamedTuple

from tiers.concurrency.rate_limit import RateLimit
from tiers.connector.worker.host_slots import HostSlots
from tiers.connector.worker.namespace_notes import NamespaceNotes
from tiers.connector.worker.weight_watch import WeightVerdict
from tiers.contract.generation import space_of
from tiers.contract.messages import JobResult, StoreItem, StoreJob
from tiers.store import GatheredBlock, Packs, Prefix, TierStore, batch_blocks, capability
from tiers.wrappers.guard import Guarded


class _QueuedPut(NamedTuple):
    """A job in the queue. `is_ours`: this rank stores its blocks. `verdict`: on the weights that
    computed them."""

    job: StoreJob
    is_ours: bool
    verdict: WeightVerdict

    def joins(self, other: _QueuedPut) -> bool:
        """Whether one put may store both, `other` being the first, without waiting for ranks."""
        if self.verdict.waits_for_others():
            return False
        return self.is_ours == other.is_ours and self.job.generation == other.job.generation


class Puts:
    """Puts jobs' blocks into one tier's store, in order, on the tier's writer thread.

    Small jobs that wait at the same time go into the store by one put: a block or two of each
    request that decodes would cost it a transaction or a round trip each.

    Where the engine takes events it also notes which blocks the store had before: the engine that
    stored them announced those, and the blocks of a shared tier are announced once. One rank notes
    it for all, since a block is one event.
    """

    def __init__(
        self, host: HostSlots, rate_limit: RateLimit, writer: Executor, in_host: bool
    ) -> None:
        """`in_host`: the tier is in host memory, where gathered blocks are stored."""
        self._host = host
        self._rate_limit = rate_limit
        self._writer = writer
        self._in_host = in_host
        self._looks = host.engine.kv_events and host.engine.rank == 0
        self._store: Guarded | None = None
        self._notes: NamespaceNotes | None = None
        self._namespace = b""
        self._waiting: deque[_QueuedPut] = deque()
        # Blocks so far: the engine's thread counts those queued, the writer's those taken.
        self._queued = self._taken = 0
        self._results: dict[int, JobResult] = {}
        self._ask_at = 0.0

    def serve(self, store: Guarded, namespace: bytes, notes: NamespaceNotes | None = None) -> None:
        """Put into `store` from now on, under the worker's `namespace`, of which a note is kept."""
        self._namespace = namespace
        self._notes = notes
        self._store = store
        if notes is not None:
            notes.begin(namespace, lasts=True)

    def in_order(self, job: StoreJob) -> Iterator[StoreItem]:
        """A job's items in the order in which they are put, that in which their checksums are
        computed: a batch waits for its own alone."""
        most = batch_blocks(self._host.payload_bytes)
        starts = range(0, len(job.items), most)
        for start in starts if job.place.keys else reversed(starts):
            yield from job.items[start : start + most]

    def begin(self, job: StoreJob, is_ours: bool) -> Future[JobResult]:
        """Queue a job; its future raises what made its gather fail. Does not wait."""
        self._queued += len(job.items)
        verdict = self._host.watch.stores(job.generation)
        self._waiting.append(_QueuedPut(job, is_ours, verdict))
        return self._writer.submit(self._end, job.job_id)

    def ask_again(self) -> None:
        """Have a store that warned of its puts say how they would do now, once a second: else it
        says so with the next put alone. Does not wait."""
        now = self._host.now()
        if self._store is not None and now >= self._ask_at:
            self._ask_at = now + 1.0
            self._writer.submit(self._store.put, [])

    def _end(self, job_id: int) -> JobResult:
        """Put the jobs that wait, unless this one was put with those before it."""
        if job_id not in self._results:
            self._put_next()
        return self._results.pop(job_id)

    def _put_next(self) -> None:
        first = self._take()
        began = self._host.now()
        jobs = [(first.job, self._gathered(first))]
        stored, already, renewed = [True] * len(jobs[0][1]), set[bytes](), 0
        if not self._in_host and first.is_ours:
            # The gather is shared with other tiers; only those of host memory have no more to do.
            began = self._host.now()
            jobs += self._more(first)
            before = self._renewed()
            stored, already = self._put(first.job.generation, jobs)
            renewed = self._renewed() - before
        seconds = (self._host.now() - began) / max(1, len(stored))
        answers = iter(stored)
        for job, gathered in jobs:
            good = {i for i in gathered if next(answers)}
            had = {i for i in good if job.items[i].key in already}
            failed = set(range(len(job.items))) - good
            mine = min(renewed, len(good))
            renewed -= mine
            result = JobResult(1, failed, seconds * len(gathered), already_stored=had, renewed=mine)
            self._results[job.job_id] = result

    def _renewed(self) -> int:
        """Blocks so far that the store had already; this thread alone puts into it."""
        return 0 if self._store is None else self._store.counts().renewed

    def _gathered(self, waiting: _QueuedPut) -> list[int]:
        """Wait for the job's gather; return which items are in their slots then. Those of other
        weights than their keys stand for count as failed: what only this engine finds goes with
        the generation, and what others find must be right on all ranks."""
        items, verdict = waiting.job.items, waiting.verdict
        held = self._host.wait_and_verify([item.slot for item in items], [i.key for i in items])
        unchanged = verdict.unchanged() if self._in_host else verdict.unchanged_everywhere()
        return [i for i, ok in enumerate(held) if ok and unchanged]

    def _more(self, first: _QueuedPut) -> list[tuple[StoreJob, list[int]]]:
        """Take the next queued jobs that one put stores with `first`, an eighth of what waits at
        most. A put gives its slots back when it ends, and until they are filled again a tier that
        lags needs something to store: a replay dropped 62% of its blocks, and 75% with all in one
        put."""
        more: list[tuple[StoreJob, list[int]]] = []
        size = len(first.job.items)
        waiting = size + self._queued - self._taken
        room = min(batch_blocks(self._host.payload_bytes), waiting // 8) - size
        while self._waiting and self._waiting[0].joins(first):
            job = self._waiting[0].job
            room -= len(job.items)
            if room < 0:
                break
            try:
                more.append((job, self._gathered(self._waiting[0])))
            except (RuntimeError, IndexError):
                break  # it fails alone, in its turn
            self._take()
        return more

    def _take(self) -> _QueuedPut:
        taken = self._waiting.popleft()
        self._taken += len(taken.job.items)
        return taken

    def _put(
        self, generation: bytes, jobs: Sequence[tuple[StoreJob, list[int]]]
    ) -> tuple[list[bool], set[bytes]]:
        """Put items of jobs. Return which are held now, and the keys that were held before."""
        known: set[bytes] = set()
        items = [job.items[i] for job, gathered in jobs for i in gathered]
        if self._store is None:
            return [False] * len(items), known
        space = space_of(self._namespace, generation)
        if self._notes is not None:
            self._notes.begin(space, lasts=not generation)
        memory, size = self._host.memory, self._host.payload_bytes
        prefixes: list[Prefix | None] = []
        for job, gathered in jobs:
            of_job = job.place.prefixes(space, len(job.items))
            prefixes += [of_job[i] for i in gathered]
        stored, order = [False] * len(items), in_packs(prefixes)
        parts = [*batches([prefixes[at] for at in order], batch_blocks(size))]
        # What is put last counts as used last; but packs are found by the first of a prompt.
        for batch in parts if any(prefixes) else reversed(parts):
            places = order[batch.start : batch.stop]
            part, where = [items[at] for at in places], [prefixes[at] for at in places]
            names = [space + item.key for item in part]
            if self._looks:
                had = held_before(self._store, names, where)
                known.update(item.key for item, was in zip(part, had, strict=True) if was)
            self._rate_limit.take(len(part) * size)
            slots = [item.slot for item in part]
            payloads = map(memory.payload, slots)
            checksums = self._host.checksums.of(slots)
            held = self._store.put([*map(GatheredBlock, names, payloads, checksums, where)])
            for at, is_held in zip(places, held, strict=True):
                stored[at] = is_held
        return stored, known


def in_packs(prefixes: Sequence[Prefix | None]) -> list[int]:
    """The places of blocks with these prefixes, in the order in which to put them. Those of one
    prefix come in a row, else the parts of a block would split a pack; those without one come last.
    """
    of_prefix = [0 if prefix is None else id(prefix.keys) for prefix in prefixes]
    rows = {keys: row for row, keys in enumerate(dict.fromkeys(of_prefix)) if keys}
    return sorted(range(len(prefixes)), key=lambda at: rows.get(of_prefix[at], len(prefixes)))


def batches(prefixes: Sequence[Prefix | None], most: int) -> Iterator[range]:
    """Split blocks with these prefixes into ranges of `most` at most. A range that has the end of a
    group ends with the last such end, so that the next one begins a group."""
    start = 0
    while start < len(prefixes):
        stop = min(start + most, len(prefixes))
        if stop < len(prefixes):
            ends = range(stop, start, -1)
            stop = next((end for end in ends if _ends_group(*prefixes[end - 1 : end + 1])), stop)
        yield range(start, stop)
        start = stop


def _ends_group(prefix: Prefix | None, behind: Prefix | None) -> bool:
    if prefix is None or behind is None or behind.keys is not prefix.keys:
        return True
    return (prefix.at + 1) % prefix.group == 0


def held_before(
    store: TierStore, names: Sequence[bytes], prefixes: Sequence[Prefix | None]
) -> list[bool]:
    """Which of these blocks the store has. One that packs prompts is asked for each group by
    itself: with attention windows the groups before may be missing."""
    packs = capability(store, Packs)
    groups = {
        _group(p): p.keys[p.at - p.at % p.group :][: p.group] for p in prefixes if p is not None
    }
    if packs is None or not groups:
        return store.has(names)
    counts = dict(zip(groups, packs.held_prefix([*groups.values()]), strict=True))
    alone = [name for name, prefix in zip(names, prefixes, strict=True) if prefix is None]
    of_alone = iter(store.has(alone) if alone else ())
    return [next(of_alone) if p is None else p.at % p.group < counts[_group(p)] for p in prefixes]


def _group(prefix: Prefix) -> tuple[int, int]:
    return id(prefix.keys), prefix.at // prefix.group
