"""Why a tier covers no block of a request, for whoever asks why it was served as it was."""

from __future__ import annotations

from tiers.connector.scheduler.admission.tenant_quotas import tenant_of
from tiers.connector.scheduler.context import TierContext
from tiers.contract.protocols import Request


def why_nothing(context: TierContext, request: Request) -> str:
    """A word of `tiers.explain.accounts.REASONS`; empty: the tier was asked, and has none."""
    own = context.open.manager.health()
    state = context.requests.get(request)
    kept = None if state is None else context.own(state)
    if not context.health.usable:
        return "not_open"
    if not (context.health.reads and own.reads):
        return "down"
    if kept is not None and kept.recompute:
        return "failed_before"
    if kept is not None and kept.lookup.is_unanswered:
        return "late"
    if not own.reads_up:
        return "failed"
    return "" if context.tenants.may_keep(tenant_of(request)) else "tenant"
