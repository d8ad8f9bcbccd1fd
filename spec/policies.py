"""What may a plugin decide of a tier that is not its own? What is evicted, and what is stored.

A policy is a class that a package names in the entry point group `kvtiers.eviction` or
`kvtiers.admission`. The tier keeps the blocks and asks; a policy sees neither bytes nor memory, so
it can lower the hit rate and nothing else. An error in a plugin's policy ends the policy, which is
logged, and the tier goes on with its default. The engine's scheduler thread asks, in every step: no
method may do I/O, wait, or take longer for more blocks.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, Field

from spec.plugins import ADMISSION, EVICTION, entry_of, imported_class, installed


class EvictionPolicy(ABC):
    """Says which of its queues a block enters, moves to and leaves.

    The tier keeps `queues` queues, numbered from 1, and evicts the oldest block of the one that the
    policy names. A block that is stored or used goes to the end of its queue, behind the block that
    follows it in its prefix, so that a prefix goes from its tail. Blocks that requests use at the
    moment are passed over; these, and those that a hint lets go, are evicted before all others and
    are in no queue (0) until they are used again.

    `capacity`: blocks that the tier holds at most.
    """

    queues: ClassVar[int]
    """How many queues there are, 1 to 64."""

    def __init__(self, capacity: int) -> None:
        """Begin with an empty tier."""

    def resize(self, capacity: int) -> None:
        """The tier holds as many blocks at most from now on."""

    @abstractmethod
    def enter(self, key: bytes) -> int:
        """The queue for a block that is stored now. It may have been there and evicted before."""

    @abstractmethod
    def used(self, queue: int) -> int:
        """The queue to whose end a block of `queue` goes when it is used; `queue` 0: of none."""

    @abstractmethod
    def next(self, lengths: Sequence[int]) -> int:
        """The queue whose oldest block is evicted next. `lengths[0]` is of queue 1; not all are 0,
        and the answer's must not be."""

    def evicted(self, key: bytes, queue: int) -> None:
        """A block of a queue was evicted. Whatever is kept of such keys must have a bound."""


class AdmissionPolicy(ABC):
    """Says which blocks a tier stores of those that it misses. `threshold` is the tier's
    `store_threshold`, and follows it when that is changed under traffic."""

    def __init__(self, threshold: int) -> None:
        self.threshold = threshold

    @abstractmethod
    def admits(self, key: bytes) -> bool:
        """Whether to store the block now. Asked once per request that computes it, and again where
        it was admitted and found no room. Whatever is kept of keys must have a bound."""

    def stored(self, key: bytes) -> None:
        """The block is on its way into the tier; when it is asked for again, it was lost."""


# Cached: the engine's thread, which makes tiers, is not to read the files of all packages again.
@functools.cache
def eviction_policy(name: str) -> type[EvictionPolicy]:
    """Return the class of an eviction policy. Raises UnknownPlugin and BrokenPlugin."""
    return imported_class(entry_of(name, EVICTION), EvictionPolicy)


@functools.cache
def admission_policy(name: str) -> type[AdmissionPolicy]:
    """Return the class of an admission policy. Raises UnknownPlugin and BrokenPlugin."""
    return imported_class(entry_of(name, ADMISSION), AdmissionPolicy)


def _one_of(group: str) -> Any:
    """In the JSON Schema a policy's name is one of those that are installed, as a tier's type."""
    return Field(json_schema_extra=lambda schema: schema.update(enum=[*installed(group)]))


def _found_by(find: Callable[[str], object]) -> AfterValidator:
    return AfterValidator(lambda name: find(name) and name)


EvictionName = Annotated[str, _found_by(eviction_policy), _one_of(EVICTION)]
AdmissionName = Annotated[str, _found_by(admission_policy), _one_of(ADMISSION)]
"""Names of installed policies."""
