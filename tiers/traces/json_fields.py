"""Checked fields of a trace's JSON objects: a wrong one raises `Malformed` with its key."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from tiers.traces.lines import Malformed

MAX_TOKENS = 2**40
_MAX_ID = 2**64


def number(found: dict[str, Any], key: str) -> float:
    """A finite number of 0 or more."""
    value = _required(found, key)
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        raise Malformed(f"{key} must be a number of 0 or more, not {shown(value)}")
    return float(value)


def whole(found: dict[str, Any], key: str, at_least: int = 0) -> int:
    """A whole number from `at_least` to `MAX_TOKENS`."""
    value = _required(found, key)
    if type(value) is float and value.is_integer():
        value = int(value)
    if type(value) is not int or not at_least <= value <= MAX_TOKENS:
        raise Malformed(
            f"{key} must be a whole number from {at_least} to 2**40, not {shown(value)}"
        )
    return value


def hash_ids(found: dict[str, Any], key: str = "hash_ids") -> list[int]:
    """A list of ids: whole numbers from 0 to 2**64 - 1. They may repeat."""
    value = _required(found, key)
    if type(value) is not list:
        raise Malformed(f"{key} must be a list of whole numbers, not {shown(value)}")
    if value:
        if not {int}.issuperset(map(type, value)):
            wrong = next(one for one in value if type(one) is not int)
            raise Malformed(f"{key} must be whole numbers, not {shown(wrong)}")
        if min(value) < 0 or max(value) >= _MAX_ID:
            wrong = min(value) if min(value) < 0 else max(value)
            raise Malformed(f"{key} must be from 0 to 2**64 - 1, not {shown(wrong)}")
    return value


def prefix_ids(found: dict[str, Any], key: str = "hash_ids") -> list[int]:
    """Ids that each stand for a block and all before it, so none comes twice in a request."""
    ids = hash_ids(found, key)
    if len(set(ids)) != len(ids):
        twice = next(one for one, count in Counter(ids).items() if count > 1)
        raise Malformed(
            f"{key} has {twice} twice; an id stands for its block and all blocks before it"
        )
    return ids


def full_blocks(ids: list[int], length: int, size: int) -> list[int]:
    """The ids of a prompt's full blocks of `size` tokens; a partial last one may have one, too."""
    blocks = -(-length // size)
    if len(ids) > blocks:
        raise Malformed(
            f"{len(ids)} hash_ids are more than the blocks of {length} tokens, "
            f"{blocks} of {size} tokens each"
        )
    return ids[: length // size]


def text(found: dict[str, Any], key: str) -> str | None:
    """A string of 256 characters at most, or nothing."""
    value = found.get(key)
    if value is not None and (type(value) is not str or len(value) > 256):
        raise Malformed(f"{key} must be a string of 256 characters at most, not {shown(value)}")
    return value


def shown(value: object) -> str:
    """A value in an error, cut short."""
    try:
        full = repr(value) if not isinstance(value, str) else ascii(value)
    except (ValueError, RecursionError):
        return f"a {type(value).__name__} that is too long to show"
    return full if len(full) <= 60 else f"{full[:57]}..."


def _required(found: dict[str, Any], key: str) -> Any:
    if key not in found:
        keys = ", ".join(sorted(map(shown, found))[:8])
        raise Malformed(f"it has no {key}; its keys are: {keys or 'none'}")
    return found[key]
