"""KVTiersError and SpecError, and the words that error lines have."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

MOST_CHARACTERS = 1000  # of an error's text: some quote a block or a server's whole answer


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


class KVTiersError(Exception):
    """Base of all errors raised by kvtiers."""


class SpecError(KVTiersError, ValueError):
    """A chain can't be used. `problems`, and the error's text, have one line for each reason:
    file, line, key, what was found, and what to write instead. No line shows a secret."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


def describe_error(error: BaseException) -> str:
    """An error's class and text; the class alone if a plugin's error has no text."""
    return ": ".join(filter(None, (class_name(error), _text_of(error))))


def class_name(error: BaseException) -> str:
    """The name of an error's class, which a plugin's metaclass has no part in."""
    return str(type.__dict__["__name__"].__get__(type(error)))


def reason_of(error: BaseException) -> str:
    """An error's text if it is ours, which says all; else its class, too."""
    return (isinstance(error, KVTiersError) and _text_of(error)) or describe_error(error)


def _text_of(error: BaseException) -> str:
    try:
        return str(error)[:MOST_CHARACTERS]
    except BaseException:  # noqa: BLE001 - its own __str__
        return ""


def one_line(text: str) -> str:
    """The text without what moves a cursor, begins a line or is no Unicode, as names may have it
    that a client, a plugin or a file chose."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
