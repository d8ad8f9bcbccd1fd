"""The root of all our errors, and SpecError: why a chain can't be used."""

from __future__ import annotations

from collections.abc import Sequence


class KVTiersError(Exception):
    """Base of all errors raised by kvtiers."""


class SpecError(KVTiersError, ValueError):
    """A chain can't be used. `problems`, and the error's text, have one line for each reason:
    file, line, key, what was found, and what to write instead. No line shows a secret."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


def describe_error(error: BaseException) -> str:
    """An error's class and text; the class alone if a plugin's error fails to tell its text."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - its own __str__
        return type(error).__name__


def one_line(text: str) -> str:
    """The text without what moves a cursor, begins a line or is no Unicode, as names may have it
    that a client, a plugin or a file chose."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
