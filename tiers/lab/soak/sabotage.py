"""A store that someone meddles with: slow, hanging, failing, full or boastful on demand."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import PrivateAttr

from spec.offloading import StoreContext, StoreSpec
from tiers.errors import TierFull
from tiers.store import Block, StoreWrapper, TierStore


class Mood:
    """How the stores of a tier behave just now; shared by all of them."""

    def __init__(self, rng: random.Random) -> None:
        self.kind = ""
        self.well = threading.Event()
        self.well.set()
        self._random = rng

    def turn(self, kind: str) -> None:
        """Be `slow`, `hanging`, `failing`, `full`, `boastful`; or well again, of an empty kind."""
        self.kind = kind
        (self.well.clear if kind == "hanging" else self.well.set)()

    def meet(self, verb: str) -> None:
        """What a verb comes upon first."""
        kind = self.kind
        if kind == "slow":
            time.sleep(self._random.random() * 0.1)
        elif kind == "hanging":
            self.well.wait()
        elif kind == "failing" and self._random.random() < 0.7:
            raise OSError(5, "Input/output error")
        elif kind == "full" and verb == "put":
            raise TierFull("no space")


class Sabotaged(StoreSpec):
    """A disk tier, meddled with. Both halves of an engine share its mood."""

    verifies: ClassVar[bool] = True
    is_prompt: ClassVar[bool] = True

    inner: StoreSpec
    _mood: Mood = PrivateAttr()

    def model_post_init(self, context: Any) -> None:
        """Begin well."""
        self._mood = Mood(random.Random(0))

    @property
    def mood(self) -> Mood:
        """How its stores behave."""
        return self._mood

    def open(self, site: StoreContext) -> TierStore:
        """Open the other tier's store."""
        return SabotagedStore(self.inner.open(site), self._mood)


class SabotagedStore(StoreWrapper):
    """A disk's store, if the mood lets it."""

    def __init__(self, store: TierStore, mood: Mood) -> None:
        super().__init__(store)
        self._mood = mood

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        """As the store's index, if the mood lets it."""
        self._mood.meet("has")
        return self.peek(keys)

    def peek(self, keys: Sequence[bytes]) -> list[bool]:
        """As the store; a boastful one has everything."""
        held = super().peek(keys)
        return [True] * len(keys) if self._mood.kind == "boastful" else held

    def put(self, blocks: Sequence[Block]) -> list[bool]:
        """As the store, if the mood lets it."""
        self._mood.meet("put")
        return super().put(blocks)

    def get(self, blocks: Sequence[Block]) -> list[bool]:
        """As the store, if the mood lets it; a miss leaves garbage behind."""
        self._mood.meet("get")
        got = super().get(blocks)
        for block in (block for block, ok in zip(blocks, got, strict=True) if not ok):
            block.payload[:] = b"\xa5" * len(block.payload)
        return got

    def drop(self, keys: Sequence[bytes]) -> None:
        """As the store, if the mood lets it."""
        self._mood.meet("drop")
        super().drop(keys)

    def clear(self, namespace: bytes) -> bool:
        """As the store, if the mood lets it."""
        self._mood.meet("clear")
        return super().clear(namespace)
