"""A disk tier that is slow, hangs, fails, is full or boasts when it is told to."""

from __future__ import annotations

import random
from typing import ClassVar

from pydantic import PrivateAttr

from spec.offloading import StoreContext, StoreSpec
from tiers.errors import TierFull
from tiers.store import TierStore
from tiers.testing import Faults, FaultyStore, Pace, SlowStore

IO_VERBS = ("has", "put", "get", "drop", "clear")
"""The verbs that reach the device; `peek` and `touch` answer from memory."""


class Mood:
    """How the stores of a tier behave; all of them share it."""

    def __init__(self, rng: random.Random) -> None:
        self.pace = Pace()
        self.faults = Faults()
        self._random = rng

    def turn(self, kind: str) -> None:
        """Be `slow`, `hanging`, `failing`, `full` or `boastful`; an empty kind ends all that."""
        self.pace.delay = self._slow if kind == "slow" else lambda verb, num_bytes: 0.0
        self.faults.heal()
        if kind == "hanging":
            self.pace.hang(*IO_VERBS)
        else:
            self.pace.resume()
        if kind == "failing":
            self.faults.fail(*IO_VERBS, error=OSError(5, "Input/output error"), chance=0.7)
        elif kind == "full":
            self.faults.fail("put", error=TierFull("no space"))
        elif kind == "boastful":
            self.faults.invented = 1.0

    def _slow(self, verb: str, num_bytes: int) -> float:
        return self._random.random() * 0.1 if verb in IO_VERBS else 0.0


class Sabotaged(StoreSpec):
    """A tier, `inner`, whose stores behave as `mood` says, in both halves of an engine."""

    verifies: ClassVar[bool] = True
    is_prompt: ClassVar[bool] = True

    inner: StoreSpec
    _mood: Mood = PrivateAttr(default_factory=lambda: Mood(random.Random(0)))

    @property
    def mood(self) -> Mood:
        """How its stores behave."""
        return self._mood

    def open(self, site: StoreContext) -> TierStore:
        return FaultyStore(SlowStore(self.inner.open(site), self._mood.pace), self._mood.faults)
