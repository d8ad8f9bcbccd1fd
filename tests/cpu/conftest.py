"""Every eviction policy of the CPU tier."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import pytest

from tiers.cpu.residency import SlotResidency
from tiers.cpu.spec import CpuSpec
from tiers.host.slots import SlotPool

POLICIES: tuple[str, ...] = get_args(CpuSpec.model_fields["eviction"].annotation)

Open = Callable[[SlotPool, int], SlotResidency]


@pytest.fixture(params=POLICIES)
def open_tier(request: pytest.FixtureRequest) -> Open:
    """Opens the tier as a chain does, with one of the policies."""
    return CpuSpec(capacity=1, eviction=request.param).residency
