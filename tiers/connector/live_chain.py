"""A chain that changes while its engine runs: from a new spec to tiers, settings and observers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

from spec.chain import ChainSpec
from spec.chain_diff import ChainDiff
from spec.offloading import OffloadingSpec
from tiers.concurrency.executors import IoExecutor
from tiers.connector.policy.request_state import RequestTable
from tiers.connector.scheduler.offloading_scheduler import OffloadingScheduler
from tiers.connector.scheduler.open_tier import TierOpener
from tiers.contract.protocols import Request, RequestObserver
from tiers.contract.stats import CHAIN
from tiers.ghosts.ghosts import Ghosts, Setting
from tiers.traces.recorder import EndedRequest, Recorder, Recording


class TrafficRecorder:
    """A `RequestObserver` that records each request once, at its end, with the time at which it
    came. Requests that ended before the engine began them are left out.

    Two blocks have one id where they have one key: in one generation, with one adapter and with
    the same images."""

    def __init__(
        self, recorder: Recorder, requests: RequestTable, now: Callable[[], float]
    ) -> None:
        self._recorder = recorder
        self._requests = requests
        self._now = now
        self._arrivals: dict[str, tuple[float, bytes]] = {}
        """When each request came, and the tag of the generation then."""

    def arrived(self, request: Request) -> None:
        arrival = self._now(), self._requests.generation.tag
        self._arrivals.setdefault(request.request_id, arrival)

    def ended(self, request: Request) -> None:
        now = self._now()
        tag = self._requests.generation.tag
        arrived, first_tag = self._arrivals.pop(request.request_id, (now, tag))
        prompt, known = request.num_prompt_tokens, request.num_tokens
        if not request.num_computed_tokens and known == prompt:
            return
        marks: list[tuple[range, bytes]] = []
        if (request_state := self._requests.get(request)) is not None:
            # What a reset outdated was computed before it.
            tag = first_tag if request_state.is_outdated else tag
            marks = [(blocks, mark + tag) for blocks, mark in self._requests.marks(request_state)]
        self._recorder.put(
            EndedRequest(
                arrived,
                min(arrived, next(iter(self._arrivals.values()), (now, b""))[0]),
                prompt,
                known - prompt,
                request.block_hashes,
                getattr(request, "cache_salt", None) or "",
                marks,
            )
        )

    def take_measures(self) -> Mapping[str, Mapping[str, float]]:
        counts = self._recorder.take_counts()
        return {CHAIN: counts} if counts else {}

    def close(self) -> None:
        self._recorder.close()


def open_recorder(
    requests: RequestTable, opener: TierOpener, now: Callable[[], float], chain: ChainSpec
) -> tuple[TrafficRecorder, ...]:
    if chain.record is None:
        return ()
    engine, parts = requests.engine, requests.groups.parts_kept
    recording = Recording(
        chain.record,
        engine.block_tokens,
        engine.hash_tokens,
        repr(sorted(engine.facts.items())).encode(),
        lambda: opener.block_bytes * parts // engine.block_tokens or None,
        now,
    )
    return (TrafficRecorder(Recorder(recording), requests, now),)


class GhostWatcher:
    """A `RequestObserver`: each request counts once, at its end, if the engine began it and no
    reset came meanwhile. As in the tiers, blocks of other adapters, images or generations are
    others."""

    def __init__(self, ghosts: Ghosts, requests: RequestTable) -> None:
        self._ghosts = ghosts
        self._requests = requests

    def arrived(self, request: Request) -> None:
        """Nothing yet."""

    def ended(self, request: Request) -> None:
        prompt, known = request.num_prompt_tokens, request.num_tokens
        request_state = self._requests.get(request)
        if request_state is None or request_state.is_outdated:
            return
        if request.num_computed_tokens or known > prompt:
            tag, marks = self._requests.generation.tag, self._requests.marks(request_state)
            marks = [(run, mark + tag) for run, mark in marks if mark + tag]
            self._ghosts.put(request.block_hashes, prompt, known, marks)

    def take_measures(self) -> Mapping[str, Mapping[str, float]]:
        return self._ghosts.take_measures()

    def close(self) -> None:
        """Report a last time, once all that ended is counted."""
        self._ghosts.close()


def open_ghosts(
    requests: RequestTable, opener: TierOpener, now: Callable[[], float], chain: ChainSpec
) -> tuple[GhostWatcher, ...]:
    if not chain.ghosts:
        return ()
    engine, parts = requests.engine, requests.groups.parts_kept
    ghosts = Ghosts(
        list(_settings(chain)),
        engine.block_tokens,
        engine.hash_tokens,
        lambda: opener.slot_bytes * parts,
        now,
    )
    return (GhostWatcher(ghosts, requests),)


def _settings(chain: ChainSpec) -> Iterator[Setting]:
    """Each tier that has ghosts as it is configured, then its ghosts; then those of tiers that the
    chain lacks."""
    for tier in chain.tiers:
        name, threshold = tier.tier_name, tier.store_threshold
        ghosts = [ghost for ghost in chain.ghosts if ghost.tier == name]
        if ghosts:
            capacity: int = getattr(tier, "capacity")  # noqa: B009 - checked by ChainSpec
            yield Setting(name, name, capacity, threshold)
            for ghost in ghosts:
                least = ghost.store_threshold or threshold
                yield Setting(ghost.label, name, ghost.bytes_of(capacity), least)
    names = {tier.tier_name for tier in chain.tiers}
    for ghost in chain.ghosts:
        if ghost.tier not in names:
            threshold = ghost.store_threshold or 1
            yield Setting(ghost.label, ghost.tier, ghost.bytes_of(0), threshold)


logger = logging.getLogger(__name__)


def tenant_names(chain: ChainSpec) -> dict[str, str]:
    """The names of the tenants that metrics show, by their salts."""
    return {salt: rule.name for salt, rule in chain.tenants.items() if rule.name is not None}


class LiveChain:
    """The `Rebuilder` of a chain of tiers. Used by the scheduler's thread, but `refusals`.

    `observers` is the scheduler's own list. Some of them change with the chain: those that `_opens`
    has by the chain's key.
    """

    def __init__(
        self,
        chain: ChainSpec,
        requests: RequestTable,
        opener: TierOpener,
        now: Callable[[], float],
        names: list[str],
        observers: list[RequestObserver],
    ) -> None:
        """`names`: of the places of the chain, which whoever explains requests reads, too."""
        self.chain = chain
        self._requests, self._opener, self._now = requests, opener, now
        self._names = names
        self._observers = observers
        self._opens: Mapping[str, Callable[..., Sequence[RequestObserver]]]
        self._opens = {"record": open_recorder, "ghosts": open_ghosts}
        self._opened = {key: self._open(key, chain) for key in self._opens}
        self._wanted = dict.fromkeys(self._opens, chain)
        """The chains whose observers of each kind are open, or will be; none once it is closed."""
        # Without it observers that open while another chain comes would stay. Held for moments.
        self._exchanging = threading.Lock()
        # One thread closes and opens: two recorders would write one file. It begins when needed.
        self._thread: IoExecutor | None = None
        for some in self._opened.values():
            observers += some

    def refusals(self, new: ChainSpec, found: ChainDiff) -> list[str]:
        gone = found.of_kind("drained", "reopened")
        if gone and self._requests.engine.kv_events:
            return [
                f"tier {name}: routers were told of its blocks by KV events, and would go on "
                "sending requests here for them: restart the engine without it"
                for name in gone
            ]
        return []

    def make(self, tier: OffloadingSpec, chain: ChainSpec) -> OffloadingScheduler:
        return OffloadingScheduler(tier, chain, self._requests, self._opener, self._now)

    def apply(self, chain: ChainSpec, tiers: Sequence[OffloadingScheduler]) -> None:
        before, self.chain = self.chain, chain
        self._requests.retune(chain.max_wait, chain.store)
        self._requests.tenants.names = tenant_names(chain)
        for spec, tier in zip(chain.tiers, tiers, strict=True):
            tier.retune(spec, chain)
            if before.warm != chain.warm:
                tier.stop_warming()
            if spec.tier_name not in self._names:
                self._names.append(spec.tier_name)
        if before.record != chain.record:
            self._reopen("record", chain)
        if before.ghosts != chain.ghosts or (chain.ghosts and before.tiers != chain.tiers):
            self._reopen("ghosts", chain)

    def _reopen(self, key: str, chain: ChainSpec) -> None:
        """Close the observers of a kind, and open those of this chain, beside the steps."""
        try:
            self._thread = self._thread or IoExecutor(1, "reopen")
        except RuntimeError as error:
            logger.warning("%s: stays as it was before the change: %s", key, error)
            return
        with self._exchanging:
            old, self._opened[key], self._wanted[key] = self._opened[key], (), chain
            for observer in old:
                self._observers.remove(observer)
        self._thread.submit(self._exchange, key, old, chain)

    def _exchange(self, key: str, old: Sequence[RequestObserver], chain: ChainSpec) -> None:
        """On a thread. Where another chain comes meanwhile, that one opens its own."""
        _close_all(old)
        if self._wanted.get(key) is not chain:
            return
        opened = self._open(key, chain)
        with self._exchanging:
            if self._wanted.get(key) is chain:
                self._opened[key] = opened
                self._observers += opened
                return
        _close_all(opened)

    def _open(self, key: str, chain: ChainSpec) -> Sequence[RequestObserver]:
        try:
            return self._opens[key](self._requests, self._opener, self._now, chain)
        except RuntimeError as error:
            logger.warning("%s: left out until its settings change: %s", key, error)
            return ()

    def close(self) -> None:
        with self._exchanging:
            self._wanted.clear()
        if self._thread is not None:
            self._thread.shutdown(wait=False)


def _close_all(observers: Sequence[RequestObserver]) -> None:
    for observer in observers:
        observer.close()
