"""What is known of a request? A chain keeps one record of it for all its tiers."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from spec.chain import StoreScope
from tiers.connector.policy.choice import NO_LOAD, Choice, Stitch
from tiers.connector.policy.request_params import NO_HINTS, Hints, RequestLimits
from tiers.contract.marks import MediaMark, RequestMark
from tiers.contract.protocols import BlockCopy, Request

NO_BLOCKS = range(0)


@dataclass(eq=False, slots=True)
class RequestState:
    """What a chain knows of one request until that has finished.

    `mark`, `media`: see `EngineInfo`. `may_store`: whether its blocks may be stored, and `scope`:
    which of them. `sent`: what names the weights of a part of its KV that another node sent for it
    or for others; it `awaits_weights` while it is not known yet whether they are its own, and none
    may be stored. `sure`: before so many tokens its blocks are what their hashes say; 0: all are.
    `load_range`: blocks that tiers load for it behind what the engine found, until it runs;
    `NO_BLOCKS`: it was not asked. `omitted`: blocks not to be stored, since neither this engine
    computes them for it nor tiers load them. `hints`: on its prompt's blocks. `junction`: the block
    before which it had all but windows in common with what tiers held. `pieces`: where several
    connectors load it, the paged blocks of each, by its place. `keys`: of all parts of its full
    blocks, as far as they are made, block by block. `tables`: its blocks in the paged KV, per KV
    cache group. `computed`: tokens computed once every scheduled step has run; 0 while it may be
    loading. `complete`: as of `Scheduled`. `is_outdated`: a reset came after some of its blocks
    were computed.

    `choice`: the last decision who loads what; `is_undecided` until the engine begins it, and
    `has_begun` once it did. `held`: coverage of tiers, and `stitches` of it, each with what tiers
    look for yet, valid while `versions` are unchanged. `foreign_loaders`: the engine's own
    connectors that load it; `failed`: those that left it nothing. `loading`, `awaits`: see
    `LoadSharing`. `next_step`: blocks that it needs behind what it loads, until that step runs (see
    `LoadRoom`). `lacks_room`: whether it found a load when the tiers were asked last, and no room.
    `prompt_tokens`: known before it ran or went on. `looking`: see `LookupLatency`. `tiers`: what
    each keeps of it, by the tier itself. `cached`: tokens of its prompt that each tier loaded.
    `to_offer_again`: the tiers that could not take some of its blocks, which they are offered
    again. `in_vain`: tiers loaded it, and that brought nothing.
    """

    request: Request
    limits: RequestLimits
    mark: RequestMark
    media: MediaMark
    wait_budget: WaitBudget
    may_store: bool
    scope: StoreScope
    sent: set[str] = field(default_factory=set)
    awaits_weights: bool = False
    sure: int = 0
    is_asked: bool = False
    in_doubt: bool = False
    is_beside: bool = False
    load_range: range = NO_BLOCKS
    pieces: dict[int, list[int]] = field(default_factory=dict)
    omitted: tuple[range, ...] = ()
    junction: int = 0
    hints: Hints = NO_HINTS
    keys: list[bytes] = field(default_factory=list)
    tables: tuple[list[int], ...] = ()
    computed: int = 0
    complete: int = 0
    is_outdated: bool = False
    choice: Choice = NO_LOAD
    versions: Hashable = None
    held: dict[tuple[int, int], Sequence[int]] = field(default_factory=dict)
    stitches: dict[Hashable, tuple[Stitch, Mapping[int, range]]] = field(default_factory=dict)
    is_undecided: bool = False
    has_begun: bool = False
    foreign_loaders: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    loading: Sequence[bytes] = ()
    awaits: RequestState | None = None
    next_step: int = 0
    lacks_room: bool = False
    prompt_tokens: int = 0
    looking: dict[int, float] = field(default_factory=dict)
    tiers: dict[object, Any] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)
    to_offer_again: set[object] = field(default_factory=set)
    in_vain: bool = False

    def given(self, tables: Iterable[Iterable[int]]) -> None:
        """The engine has given it these blocks, and no others."""
        self.tables, self.complete = tuple(list(table) for table in tables), 0

    @property
    def shared(self) -> bool:
        """Whether it is known what its blocks are computed from."""
        return self.mark.shared and self.media.shared

    @property
    def stores(self) -> bool:
        """Whether its blocks may be stored."""
        may_store = self.may_store and not self.awaits_weights
        return may_store and not self.is_outdated and self.shared


class Scheduled(NamedTuple):
    """A request in a step, with its tokens computed `before` and `after` it.

    `complete`: leading blocks of which every token is known and then computed. `is_new`: whether
    this is the first step that runs it. `states`: the numbers, among its keys, of the states of
    recurrent layers that the step leaves, and their paged blocks.
    """

    request_state: RequestState
    before: int
    after: int
    complete: int
    is_new: bool = False
    states: Sequence[tuple[int, int]] = ()


class EngineStep(NamedTuple):
    """One step of the engine. `scheduled`: its requests, but for those that answer, complete no
    block and have none that a tier is to be offered again. `overwritten`: paged blocks that it
    writes, that were allocated for loads since the step before, or in which that left a state.
    `added`: paged blocks that requests are given for it, and write. `copies`: of paged blocks, made
    before it. `is_first`: whether the engine's own cache was empty before it. `number`: from 0."""

    scheduled: list[Scheduled]
    overwritten: set[int]
    added: set[int]
    copies: Sequence[BlockCopy]
    is_first: bool = False
    number: int = -1

    @property
    def prompt_tokens(self) -> int:
        """Tokens of prompts that it computes."""
        return sum(
            min(left, run.after - run.before)
            for run in self.scheduled
            if (left := run.request_state.prompt_tokens - run.before) > 0
        )


LOOKUP_SECONDS = 1.0
"""How long a request waits for one lookup, unless `max_wait` is short or very long."""


def lookup_seconds(max_wait: float) -> float:
    """How long one lookup may take: half of `max_wait` at most, so that a tier that never answers
    leaves time to load from one that does; and a tenth of a `max_wait` that is longer than usual,
    as it is where tiers are far away or machines are busy."""
    return min(max_wait / 2, max(LOOKUP_SECONDS, max_wait / 10))


class WaitBudget:
    """What one request has left of `max_wait` seconds; used by the scheduler's thread alone.

    A lookup costs at most `lookup_seconds`, even if the engine's step took longer, or asked others
    first. `now` gives seconds, never going back.
    """

    def __init__(self, now: Callable[[], float], max_wait: float = math.inf) -> None:
        self._now = now
        self.lookup_seconds = lookup_seconds(max_wait)
        self._left = max_wait
        self._looking: float | None = None
        self._loading: float | None = None
        self.ended = -math.inf
        """When the last load that the request waited for had ended."""

    def left(self) -> float:
        """Seconds that the request may still wait."""
        return self._left - (0.0 if self._loading is None else self._now() - self._loading)

    def looks(self) -> None:
        """A tier is asked and has no answer yet."""
        if self._looking is None:
            self._looking = self._now()

    @property
    def is_looking(self) -> bool:
        return self._looking is not None

    def found(self) -> None:
        if self._looking is not None:
            self._left -= min(self._now() - self._looking, self.lookup_seconds)
            self._looking = None

    def loads(self) -> None:
        """The request begins to wait for a load, its own or another request's."""
        if self._loading is None:
            self._loading = self._now()

    @property
    def is_loading(self) -> bool:
        return self._loading is not None

    def loaded(self, ended: float = math.inf) -> None:
        """The request no longer waits: the load has ended in all tiers, or was given up. `ended`:
        when it had, if that is known; who is asked later has waited for the engine since."""
        self.ended = min(ended, self._now())
        if self._loading is not None:
            self._left -= max(0.0, self.ended - self._loading)
            self._loading = None
