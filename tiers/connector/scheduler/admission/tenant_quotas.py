"""Tenants: what one tier may keep of whose requests."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from spec.tenants import TenantSpec
from tiers.contract.protocols import Request


def tenant_of(request: Request) -> str:
    """Whose request it is: its cache salt, without which its blocks are everybody's."""
    return getattr(request, "cache_salt", None) or ""


class Bounds(NamedTuple):
    """How many blocks may be retained for all tenants together, and for one of them."""

    all: int
    one: int


class Tenants:
    """A tier's view of the rules; used by the scheduler's thread alone."""

    def __init__(
        self, tier: str, rules: Mapping[str, TenantSpec], max_retained: float = 0.0
    ) -> None:
        """`max_retained`: the part of the tier that hints may retain."""
        self._tier = tier
        self._rules = rules
        self._max_retained = max_retained
        self._kept: defaultdict[str, dict[bytes, None]] = defaultdict(dict)
        self._owner: dict[bytes, str] = {}

    def may_keep(self, tenant: str) -> bool:
        """Whether the tier is one for this tenant."""
        rule = self._rules.get(tenant)
        return rule is None or rule.tiers is None or self._tier in rule.tiers

    def retained(self, tenant: str, max_blocks: int) -> Bounds:
        """How much of a tier's `max_blocks` hints may retain, in all and for a tenant."""
        rule, part = self._rules.get(tenant), self._max_retained
        own = part / 2 if rule is None or rule.max_retained is None else rule.max_retained
        return Bounds(int(part * max_blocks), int(own * max_blocks))

    def kept(self, tenant: str, keys: Iterable[bytes], block_bytes: int) -> list[bytes]:
        """The tier has taken these blocks; those of the tenant that must go for it, the oldest."""
        rule = self._rules.get(tenant)
        if rule is None or rule.quota is None:
            return []
        kept = self._kept[tenant]
        for key in keys:
            kept.pop(key, None)
            kept[key] = None
            self._owner[key] = tenant
        beyond = len(kept) - rule.quota // max(1, block_bytes)
        oldest = list(itertools.islice(kept, max(0, beyond)))
        self.gone(oldest)
        return oldest

    def gone(self, keys: Iterable[bytes]) -> None:
        """The tier has these blocks no more."""
        for key in keys:
            tenant = self._owner.pop(key, None)
            if tenant is not None:
                self._kept[tenant].pop(key, None)
