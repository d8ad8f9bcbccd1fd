"""DoctorFinding: a fact that a check finds before the start, the remedy, and its price."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Gravity = Literal["error", "warning", "note", "can't tell", "fine"]
"""error: it keeps a tier from serving. warning: it will hurt. note: it may."""
GRAVITIES: tuple[Gravity, ...] = get_args(Gravity)
"""The gravest first."""


@dataclass(frozen=True)
class DoctorFinding:
    """`found`: a fact of this place. `change`: the remedy. `cost`: the price of that remedy, or of
    leaving it. None of them shows a secret. Raises ValueError for a gravity that there is not."""

    gravity: Gravity
    found: str
    change: str = ""
    cost: str = ""

    def __post_init__(self) -> None:
        if self.gravity not in GRAVITIES:
            raise ValueError(f"gravity {self.gravity!r}; use one of {', '.join(GRAVITIES)}")

    @classmethod
    def of_line(cls, gravity: Gravity, line: str, cost: str = "") -> DoctorFinding:
        """A finding of a line that has its remedy behind its last semicolon, as our errors have."""
        found, _, change = line.rpartition("; ")
        return cls(gravity, found, change, cost) if found else cls(gravity, line, cost=cost)
