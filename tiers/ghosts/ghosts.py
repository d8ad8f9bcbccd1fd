"""Ghosts: the hits of a chain's tiers, had they other settings."""

from __future__ import annotations

import hashlib
import logging
import math
import threading
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from tiers.concurrency.executors import start_thread
from tiers.concurrency.handoff import Handoff
from tiers.fenwick import Fenwick


class SampledStack:
    """At most `limit` keys, in the order of their last use. Used by one thread."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._moments: dict[int, int] = {}
        self._renumber()

    def younger(self, key: int) -> int | None:
        """How many keys were used after this one; None: it is not among those that are kept."""
        moment = self._moments.get(key)
        return None if moment is None else len(self._moments) - self._live.up_to(moment)

    def touch(self, key: int) -> None:
        """Use a key now. The one that was not used for longest is dropped for a new one."""
        before = self._moments.pop(key, None)
        if before is not None:
            self._live.add(before, -1)
        elif len(self._moments) == self._limit:
            self._evict()
        if len(self._live) == 2 * self._limit:
            self._renumber()
        self._keys.append(key)
        self._live.append(1)
        self._moments[key] = len(self._live)

    def _evict(self) -> None:
        while self._moments.get(self._keys[self._oldest - 1]) != self._oldest:
            self._oldest += 1
        del self._moments[self._keys[self._oldest - 1]]
        self._live.add(self._oldest, -1)

    def _renumber(self) -> None:
        """Let the moments of the keys that are kept be 1, 2, ..."""
        self._keys = sorted(self._moments, key=self._moments.__getitem__)
        self._moments = {key: moment for moment, key in enumerate(self._keys, 1)}
        self._live = Fenwick([1] * len(self._keys))
        self._oldest = 1


PARTS = 8
"""Of the sample; the difference of their estimates shows the error of the whole."""

FEW = 64
"""Keys that are worth a rest: they take a third of a millisecond."""
COUNTED = 1 << 18
"""Blocks whose requests a tier counts for its threshold."""


class Sampled(NamedTuple):
    """The sampled blocks of a request, by 64 bits of their hashes: those that the prompt asked
    for, in order, and all, those of the answer included. `hot`: how many of `asked` are counted
    exactly, and so not here."""

    asked: Sequence[int]
    stored: Sequence[int]
    hot: int


class Estimate(NamedTuple):
    """Parts of the prompts' blocks: those that a tier has when they are asked for, with twice the
    standard error; and those stored, answers included."""

    hits: float
    error: float
    stores: float


def _parts(keys: Sequence[int], rest: Callable[[], None]) -> Iterator[Sequence[int]]:
    for start in range(0, len(keys), FEW):
        yield keys[start : start + FEW]
        rest()


@dataclass
class _Size:
    """Counts for one capacity: `bound` is that of the sample."""

    bound: float
    hits: list[float]
    stores: float = 0.0


class TierModel:
    """One tier, stored to from each block's `threshold`-th request on, LRU, inclusive.

    A request is touched from its tail to its head, so that any size holds whole prefixes, and all
    its places are taken before any of its blocks is touched. SHARDS (Waldspurger et al., FAST 2015)
    at a rate that keeps the sample of the largest size within `limit` keys, adjusted by the count
    that is expected. Used by one thread.
    """

    def __init__(self, capacities: Sequence[int], threshold: int, limit: int) -> None:
        """`capacities`: in blocks."""
        self.rate = min(1.0, limit / max(capacities))
        self._threshold = threshold
        self._stack = SampledStack(limit)
        self._sizes = [_Size(c * self.rate, [0.0] * PARTS) for c in capacities]
        self._asked = [0.0] * PARTS
        self._counts: dict[int, int] = {}
        self._older_counts: dict[int, int] = {}
        self._counted = max(1, min(limit, int(COUNTED * self.rate)))

    def request(self, sampled: Sampled, rest: Callable[[], None] = lambda: None) -> None:
        """Count and touch a request's blocks. `rest` is called after every few of them."""
        places: dict[int, int | None] = {}
        for part in _parts(sampled.stored, rest):
            places.update(zip(part, map(self._stack.younger, part), strict=True))
        self._count(sampled, [places[key] for key in sampled.asked])
        for part in _parts(sampled.stored[::-1], rest):
            for key in part:
                self._touch(key, places[key])

    def _count(self, sampled: Sampled, places: Sequence[int | None]) -> None:
        """Count what was asked, as deep as each size has all of it."""
        asked = sampled.asked
        for key in asked[sampled.hot :]:
            self._asked[key % PARTS] += 1
        for size in self._sizes:
            for key, place in islice(zip(asked, places, strict=True), sampled.hot, None):
                if place is None or place >= size.bound:
                    break
                size.hits[key % PARTS] += 1

    def _touch(self, key: int, place: int | None) -> None:
        if place is None and not self._admits(key):
            return
        for size in self._sizes:
            size.stores += place is None or place >= size.bound
        self._stack.touch(key)

    def _admits(self, key: int) -> bool:
        if self._threshold == 1:
            return True
        count = self._counts.pop(key, None) or self._older_counts.pop(key, 0)
        if count + 1 >= self._threshold:
            return True
        self._counts[key] = count + 1
        if len(self._counts) >= self._counted:
            self._counts, self._older_counts = {}, self._counts
        return False

    def decay(self, factor: float) -> None:
        """Let what was counted so far weigh less."""
        self._asked = [factor * count for count in self._asked]
        for size in self._sizes:
            size.hits = [factor * count for count in size.hits]
            size.stores *= factor

    def estimates(self, cold: float, hot: float) -> list[Estimate]:
        """One for each capacity. `cold`, `hot`: how many blocks prompts had in all, equally
        decayed; the hot ones are hits of any size."""
        return [self._estimate(size, cold, hot) for size in self._sizes]

    def _estimate(self, size: _Size, cold: float, hot: float) -> Estimate:
        if not cold + hot:
            return Estimate(0.0, 0.0, 0.0)
        rate = self.rate / PARTS
        each = [
            (hits + cold * rate - asked) / rate
            for hits, asked in zip(size.hits, self._asked, strict=True)
        ]
        mean = sum(each) / PARTS
        variance = sum((one - mean) ** 2 for one in each) / (PARTS - 1) / PARTS
        whole = cold + hot
        error = min(2 * math.sqrt(variance * (1 - self.rate)), whole)
        hits = min(max(hot + mean, 0.0), whole)
        return Estimate(hits / whole, error / whole, size.stores / self.rate / whole)


SURE = 32
"""Votes that a block hardly ever has, copies of a prompt included, if no half of all share it."""


class HotPrefix:
    """Finds a prefix that more than half of the prompts share, as a system prompt is.

    Whether one such block is in a sample or not outweighs all other errors of the sample, so these
    are counted exactly. Majority vote of Boyer and Moore, 1981, over the prompts' first blocks.
    """

    def __init__(self) -> None:
        self._blocks: list[bytes] = []
        self._votes = 0

    def shared_by(self, prompt: Sequence[bytes]) -> int:
        """How many of a prompt's first blocks are hot. `prompt`: the hashes of its blocks, each of
        which stands for those before it, too."""
        if not prompt:
            return 0
        blocks = self._blocks
        if blocks and prompt[0] == blocks[0]:
            self._votes += 1
            shorter = range(min(len(blocks), len(prompt)))
            same = bisect_left(shorter, True, key=lambda i: blocks[i] != prompt[i])
            del blocks[same:]
            return same if self._votes > SURE else 0
        self._votes -= 1
        if self._votes < 0:
            self._blocks, self._votes = list(prompt), 1
        return 0


logger = logging.getLogger(__name__)

SAMPLES = 16_000
"""Keys of a tier's sample. Measured on a public trace of conversations: the hit ratio is off by
half a point in the mean."""
MODELS = 4
"""More models share the keys of these, to stay within 10 MB."""
HALF_LIFE = 3600.0
"""Seconds after which what was counted weighs half."""
POLL_SECONDS = 0.25
PUBLISH_SECONDS = 10.0
REPORT_SECONDS = 600.0
CLOSE_SECONDS = 2.0
_MAX_REQUESTS, _MAX_HASHES = 4096, 1 << 18
_CHUNK = 4096
"""Hashes after which the thread rests: looking at them takes a tenth of a millisecond."""
_REST_SECONDS = 1e-4


class Setting(NamedTuple):
    """A tier as it is, or as it could be. `label`: its name in metrics. `capacity`: bytes."""

    label: str
    tier: str
    capacity: int
    store_threshold: int


Marks = Sequence[tuple[range, bytes]]
"""What blocks depend on beside their hashes: runs of blocks, each with one mark."""


class _Request(NamedTuple):
    """The blocks of a request that ended, by their hashes: those of the prompt, and all."""

    hashes: Sequence[bytes]
    asked: int
    stored: int
    marks: Marks


class Ghosts:
    """Follows the requests of a chain by sampled keys, on a thread of its own. `put` and
    `take_measures` are for the scheduler's thread, and never wait."""

    def __init__(
        self,
        settings: Sequence[Setting],
        block_tokens: int,
        hash_tokens: int,
        block_bytes: Callable[[], int],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`block_bytes`: of a block over all ranks; 0: not known yet, and then nothing is counted.
        `block_tokens`, `hash_tokens`: see `EngineInfo`."""
        self._block_tokens = block_tokens
        self._step = block_tokens // hash_tokens
        self._handoff: Handoff[_Request] = Handoff(_MAX_REQUESTS, _MAX_HASHES)
        self._published: Mapping[str, Mapping[str, float]] = {}
        self._taken: object = self._published
        self._settings = settings
        self._block_bytes = block_bytes
        self._now = now
        self._models: list[tuple[TierModel, list[Setting]]] = []
        self._limit = b""
        self._hot = HotPrefix()
        self._hot_blocks = self._cold_blocks = 0.0
        self._decays = self._publishes = now()
        self._reports = now() + REPORT_SECONDS
        self._stop = threading.Event()
        self._thread = start_thread(self._run, "ghosts")

    def put(
        self, hashes: Sequence[bytes], prompt_tokens: int, known_tokens: int, marks: Marks = ()
    ) -> None:
        """Count a request that ended; nobody changes its hashes any more. One that comes while too
        many wait is left out."""
        asked = prompt_tokens // self._block_tokens
        # The KV of the last token is not computed.
        stored = max(asked, (known_tokens - 1) // self._block_tokens)
        self._handoff.give(_Request(hashes, asked, stored, marks), len(hashes))

    def take_measures(self) -> Mapping[str, Mapping[str, float]]:
        """The gauges of each setting, by its label, where they are new."""
        published = self._published
        if published is self._taken:
            return {}
        self._taken = published
        return published

    def close(self) -> None:
        """Count what waits, and report."""
        self._stop.set()
        self._thread.join(CLOSE_SECONDS)

    # -- the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        stopping = False
        while not stopping:
            stopping = self._stop.wait(POLL_SECONDS)
            while (request := self._handoff.take()) is not None:
                self._follow(request)
            now = self._now()
            if stopping or now >= self._publishes:
                self._publish(now)
                if stopping or now >= self._reports:
                    self._report(now)

    def _follow(self, request: _Request) -> None:
        if not self._models and not self._make_models():
            return
        end = request.stored * self._step
        blocks = request.hashes[self._step - 1 : end : self._step]
        if request.marks:
            blocks = _marked(blocks, request.marks)
        hot = self._hot.shared_by(blocks[: request.asked])
        self._hot_blocks += hot
        self._cold_blocks += min(request.asked, len(blocks)) - hot
        places: list[int] = []
        """Of the blocks that any model samples."""
        for start in range(0, len(blocks), _CHUNK):
            part = blocks[start : start + _CHUNK]
            places += [i for i, block in enumerate(part, start) if block < self._limit]
            if len(part) == _CHUNK:
                _rest()
        keys = [int.from_bytes(blocks[i][:8], "big") for i in places]
        for model, _ in self._models:
            bound = int(model.rate * 2**64)
            ours = [(i, key) for i, key in zip(places, keys, strict=True) if key < bound]
            asked = [key for i, key in ours if i < request.asked]
            is_hot = sum(i < hot for i, _ in ours)
            model.request(Sampled(asked, [key for _, key in ours], is_hot), _rest)

    def _make_models(self) -> bool:
        size = self._block_bytes()
        if not size:
            return False
        groups: dict[tuple[str, int], list[Setting]] = defaultdict(list)
        for one in self._settings:
            groups[one.tier, one.store_threshold].append(one)
        samples = SAMPLES * MODELS // max(MODELS, len(groups))
        for (_, threshold), settings in groups.items():
            capacities = [max(1, one.capacity // size) for one in settings]
            self._models.append((TierModel(capacities, threshold, samples), settings))
        rate = max(model.rate for model, _ in self._models)
        self._limit = b"\xff" * 64 if rate == 1 else int(rate * 2**64).to_bytes(8, "big")
        return True

    def _publish(self, now: float) -> None:
        self._publishes = now + PUBLISH_SECONDS
        factor = 0.5 ** ((now - self._decays) / HALF_LIFE)
        self._decays = now
        self._hot_blocks *= factor
        self._cold_blocks *= factor
        for model, _ in self._models:
            model.decay(factor)
        self._published = {
            label: {
                "ghost_hit_ratio": estimate.hits,
                "ghost_hit_error": estimate.error,
                "ghost_store_ratio": estimate.stores,
            }
            for label, estimate in self._estimates().items()
        }

    def _estimates(self) -> dict[str, Estimate]:
        """By label."""
        return {
            setting.label: estimate
            for model, settings in self._models
            for setting, estimate in zip(
                settings, model.estimates(self._cold_blocks, self._hot_blocks), strict=True
            )
        }

    def _report(self, now: float) -> None:
        self._reports = now + REPORT_SECONDS
        if self._cold_blocks + self._hot_blocks < 1:
            return
        found = "; ".join(
            f"{label} would have {estimate.hits:.1%} (±{estimate.error:.1%}) of the prompts' "
            f"blocks and store {estimate.stores:.1%}"
            for label, estimate in self._estimates().items()
        )
        logger.info("ghosts: %s", found)


def _marked(blocks: Sequence[bytes], marks: Marks) -> Sequence[bytes]:
    """The hashes, of blocks that have a mark with it."""
    found = list(blocks)
    for run, mark in marks:
        for i in range(run.start, min(run.stop, len(found))):
            found[i] = hashlib.blake2b(found[i] + mark, digest_size=8).digest()
            if i % FEW == 0:
                _rest()
    return found


def _rest() -> None:
    """Let the engine's thread have the interpreter, for which it would wait otherwise."""
    time.sleep(_REST_SECONDS)
