"""Replays of traces over a real chain: real connectors, stores and bytes, in the trace's time."""

from tiers.tuning.replay.run import ReplayOptions, replay

__all__ = ["ReplayOptions", "replay"]
