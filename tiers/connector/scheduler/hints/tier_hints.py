"""TierHints: obeys in one tier what requests say of their prompts' blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tiers.connector.policy.request_hints import NO_HINTS
from tiers.connector.scheduler.context import TierContext
from tiers.connector.scheduler.hints.retained import Retained
from tiers.connector.scheduler.storing.offers import TierRequest
from tiers.connector.scheduler.storing.tenant_quotas import tenant_of

ENDED_AT_ONCE = 512
"""Blocks whose time is over that a step lets go: one to two milliseconds of work."""


class TierHints:
    """The hints of one tier's requests; used by the scheduler's thread alone.

    A hint is obeyed for each block when it has been stored, and for all of the prompt when the
    request ends: then the tier may have some that others stored, and time counts from there.
    """

    def __init__(self, context: TierContext, now: Callable[[], float]) -> None:
        """`now`: seconds, never going back."""
        self._context = context
        self._retained = Retained(now)

    def __len__(self) -> int:
        """Blocks that are retained."""
        return len(self._retained)

    def step(self) -> None:
        """Let go blocks whose time is over."""
        if self._retained and (ended := self._retained.take_ended(ENDED_AT_ONCE)):
            self._context.open.manager.retaining.release(ended)

    def stored(self, own: TierRequest, numbers: Sequence[int]) -> None:
        """Blocks of these numbers among a request's keys have come into the tier."""
        if self._retained:
            self._context.open.manager.retaining.stored(len(numbers), self._context.open.max_blocks)
        if own.state.hints is not NO_HINTS:
            end, keys = self._prompt(own), own.state.keys
            self._obey(own, [keys[number] for number in sorted(numbers) if number < end])

    def ended(self, own: TierRequest) -> None:
        """A request has ended."""
        if own.state.hints is not NO_HINTS:
            self._obey(own, self._context.requests.keys(own.state)[: self._prompt(own)])

    def forget(self) -> None:
        """Let all go."""
        self._context.open.manager.retaining.release(self._retained.remove_all())

    def _prompt(self, own: TierRequest) -> int:
        """The number behind those of the prompt's full blocks."""
        requests = self._context.requests
        tokens = own.state.request.num_prompt_tokens
        return tokens // requests.engine.block_tokens * len(requests.groups)

    def _obey(self, own: TierRequest, keys: Sequence[bytes]) -> None:
        context, hints, manager = self._context, own.state.hints, self._context.open.manager
        if own.state.is_outdated:
            return
        if hints.retain is not None:
            held, tenant = manager.retaining.held(keys), tenant_of(own.state.request)
            bounds = context.tenants.retained(tenant, context.open.max_blocks)
            kept = self._retained.add(held, tenant, hints.retain.ttl, bounds)
            manager.retaining.retain(kept)
            if len(kept) < len(held):
                context.count(retain_refused=len(held) - len(kept))
        elif hints.demote is not None:
            manager.retaining.release(self._retained.remove(keys))
            if demoted := manager.demote(keys):
                context.count(demoted_blocks=demoted)
