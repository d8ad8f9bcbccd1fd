"""Every eviction policy of the CPU tier."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from spec.plugins import EVICTION, installed
from tiers.cpu.residency import SlotResidency
from tiers.cpu.spec import CpuSpec
from tiers.host.slots import SlotPool

POLICIES = tuple(installed(EVICTION))

Open = Callable[[SlotPool, int], SlotResidency]


@pytest.fixture(params=POLICIES)
def open_tier(request: pytest.FixtureRequest) -> Open:
    """Opens the tier as a chain does, with one of the policies."""
    return CpuSpec(capacity=1, eviction=request.param).residency
