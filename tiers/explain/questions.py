"""Questions about requests, as `kvtiers explain` asks them: a line of JSON, and lines in answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tiers.explain.accounts import Accounts
from tiers.explain.explanations import Explanations
from tiers.explain.notes import RequestNotes

MAX_ANSWERS = 1000
"""Requests in one answer."""
Count = Annotated[int, Field(ge=1, le=MAX_ANSWERS)]


class Question(BaseModel):
    """One of: a request by its name or the beginning of it, the last ones, the slowest ones."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    request: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    last: Count | None = None
    slowest: Count | None = None

    def choose(self, known: list[RequestNotes]) -> list[RequestNotes]:
        """Which of all known requests, oldest first, it asks for."""
        if self.request is not None:
            same = [one for one in known if one.request_id == self.request]
            begin = [one for one in known if one.request_id.startswith(self.request)]
            return (same or begin)[-MAX_ANSWERS:]
        if self.slowest is not None:
            return sorted(known, key=waited, reverse=True)[: self.slowest]
        return known[-(self.last or 1) :]


def waited(notes: RequestNotes) -> float:
    """Seconds that a request waited for tiers: for lookups, for its own loads and for others'."""
    return sum(one.waited for one in list(notes.attempts))


def answers(explanations: Explanations) -> Callable[[bytes], bytes]:
    """What answers questions about these requests: a line for each, or one with an `error`."""
    accounts = Accounts(explanations.names, explanations.block_tokens)

    def answer(line: bytes) -> bytes:
        try:
            question = Question.model_validate_json(line)
        except ValidationError as error:
            return _lines([{"error": f"no question: {error.errors()[0]['msg']}"}])
        try:
            return _lines(map(accounts.of, question.choose(explanations.all())))
        except RuntimeError as error:  # something grew while it was read
            return _lines([{"error": f"ask again: {error}"}])

    return answer


def _lines(told: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in told)
