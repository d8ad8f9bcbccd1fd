"""RequestObserver: hears of every request of a chain, and decides nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from tiers.contract.protocols import Request

CHAIN = "(chain)"
"""Stands for the chain itself where measures are named by tier; no tier can be called that."""


class RequestObserver(Protocol):
    """Is told on the scheduler's thread, and keeps it waiting for nothing."""

    def arrived(self, request: Request) -> None:
        """A request was queued."""

    def ended(self, request: Request) -> None:
        """A request ended, or was given up; told once, before the chain forgets it."""

    def take_measures(self) -> Mapping[str, Mapping[str, float]]:
        """What was measured since the last call: by tier, or what stands for one, and the names of
        `MEASURES`."""

    def close(self) -> None:
        """Finish within a few seconds."""
