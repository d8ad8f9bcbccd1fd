"""SpecError: why a chain can't be used, for the one who wrote it."""

from __future__ import annotations

from collections.abc import Sequence


class SpecError(ValueError):
    """A chain that can't be used. `problems`, and its text, have one line for each reason:
    file and line, key, what was found, and what would do. No line shows a secret."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)
