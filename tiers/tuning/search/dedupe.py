"""Derives a chain's report from another chain's, instead of simulating the same twice."""

from __future__ import annotations

from dataclasses import replace

from tiers.tuning.machine import Machine
from tiers.tuning.report import Report, TierUse
from tiers.tuning.simulation.chain import SimChain, SimTier


def derive_report(
    known: SimChain, report: Report, chain: SimChain, machine: Machine
) -> Report | None:
    """The report of `chain` on the requests of a `known` chain's report; None: simulate it.

    A tier that was never full has evicted nothing. So it would have done the same under any other
    eviction policy, and a store under any other capacity that has room for what it held; a host
    tier's capacity also decides how many slots there are. Nothing but its price differs then.
    """
    if replace(chain, tiers=known.tiers) != known or len(chain.tiers) != len(known.tiers):
        return None
    pairs = zip(report.tiers, known.tiers, chain.tiers, strict=True)
    if not all(_does_the_same(*one) for one in pairs):
        return None
    uses = [
        replace(use, price_per_month=machine.profile(tier.name, tier.type).price(tier.capacity))
        for use, tier in zip(report.tiers, chain.tiers, strict=True)
    ]
    return replace(report, tiers=tuple(uses))


def _does_the_same(use: TierUse, known: SimTier, tier: SimTier) -> bool:
    if tier == known:
        return True
    if use.held_bytes is None or replace(tier, capacity=0, eviction="") != replace(
        known, capacity=0, eviction=""
    ):
        return False
    if tier.capacity == known.capacity:
        return True
    has_room = tier.capacity is not None and tier.capacity > use.held_bytes
    return has_room and not tier.is_host
