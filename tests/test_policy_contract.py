"""Every policy of ours keeps the contract of policies."""

from __future__ import annotations

import itertools
import re
from unittest.mock import patch

import pytest

from tiers.connector.scheduler.admission import ThresholdAdmission
from tiers.cpu.eviction import ArcEviction, LruEviction
from tiers.errors import TierError
from tiers.testing import AdmissionContract, EvictionContract


class TestLru(EvictionContract):
    def make_policy(self, capacity: int) -> LruEviction:
        return LruEviction(capacity)


@pytest.mark.parametrize(
    ("method", "answer"),
    [
        *itertools.product(("enter", "used", "next"), (True, 1.0, 0, 2, "1")),
        *(("queues", answer) for answer in (True, 1.0, 0, 65)),
    ],
)
def test_the_kit_takes_no_answer_that_the_engine_refuses(method: str, answer: object) -> None:
    given = answer if method == "queues" else lambda *_: answer
    wrong = type("Wrong", (LruEviction,), {method: given})
    kit = TestLru()
    made = patch.object(kit, "make_policy", wrong)
    with made, pytest.raises(TierError, match=re.escape(repr(answer))):
        kit.test_every_queue_empties()


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
