"""How a guarded store does, in a word."""

from __future__ import annotations

from tiers.wrappers.guard import Guarded


def is_up(guarded: Guarded) -> bool:
    """Whether reads and writes worked when they were last tried."""
    return guarded.health.reads_up and guarded.health.writes_up
