"""Counts: what a tier has done."""

from __future__ import annotations


class Counts:
    """What a tier has done so far, in blocks and seconds. `hits`: loaded, and in time. `dropped`:
    admitted, and without a slot so far."""

    __slots__ = ("dropped", "hits", "load_busy", "loaded", "store_busy", "stored")

    def __init__(self) -> None:
        self.hits = self.loaded = self.dropped = self.stored = 0
        self.load_busy = self.store_busy = 0.0

    def values(self) -> dict[str, float]:
        """All of them, by their names."""
        return {name: getattr(self, name) for name in self.__slots__}
