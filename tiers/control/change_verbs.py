"""The verbs that change an engine's chain: one asks for it, the other for what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from spec.chain_diff import ChainDiff
from spec.load import SpecError, load_chain
from tiers.connector.multi.changes import Changes, PendingChange
from tiers.control.control_server import QuestionRefused

KEPT = 16
"""Changes whose end can still be asked for."""


class ApplyQuestion(BaseModel):
    """Change to this chain, as `ChainSpec` dumps it as JSON; only if the chain has version
    `if_version`. `dry_run`: only say what that would do."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    chain: Mapping[str, Any]
    if_version: int | None = None
    dry_run: bool = False


class ChangeQuestion(BaseModel):
    """What came of a change. `withdraw`: take it back if no step has begun it."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    change: int
    withdraw: bool = False


class ChangeVerbs:
    """Answers by one chain's `changes`. Any thread may ask; nothing here waits for a step."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._asked: dict[int, PendingChange] = {}

    def apply(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Begin a change; the answer has its number, and what it does."""
        try:
            question = ApplyQuestion.model_validate(dict(parameters))
            chain = load_chain(question.chain)
        except ValidationError as error:
            raise QuestionRefused(f"no question: {error.errors()[0]['msg']}") from error
        except SpecError as error:
            raise QuestionRefused(f"the engine can't take this chain: {error}") from error
        found = self._changes.review(chain)
        if question.dry_run:
            return self._answer(found, None)
        pending = self._changes.request(chain, question.if_version)
        number = len(self._asked)
        while number in self._asked:
            number += 1
        self._asked[number] = pending
        for old in list(self._asked)[:-KEPT]:
            self._asked.pop(old, None)
        return {**self._answer(found, pending), "change": number}

    def change(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """What came of a change so far."""
        try:
            question = ChangeQuestion.model_validate(dict(parameters))
            pending = self._asked[question.change]
        except (ValidationError, KeyError) as error:
            raise QuestionRefused("no such change; ask for status") from error
        if question.withdraw:
            self._changes.withdraw(pending)
        return self._answer(None, pending)

    def _answer(self, found: ChainDiff | None, pending: PendingChange | None) -> dict[str, Any]:
        answer: dict[str, Any] = {"version": self._changes.version, "over": True, "why": ""}
        if found is not None:
            answer |= {"diff": found.as_json(), "lines": found.lines()}
        if pending is not None:
            answer["over"] = pending.wait(0)
            answer |= {"why": pending.why, "remains": list(pending.remains)}
        return answer
