"""Suggest the word that a wrong one was meant to be, or list the words that are understood."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

RENAMED = {
    "load": "load_policy",
    "store_after": "store_threshold",
    "queue": "max_inflight",
    "cheapest": "load_when: sooner",
}
"""Keys of a chain's YAML that were renamed, and their names now."""


def closest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that is most like `word`, or None if none is like it."""
    by_folded = {name.casefold(): name for name in known}
    near = difflib.get_close_matches(word.casefold()[:80], by_folded, n=1, cutoff=0.6)
    return by_folded[near[0]] if near else None


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """Return a question that names the closest known word, or None."""
    near = closest(word, known)
    return None if near is None else f"did you mean {near}?"


def one_of(known: Iterable[str]) -> str:
    """Return the known words as a phrase, like "one of cpu, disk, redis"."""
    words = list(known)
    return words[0] if len(words) == 1 else f"one of {', '.join(words)}"
