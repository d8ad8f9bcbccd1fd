"""Who got how much of the tiers? Counts by tenant, whose sums are the tiers' own counts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from tiers.contract.protocols import Request
from tiers.contract.stats import OTHER_TENANTS, TENANT


def tenant_of(request: Request) -> str:
    """Whose request it is: its cache salt, without which its blocks are everybody's."""
    return getattr(request, "cache_salt", None) or ""


class TenantCounts:
    """Counts the measures `OF_TENANT`; used by the scheduler's thread alone.

    They are counted where the tiers count theirs, by the same numbers.
    """

    def __init__(self, names: Mapping[str, str] | None = None) -> None:
        """`names`: of the tenants that are shown, by their salts, which never are."""
        self.names = names or {}
        self._counts: defaultdict[str, defaultdict[str, float]] = _no_counts()
        self._unvalued: defaultdict[str, int] = defaultdict(int)
        self.prefill_token_seconds: float | None = None
        """Seconds to compute a token, as measured last; None: not yet."""

    def count(self, tenant: str, **measures: float) -> None:
        """Add to the measures of a tenant, by its salt."""
        counts = self._counts[self._entry(tenant)]
        for name, value in measures.items():
            counts[name] += value

    def stored(self, size: int, blocks: Mapping[str, int]) -> None:
        """A job stored `size` bytes in all, of so many `blocks` of each tenant, by its salt."""
        left, count = size, sum(blocks.values())
        for tenant, of_tenant in blocks.items():
            part = left * of_tenant // count if count else left
            left, count = left - part, count - of_tenant
            self.count(tenant, tenant_stored_bytes=part)

    def loaded(self, tenant: str, tokens: int, again: bool) -> None:
        """Tokens of a tenant that need not be computed, or not `again`. What that saves counts once
        it is known how fast the engine computes."""
        if not again:
            self.count(tenant, tenant_loaded_tokens=tokens)
        self._unvalued[self._entry(tenant)] += tokens

    def _entry(self, tenant: str) -> str:
        return TENANT + self.names.get(tenant, OTHER_TENANTS)

    def take_measures(self) -> Mapping[str, Mapping[str, float]]:
        """Measures since the last call, by the entry of each tenant."""
        if self.prefill_token_seconds is not None:
            for entry, tokens in self._unvalued.items():
                self._counts[entry]["tenant_prefill_seconds"] += tokens * self.prefill_token_seconds
            self._unvalued.clear()
        taken, self._counts = self._counts, _no_counts()
        return taken


def _no_counts() -> defaultdict[str, defaultdict[str, float]]:
    return defaultdict(lambda: defaultdict(float))
