"""Stores around any store: one that is slow, one that fails."""

from __future__ import annotations

import random
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from tiers.store import (
    Block,
    Capability,
    Clear,
    LocalIndex,
    StoreWrapper,
    TierStore,
    Touch,
    required,
)

Answer = TypeVar("Answer")

Delay = Callable[[str, int], float]
"""Seconds that a call takes besides the store's own time, from its verb and its bytes. The bytes
are those of the payloads given to `put` or filled by `get`; 0 for other verbs."""


class Pace:
    """How long the calls of slow stores take. Stores may share one; change it at any time."""

    def __init__(self, delay: Delay = lambda verb, num_bytes: 0.0) -> None:
        self.delay = delay
        self._passing: dict[str, int] = {}  # of verbs that hang: calls that still pass
        self._changed = threading.Condition()

    def hang(self, *verbs: str, after: int = 0) -> None:
        """Let calls of `verbs` hang until `resume`; the next `after` calls of each still pass."""
        with self._changed:
            self._passing.update(dict.fromkeys(verbs, after))

    def resume(self) -> None:
        """Let every call go on."""
        with self._changed:
            self._passing.clear()
            self._changed.notify_all()

    def wait(self, verb: str) -> None:
        with self._changed:
            if self._passing.get(verb, 0) > 0:
                self._passing[verb] -= 1
            else:
                self._changed.wait_for(lambda: verb not in self._passing)

    def spend(self, verb: str, num_bytes: int = 0) -> None:
        if (seconds := self.delay(verb, num_bytes)) > 0:
            time.sleep(seconds)


class _Tried(StoreWrapper, ABC):
    """A store whose verbs but `put` and `get` go through `_call`."""

    @abstractmethod
    def _call(self, verb: str, call: Callable[[], Answer]) -> Answer: ...

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        return self._call("has", partial(super().has, keys))

    def peek(self, keys: Sequence[bytes]) -> list[bool]:
        return self._call("peek", partial(required(self._inner, LocalIndex).peek, keys))

    def drop(self, keys: Sequence[bytes]) -> None:
        self._call("drop", partial(super().drop, keys))

    def touch(self, keys: Sequence[bytes]) -> None:
        self._call("touch", partial(required(self._inner, Touch).touch, keys))

    def clear(self, namespace: bytes) -> bool:
        return self._call("clear", partial(required(self._inner, Clear).clear, namespace))


class SlowStore(_Tried):
    """A store whose calls take as long as `pace` says.

    `indexed` False hides the store's LocalIndex, so that an engine asks it in the background.
    """

    def __init__(self, store: TierStore, pace: Pace | None = None, indexed: bool = True) -> None:
        super().__init__(store)
        self.pace = Pace() if pace is None else pace
        self.indexed = indexed

    def capability(self, kind: type[Capability]) -> Capability | None:
        return None if kind is LocalIndex and not self.indexed else super().capability(kind)

    def _call(self, verb: str, call: Callable[[], Answer]) -> Answer:
        self.pace.wait(verb)
        answer = call()
        self.pace.spend(verb)
        return answer

    def put(self, blocks: Sequence[Block]) -> list[bool]:
        self.pace.wait("put")
        self.pace.spend("put", sum(len(block.payload) for block in blocks))
        return super().put(blocks)

    def get(self, blocks: Sequence[Block]) -> list[bool]:
        """Load, then wait for what the loaded bytes take."""
        self.pace.wait("get")
        hits = super().get(blocks)
        loaded = sum(len(block.payload) for block, hit in zip(blocks, hits, strict=True) if hit)
        self.pace.spend("get", loaded)
        return hits

    def close(self) -> None:
        """Let calls that hang go on, and close the store."""
        self.pace.resume()
        super().close()


class Faults:
    """The faults of faulty stores. Stores may share one; change it at any time.

    `missing`: probability that `get` misses a block that is held.
    `lost_batches`: the next calls of `get` that miss all their blocks.
    `refused`: probability that `put` does not store a block.
    `invented`: probability that `has` and `peek` report a key that is not held.
    `calls`: calls of each verb so far, those that failed among them.
    """

    def __init__(self, seed: int = 0) -> None:
        self.calls: Counter[str] = Counter()
        self._random = random.Random(seed)
        self.heal()

    def heal(self) -> None:
        """End every fault."""
        self.errors: dict[str, tuple[tuple[float, Exception], ...]] = {}
        self.missing = self.refused = self.invented = 0.0
        self.lost_batches = 0

    def fail(self, *verbs: str, error: Exception, chance: float = 1.0) -> None:
        """Let each call of `verbs` raise such an error with a probability, besides others."""
        for verb in verbs:
            self.errors[verb] = (*self.errors.get(verb, ()), (chance, error))

    def meet(self, verb: str) -> None:
        """Count a call of `verb`; raise its error, if one is due."""
        self.calls[verb] += 1
        number = self._random.random()
        for chance, error in self.errors.get(verb, ()):
            number -= chance
            if number < 0:
                raise type(error)(*error.args)  # its own traceback: threads raise it at once

    def happens(self, chance: float) -> bool:
        """Draw whether something of this probability happens."""
        return self._random.random() < chance


class FaultyStore(_Tried):
    """A store that fails as `faults` says. A payload that it misses is filled with garbage."""

    def __init__(self, store: TierStore, faults: Faults | None = None) -> None:
        super().__init__(store)
        self.faults = Faults() if faults is None else faults

    def _call(self, verb: str, call: Callable[[], Answer]) -> Answer:
        self.faults.meet(verb)
        return call()

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        return self._invent(super().has(keys))

    def peek(self, keys: Sequence[bytes]) -> list[bool]:
        return self._invent(super().peek(keys))

    def _invent(self, held: list[bool]) -> list[bool]:
        return [has or self.faults.happens(self.faults.invented) for has in held]

    def put(self, blocks: Sequence[Block]) -> list[bool]:
        self.faults.meet("put")
        taken = [not self.faults.happens(self.faults.refused) for _ in blocks]
        stored = iter(super().put([b for b, take in zip(blocks, taken, strict=True) if take]))
        return [take and next(stored) for take in taken]

    def get(self, blocks: Sequence[Block]) -> list[bool]:
        """Load the blocks; then spoil those that are to be missed."""
        self.faults.meet("get")
        hits = super().get(blocks)
        missing = self.faults.missing
        if self.faults.lost_batches:
            self.faults.lost_batches -= 1
            missing = 1.0
        hits = [hit and not self.faults.happens(missing) for hit in hits]
        for block, hit in zip(blocks, hits, strict=True):
            if not hit:
                block.payload[:] = b"\xa5" * len(block.payload)
        return hits
