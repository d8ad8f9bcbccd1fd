"""How long a call takes, where a tier is tried."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def timed(call: Callable[[], T]) -> tuple[float, T]:
    """The seconds that a call takes, more than zero, and what it returns."""
    began = time.perf_counter()
    result = call()
    return max(1e-9, time.perf_counter() - began), result
