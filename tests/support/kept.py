"""How much an object keeps: for tests that whatever happens, it is bounded, or nothing is left."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping


def kept(thing: object) -> int:
    """The number of things in all containers that it and the objects of ours in it have."""
    total, seen, reached = 0, set[int](), [thing]
    while reached:
        one = reached.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, Mapping):
            total += len(one)
            reached += one.values()
        elif isinstance(one, list | tuple | set | frozenset | deque):
            total += len(one)
            reached += one
        elif type(one).__module__.startswith(("tiers.", "spec.")):
            reached += getattr(one, "__dict__", {}).values()
            slots = getattr(type(one), "__slots__", ())
            reached += (getattr(one, slot) for slot in slots if hasattr(one, slot))
    return total
