"""Measures how fast a chain's tiers move blocks, once, by real stores and loads."""

from tiers.tuning.profiling.profile import profile_tiers

__all__ = ["profile_tiers"]
