"""What the scheduler half of a tier knows of each request: its keys, its blocks, what was tried."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from tiers.connector.contract.block_groups import BlockGroups
from tiers.connector.contract.engine import EngineInfo
from tiers.connector.contract.generation import Generation
from tiers.connector.contract.media import MediaMark, joined
from tiers.connector.contract.protocols import NULL_BLOCK, Request, SchedulerOutput
from tiers.connector.policy.request_limits import RequestLimits, read_limits
from tiers.connector.scheduler.lookups import Lookup
from tiers.connector.scheduler.store_order import StoreOrder


@dataclass
class RequestState:
    """What the scheduler half knows of a request.

    `keys`: of all parts of the full blocks known so far, block by block. `tables`: its blocks in
    the paged KV, per KV cache group. `match`: (first block, blocks) of the last lookup. `offered`:
    leading blocks that were offered for storing. `refused`: which keys of those found no room, and
    why (a counter's name). `recompute`: this tier failed to load it and is not asked again, so a
    request is loaded in vain once per tier at most. `store`: whether its blocks are stored;
    `prompt_only`: without those of its answer. `mark`, `media`: see `EngineInfo`. `asked`: when a
    lookup was begun that is not answered yet. `computed`: tokens that are when all steps so far
    have run; 0 while it may be loading. `answered`: whether any lookup was. `looked_up`, `hit`:
    whether it is counted among the tier's lookups and hits. `order`: that in which its blocks were
    stored. `lookup`: the answers of the tier.
    """

    request: Request
    limits: RequestLimits
    mark: bytes
    media: MediaMark
    keys: list[bytes] = field(default_factory=list)
    tables: tuple[list[int], ...] = ()
    match: tuple[int, int] = (0, 0)
    offered: int = 0
    refused: dict[int, str] = field(default_factory=dict)
    recompute: bool = False
    store: bool = True
    prompt_only: bool = False
    asked: float | None = None
    computed: int = 0
    answered: bool = False
    looked_up: bool = False
    hit: bool = False
    order: StoreOrder = field(default_factory=StoreOrder)
    lookup: Lookup = field(default_factory=Lookup)

    @property
    def stores(self) -> bool:
        """Whether its blocks may be stored."""
        return self.store and self.media.shared


class Scheduled(NamedTuple):
    """A request in a step, with its tokens computed `before` and `after` it."""

    state: RequestState
    before: int
    after: int


class Offers(NamedTuple):
    """Parts of a request's blocks to store: their numbers among its keys; (key, paged block)."""

    numbers: Sequence[int]
    pairs: list[tuple[bytes, int]]

    def without(self, paged: set[int]) -> Offers:
        """Those that are in none of these paged blocks."""
        safe = [place for place, (_, block) in enumerate(self.pairs) if block not in paged]
        return Offers([self.numbers[i] for i in safe], [self.pairs[i] for i in safe])


class RequestTable:
    """The unfinished requests; used by the scheduler's thread alone."""

    def __init__(
        self,
        engine: EngineInfo,
        parts: BlockGroups,
        generation: Generation,
        promote: bool,
        prompt_only: bool = False,
    ) -> None:
        """`prompt_only`: of requests that don't say, only the prompts are stored."""
        self._engine = engine
        self._prompt_only = prompt_only
        self._block_tokens = engine.block_tokens
        self._parts = parts
        self._generation = generation
        self._promote = promote
        self._states: dict[str, RequestState] = {}

    def __len__(self) -> int:
        return len(self._states)

    def get(self, request_id: str) -> RequestState | None:
        """The state of a request that is known."""
        return self._states.get(request_id)

    def state_of(self, request: Request) -> RequestState:
        """The state of a request, with the keys of all blocks that are full by now."""
        state = self._states.get(request.request_id)
        if state is None:
            limits, mark = read_limits(request)[0], self._engine.mark(request)
            media = self._engine.media.of(request)
            store = limits.store is not False
            state = RequestState(request, limits, mark, media, store=store)
            default = self._prompt_only and limits.store is None
            state.prompt_only = default or limits.store == "prompt"
            self._states[request.request_id] = state
        hashes = request.block_hashes
        full = len(hashes) * self._engine.hash_tokens // self._block_tokens
        new = range(len(state.keys) // len(self._parts), full)
        if new:
            media = self._engine.media.of(request)
            for blocks, of_media in media.spans(new, self._block_tokens):
                mark = self._generation.key(joined(state.mark, of_media))
                state.keys += self._parts.keys(hashes, blocks, mark)
        return state

    def stop(self, state: RequestState) -> int:
        """The block behind the last that could be loaded."""
        known = len(state.keys) // len(self._parts)
        if not self._parts.window and not self._engine.drops_last:
            return known
        # A prefix has its windowed parts at its end, which must be where the load ends. And the
        # last token is always computed; its window may reach one token further back. Nor does the
        # block of that token count as one that is found, of which the last is dropped.
        return min(known, (state.request.num_tokens - 1) // self._block_tokens)

    def to_load(
        self, state: RequestState, blocks: list[int]
    ) -> tuple[list[int], list[bytes], list[int]]:
        """Block, key and paged block of each part that the engine has a place for."""
        if self._parts.is_plain:
            (table,) = state.tables
            return blocks, [state.keys[b] for b in blocks], [table[b] for b in blocks]
        of_block: list[int] = []
        keys: list[bytes] = []
        targets: list[int] = []
        size = len(self._parts)
        for block in blocks:
            for part, paged in enumerate(self._parts.paged(state.tables, block)):
                if paged != NULL_BLOCK or not self._parts.window:
                    of_block.append(block)
                    keys.append(state.keys[block * size + part])
                    targets.append(paged)
        return of_block, keys, targets

    def forget(self, request_id: str) -> Counter[str]:
        """Drop a request that has finished; how many of its blocks never found room, and why."""
        state = self._states.pop(request_id, None)
        if state is None:
            return Counter()
        state.lookup.cancel()
        return Counter(state.refused.values())

    def reset(self) -> None:
        """Keep what is stored in a new generation free of what was computed in an older one.

        A request that has blocks has computed some of them with what is reset, so that none of
        its blocks may be stored. The others begin anew.
        """
        self._states = {i: state for i, state in self._states.items() if any(state.tables)}
        for state in self._states.values():
            state.store, state.recompute = False, True

    def scheduled(self, output: SchedulerOutput, overwritten: set[int]) -> Iterator[Scheduled]:
        """Each request a step runs.

        Blocks that the step writes are added to `overwritten`.
        """
        for one in self._scheduled(output, overwritten):
            one.state.computed = one.after
            yield one

    def _scheduled(self, output: SchedulerOutput, overwritten: set[int]) -> Iterator[Scheduled]:
        for new in output.scheduled_new_reqs:
            state = self._states.get(new.req_id)
            if state is None:
                continue
            state.tables = tuple(list(table) for table in new.block_ids)
            before = new.num_computed_tokens
            overwritten.update(self._parts.written(state.tables, before))
            if not self._promote:
                state.offered = before // self._block_tokens
            yield Scheduled(state, before, before + output.num_scheduled_tokens[new.req_id])
        cached = output.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            state = self._states.get(request_id)
            if state is None:
                continue
            added = cached.new_block_ids[i] or tuple([] for _ in self._engine.kv_groups)
            if request_id in cached.resumed_req_ids or not state.tables:
                state.tables = tuple([] for _ in added)
            for table, more in zip(state.tables, added, strict=True):
                table += more
            before = cached.num_computed_tokens[i]
            overwritten.update(self._parts.written(state.tables, before))
            after = before + output.num_scheduled_tokens.get(request_id, 0)
            yield Scheduled(state, before, after)

    def last_offers(self, state: RequestState, tables: Sequence[list[int]]) -> Offers:
        """What is left to offer of a request that has ended, and had these block tables then.

        An engine that schedules ahead learns of a step's tokens when the next step is on its way.
        So nobody has offered a block that the last but one token completes. The last token is
        sampled and never computed; what ran ahead of it wrote behind that block. A conversation
        that goes on without that token has others in its place, so that the engine's own count
        of what is computed holds, too.
        """
        if not any(tables):
            return Offers((), [])  # it was preempted
        request = state.request
        computed = min(state.computed, request.num_computed_tokens, request.num_tokens - 1)
        state.tables = tuple(tables)
        return self.offers(Scheduled(state, computed, computed))

    def offers(self, scheduled: Scheduled) -> Offers:
        """All parts of the blocks that are not offered yet."""
        state, before, _ = scheduled
        self.state_of(state.request)
        if not state.media.shared:
            return Offers([], [])
        first, last = state.offered, self._complete(scheduled)
        state.offered = max(first, last)
        if self._parts.is_plain:
            (table,) = state.tables
            pairs = list(zip(state.keys[first:last], table[first:last], strict=True))
            return Offers(range(first, last), pairs)
        size = len(self._parts)
        return self._kept(state, range(first * size, last * size), before)

    def again(self, scheduled: Scheduled, most: int) -> Offers:
        """At most so many of the parts that had no room; what is still refused must be noted again.

        Its request runs in this step, so that these blocks are its own.
        """
        state, before, _ = scheduled
        last = self._complete(scheduled) * len(self._parts)
        # After a preemption it may not have got as far again.
        taken = [number for number in islice(state.refused, most) if number < last]
        offers = self._kept(state, taken, before)
        for number in set(taken) - set(offers.numbers):
            del state.refused[number]  # the engine has given it away
        return offers

    def _complete(self, scheduled: Scheduled) -> int:
        """Leading blocks of which the step leaves every token computed."""
        state, _, after = scheduled
        if state.prompt_only:
            after = min(after, state.request.num_prompt_tokens)
        return min(
            len(state.keys) // len(self._parts),
            after // self._block_tokens,
            self._parts.blocks_in(state.tables),
        )

    def _kept(self, state: RequestState, numbers: Iterable[int], before: int) -> Offers:
        """Those of these parts that the engine has not given away."""
        kept_numbers: list[int] = []
        pairs: list[tuple[bytes, int]] = []
        at, paged, kept = -1, [NULL_BLOCK], [False]
        for number in numbers:
            block, part = divmod(number, len(self._parts))
            if block != at:
                # Its block table as we know it still names what the engine has given away since.
                at, kept = block, self._parts.kept(block, before)
                paged = self._parts.paged(state.tables, block)
            if kept[part] and (paged[part] != NULL_BLOCK or not self._parts.window):
                kept_numbers.append(number)
                pairs.append((state.keys[number], paged[part]))
        return Offers(kept_numbers, pairs)
