"""Observers of a chain's requests: the recorder of traffic, and the ghosts of tiers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from spec.chain import ChainSpec
from tiers.connector.policy.request_table import RequestTable
from tiers.connector.scheduler.open_tier import TierOpener
from tiers.contract.protocols import Request
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
