"""Every policy of ours keeps the contract of policies."""

from __future__ import annotations

from tiers.connector.scheduler.admission import ThresholdAdmission
from tiers.cpu.eviction import ArcEviction, LruEviction
from tiers.testing import AdmissionContract, EvictionContract


class TestLru(EvictionContract):
    def make_policy(self, capacity: int) -> LruEviction:
        return LruEviction(capacity)


class TestArc(EvictionContract):
    hits_beside_lru = 1.5
    hits_in_phases = 1.1

    def make_policy(self, capacity: int) -> ArcEviction:
        return ArcEviction(capacity)


class FewCounts(ThresholdAdmission):
    COUNTED = 4096


class TestThreshold(AdmissionContract):
    most_keys = FewCounts.COUNTED
    counts_requests = True

    def make_policy(self, threshold: int) -> ThresholdAdmission:
        return FewCounts(threshold)
