"""What a HostedTier knows of a request, and tells of its blocks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from tiers.connector.scheduler.requests import StoreOrder


class Happened(NamedTuple):
    """A block came to a tier, or went; `in_host`: the host tier, else the store."""

    block: bytes
    in_host: bool
    stored: bool


class Prefix:
    """A request's keys, in the order in which the engine named them, and what is stored of them."""

    def __init__(self) -> None:
        self.keys: list[bytes] = []
        self.order = StoreOrder()
        self._numbers: dict[bytes, int] = {}

    def number(self, key: bytes) -> int:
        """Which of them this is; the last, when it is new."""
        number = self._numbers.setdefault(key, len(self.keys))
        if number == len(self.keys):
            self.keys.append(key)
        return number


class Storing(NamedTuple):
    """A block that is being gathered: its slot, whose it is, and where among its request's."""

    slot: int
    prefix: Prefix
    number: int


@dataclass
class HostedRequest:
    """What was said about a request's blocks, by key.

    `pinned`: hits, with a reference on each slot. `missed`: never asked for again. `wanted`: to
    be asked of the store at the end of the step; `asked`: being asked. `fetched`: hits that came
    from the store. `blocks`: those that it is known to have, in order.
    """

    pinned: dict[bytes, int] = field(default_factory=dict)
    missed: set[bytes] = field(default_factory=set)
    wanted: dict[bytes, None] = field(default_factory=dict)
    asked: list[bytes] = field(default_factory=list)
    fetched: set[bytes] = field(default_factory=set)
    blocks: Prefix = field(default_factory=Prefix)
