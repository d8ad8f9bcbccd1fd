"""TierHints: obeys in one tier what requests say of their prompts' blocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tiers.connector.policy.request_hints import NO_HINTS
from tiers.connector.policy.request_state import RequestState
from tiers.connector.scheduler.admission.retained import Retained
from tiers.connector.scheduler.admission.tenant_quotas import tenant_of
from tiers.connector.scheduler.context import TierContext
from tiers.connector.scheduler.tier_request import TierRequest

ENDED_AT_ONCE = 512
"""Blocks whose time is over that a step lets go: one to two milliseconds of work."""
MOST_WAITING = 1 << 17
"""Blocks of hints that wait for their turn; further ones are refused: who asks for so much in so
little time would have others wait."""


class _WaitingHint(NamedTuple):
    """A request's hint that is yet to be obeyed for these keys. `since`: its time counts from."""

    state: RequestState
    keys: Sequence[bytes]
    since: float


class TierHints:
    """The hints of one tier's requests; used by the scheduler's thread alone.

    A hint is obeyed for each block when it has been stored, and for all of the prompt when the
    request ends: then the tier may have some that others stored, and time counts from there. For a
    long prompt it is obeyed over several steps, as it is looked up (see `LookupPace`).
    """

    def __init__(self, context: TierContext, now: Callable[[], float]) -> None:
        """`now`: seconds, never going back."""
        self._context = context
        self._now = now
        self._retained = Retained(now)
        self._waiting: deque[_WaitingHint] = deque()
        self._blocks_waiting = 0

    def __len__(self) -> int:
        """Blocks that are retained."""
        return len(self._retained)

    def step(self) -> None:
        """Let go blocks whose time is over, and obey what waits, as much of it as a step may."""
        if self._retained and (ended := self._retained.take_ended(ENDED_AT_ONCE)):
            self._context.open.manager.retaining.release(ended)
        self._obey_waiting()

    def stored(self, tier_request: TierRequest, numbers: Sequence[int]) -> None:
        """Blocks of these numbers among a request's keys have come into the tier."""
        if self._retained:
            self._context.open.manager.retaining.stored(len(numbers), self._context.open.max_blocks)
        if tier_request.state.hints is not NO_HINTS:
            end, keys = self._prompt(tier_request), tier_request.state.keys
            self._take(tier_request, [keys[number] for number in sorted(numbers) if number < end])

    def ended(self, tier_request: TierRequest) -> None:
        """A request has ended."""
        if tier_request.state.hints is not NO_HINTS:
            self._take(
                tier_request,
                self._context.requests.keys(tier_request.state)[: self._prompt(tier_request)],
            )

    def forget(self) -> None:
        """Let all go, and obey nothing that waits."""
        self._waiting.clear()
        self._blocks_waiting = 0
        self._context.open.manager.retaining.release(self._retained.remove_all())

    def _prompt(self, tier_request: TierRequest) -> int:
        """The number behind those of the prompt's full blocks."""
        requests = self._context.requests
        tokens = tier_request.state.request.num_prompt_tokens
        return tokens // requests.engine.block_tokens * len(requests.groups)

    def _take(self, tier_request: TierRequest, keys: Sequence[bytes]) -> None:
        """Obey a request's hint for these keys: at once if they are a few, else as steps go on."""
        if not keys:
            return
        if self._blocks_waiting + len(keys) > MOST_WAITING:
            retains = tier_request.state.hints.retain is not None
            self._context.count(**{"retain_refused" if retains else "demote_refused": len(keys)})
            return
        self._waiting.append(_WaitingHint(tier_request.state, keys, self._now()))
        self._blocks_waiting += len(keys)
        pace = self._context.open.manager.pace
        if pace.is_short(self._blocks_waiting) and not pace.is_spent:
            self._obey_waiting()

    def _obey_waiting(self) -> None:
        """Obey as much of what waits as this step may look up."""
        if not self._waiting:
            return
        pace = self._context.open.manager.pace
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
        request_state = hint.state
        context, hints, manager = self._context, request_state.hints, self._context.open.manager
        if request_state.is_outdated:
            return
        if hints.retain is not None:
            held, tenant = manager.retaining.held(keys), tenant_of(request_state.request)
            bounds = context.tenants.retained(tenant, context.open.max_blocks)
            ttl = hints.retain.ttl - (self._now() - hint.since)
            kept = self._retained.add(held, tenant, ttl, bounds)
            manager.retaining.retain(kept)
            if len(kept) < len(held):
                context.count(retain_refused=len(held) - len(kept))
        elif hints.demote is not None:
            manager.retaining.release(self._retained.remove(keys))
            if demoted := manager.demote(keys):
                context.count(demoted_blocks=demoted)
