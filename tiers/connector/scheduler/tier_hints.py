"""TierHints: obeys in one tier what requests hint of their prompts' blocks."""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tiers.connector.policy.request_params import NO_HINTS
from tiers.connector.policy.request_state import RequestState
from tiers.connector.policy.tenant_counts import tenant_of
from tiers.connector.scheduler.admission import PinBounds
from tiers.connector.scheduler.tier import Tier, TierRequest

ENDED_AT_ONCE = 512
"""Blocks whose time is over that a step lets go: one to two milliseconds of work."""
MOST_WAITING = 1 << 17
"""Blocks of hints that wait for their turn; further ones are refused: who asks for so much in so
little time would have others wait."""


class _WaitingHint(NamedTuple):
    """A request's hint that is yet to be obeyed for these keys. `since`: its time counts from."""

    request_state: RequestState
    keys: Sequence[bytes]
    since: float


class TierHints:
    """The hints of one tier's requests; used by the scheduler's thread alone.

    A hint is obeyed for each block when it has been stored, and for the whole prompt when the
    request ends: by then the tier may have blocks of it that others stored. Its seconds count from
    the end. For a long prompt it is obeyed over several steps, as lookups are (see `LookupPace`).
    """

    def __init__(self, tier: Tier, now: Callable[[], float]) -> None:
        """`now`: seconds, never going back."""
        self._tier = tier
        self._now = now
        self._retained = PinnedBlocks(now)
        self._waiting: deque[_WaitingHint] = deque()
        self._blocks_waiting = 0

    def __len__(self) -> int:
        return len(self._retained)

    def step(self) -> None:
        """Let go blocks whose time is over, and obey what waits, as much of it as a step may."""
        if self._retained and (ended := self._retained.take_ended(ENDED_AT_ONCE)):
            self._tier.open.manager.unpin(ended)
        self._obey_waiting()

    def stored(self, tier_request: TierRequest, numbers: Sequence[int]) -> None:
        """Blocks of these numbers among a request's keys have come into the tier."""
        if self._retained:
            self._tier.open.manager.renew_pins(len(numbers), self._tier.open.max_blocks)
        if tier_request.request_state.hints is not NO_HINTS:
            end, keys = self._prompt_end(tier_request), tier_request.request_state.keys
            self._take(tier_request, [keys[number] for number in sorted(numbers) if number < end])

    def ended(self, tier_request: TierRequest) -> None:
        if tier_request.request_state.hints is not NO_HINTS:
            keys = self._tier.requests.keys(tier_request.request_state)
            self._take(tier_request, keys[: self._prompt_end(tier_request)])

    def lost(self, keys: Sequence[bytes]) -> None:
        """The tier has these blocks no more: they take no room of others that could be retained."""
        self._tier.open.manager.unpin(self._retained.remove(keys))

    def forget(self) -> None:
        """Let all go, and obey nothing that waits."""
        self._waiting.clear()
        self._blocks_waiting = 0
        self._tier.open.manager.unpin(self._retained.remove_all())

    def _prompt_end(self, tier_request: TierRequest) -> int:
        """The number behind those of the prompt's full blocks."""
        requests = self._tier.requests
        tokens = tier_request.request_state.request.num_prompt_tokens
        return tokens // requests.engine.block_tokens * len(requests.groups)

    def _take(self, tier_request: TierRequest, keys: Sequence[bytes]) -> None:
        """Obey a request's hint for these keys: at once if they are a few, else as steps go on."""
        if not keys:
            return
        if self._blocks_waiting + len(keys) > MOST_WAITING:
            retains = tier_request.request_state.hints.retain is not None
            self._tier.count(**{"retain_refused" if retains else "demote_refused": len(keys)})
            return
        self._waiting.append(_WaitingHint(tier_request.request_state, keys, self._now()))
        self._blocks_waiting += len(keys)
        if self._tier.open.manager.pace.is_short(self._blocks_waiting):
            self._obey_waiting()

    def _obey_waiting(self) -> None:
        """Obey as much of what waits as this step may look up."""
        if not self._waiting:
            return
        pace = self._tier.open.manager.pace
        left = pace.take(self._blocks_waiting)
        self._blocks_waiting -= left
        while left:
            first = self._waiting.popleft()
            now, later = first.keys[:left], first.keys[left:]
            self._obey(first, now)
            left -= len(now)
            if later:
                self._waiting.appendleft(first._replace(keys=later))
        pace.took()

    def _obey(self, hint: _WaitingHint, keys: Sequence[bytes]) -> None:
        request_state = hint.request_state
        tier, hints, manager = self._tier, request_state.hints, self._tier.open.manager
        if request_state.is_outdated:
            return
        if hints.retain is not None:
            held, tenant = manager.pinnable(keys), tenant_of(request_state.request)
            bounds = tier.tenants.retained(tenant, tier.open.max_blocks)
            ttl = hints.retain.ttl - (self._now() - hint.since)
            kept = self._retained.add(held, tenant, ttl, bounds)
            manager.pin(kept)
            if len(kept) < len(held):
                tier.count(retain_refused=len(held) - len(kept))
        elif hints.demote is not None:
            manager.unpin(self._retained.remove(keys))
            if demoted := manager.demote(keys):
                tier.count(demoted_blocks=demoted)


class PinnedBlocks:
    """Blocks by key, each until a whole second of the clock. Used by the scheduler's thread alone.

    Each block has one expiry, and expiries share one bucket a second: hints that clients repeat
    take no more memory.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._kept: dict[bytes, tuple[int, str]] = {}
        """Until when each block is kept, and whose it is."""
        self._ending: dict[int, dict[bytes, None]] = {}
        """The keys of each second."""
        self._seconds: list[int] = []
        """Those seconds, as a heap."""
        self._counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, keys: Sequence[bytes], tenant: str, ttl: float, bounds: PinBounds) -> list[bytes]:
        """Retain these blocks of a tenant, in order, as far as the bounds go, for `ttl` seconds
        from now, or as long as they are retained already. Returns those that are retained."""
        until = math.ceil(self._now() + ttl)
        before = [key for key in keys if key in self._kept]
        room = min(bounds.all - len(self), bounds.per_tenant - self._counts[tenant])
        new = [key for key in dict.fromkeys(keys) if key not in self._kept][: max(0, room)]
        if new:  # else tenants of whom nothing was ever retained would be remembered for ever
            self._counts[tenant] += len(new)
        for key in (*before, *new):
            self._keep(key, until, tenant)
        return [key for key in keys if key in self._kept]

    def _keep(self, key: bytes, until: int, tenant: str) -> None:
        before, tenant = self._kept.get(key, (0, tenant))
        if before >= until:
            return
        if before:
            del self._ending[before][key]
        if until not in self._ending:
            self._ending[until] = {}
            heapq.heappush(self._seconds, until)
        self._ending[until][key] = None
        self._kept[key] = until, tenant

    def remove(self, keys: Sequence[bytes]) -> list[bytes]:
        """Retain these no more; returns those that were."""
        found = [key for key in dict.fromkeys(keys) if key in self._kept]
        for key in found:
            del self._ending[self._forget(key)][key]
        return found

    def remove_all(self) -> list[bytes]:
        return self.remove([*self._kept])

    def take_ended(self, most: int) -> list[bytes]:
        """Remove and return blocks whose time is over, `most` at most, a prefix's tail first."""
        ended: list[bytes] = []
        now = self._now()
        while self._seconds and self._seconds[0] <= now:
            keys = self._ending[self._seconds[0]]
            while keys and len(ended) < most:
                key, _ = keys.popitem()
                self._forget(key)
                ended.append(key)
            if keys:
                break
            del self._ending[heapq.heappop(self._seconds)]
        return ended

    def _forget(self, key: bytes) -> int:
        until, tenant = self._kept.pop(key)
        self._counts[tenant] -= 1
        if not self._counts[tenant]:
            del self._counts[tenant]
        return until
