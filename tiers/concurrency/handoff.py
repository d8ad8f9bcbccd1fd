"""Handoff: what one thread gives to another one, which looks for it from time to time."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Handoff(Generic[T]):
    """A queue from one thread to one other, bounded in items and in their weight.

    Nobody waits or is woken: the giver is the engine's thread, and a lock or a wake-up would cost
    it more than all the rest. Each of the two counters has one writer.
    """

    def __init__(self, items: int, weight: int) -> None:
        """`items`, `weight`: bounds; nothing is added from either on."""
        self._items = items
        self._weight = weight
        self._queue: deque[tuple[T, int]] = deque()
        self._given = self._taken = 0

    def __len__(self) -> int:
        return len(self._queue)

    def give(self, item: T, weight: int) -> bool:
        """Add an item; False: there is no room."""
        if len(self._queue) >= self._items or self._given - self._taken >= self._weight:
            return False
        self._given += weight
        self._queue.append((item, weight))
        return True

    def take(self) -> T | None:
        if not self._queue:
            return None
        item, weight = self._queue.popleft()
        self._taken += weight
        return item
