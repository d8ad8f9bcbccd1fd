"""The verbs that change an engine's chain: one asks for it, the other for what came of it."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from spec.chain_diff import ChainDiff
from spec.errors import one_of
from spec.load import SpecError, load_chain
from tiers.connector.multi.changes import Changes, PendingChange
from tiers.control.change_watch import ChangeWatch, SavedHistory, describe
from tiers.control.control_server import QuestionRefused

MAX_WATCH = 3600.0
"""Seconds: what was saved is kept for twice as long."""
KEPT = 16
"""Changes whose end can still be asked for."""


class ApplyQuestion(BaseModel, frozen=True, extra="forbid", strict=True):
    """Change to this chain, as `ChainSpec` dumps it as JSON; only if the chain has version
    `if_version`. `dry_run`: only say what that would do. `watch`: seconds for which the change is
    watched, and taken back if it is for the worse; None: it is not."""

    chain: Mapping[str, Any]
    if_version: int | None = None
    dry_run: bool = False
    watch: Annotated[float, Field(gt=0, le=MAX_WATCH)] | None = None


class PauseQuestion(BaseModel, frozen=True, extra="forbid", strict=True):
    """Change the setting `paused` of one tier alone; None: it loads and stores."""

    tier: str
    paused: Literal["reads", "writes", "both"] | None = None


class ChangeQuestion(BaseModel, frozen=True, extra="forbid", strict=True):
    """What came of a change. `withdraw`: take it back if no step has begun it."""

    change: int
    withdraw: bool = False


class ChangeVerbs:
    """Answers by one chain's `changes`. Any thread may ask; nothing here waits for a step."""

    def __init__(self, changes: Changes, history: SavedHistory) -> None:
        self._changes, self._history = changes, history
        self._watches: deque[ChangeWatch] = deque(maxlen=KEPT)
        """Of the last changes that are watched; one ends when another change is in effect."""
        self._asked: dict[int, PendingChange] = {}
        self._numbers = itertools.count()

    def apply(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Begin a change; the answer has its number, and what it does."""
        question = ApplyQuestion.model_validate(dict(parameters))
        try:
            chain = load_chain(question.chain)
        except SpecError as error:
            raise QuestionRefused(f"the engine can't take this chain: {error}") from error
        found = self._changes.review(chain)
        if question.dry_run:
            return self._answer(found, None)
        pending = self._changes.request(chain, question.if_version)
        if question.watch is not None and pending.before is not None:
            watch = ChangeWatch(self._changes, self._history, pending, question.watch)
            self._watches.append(watch)
        return self._begun(found, pending)

    def pause(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Begin a change that pauses a tier, or has it go on; as `apply` answers."""
        question = PauseQuestion.model_validate(dict(parameters))
        version, chain = self._changes.version, self._changes.chain
        names = [tier.tier_name for tier in chain.tiers]
        if question.tier not in names:
            raise QuestionRefused(f"no tier is called {question.tier!r}; use {one_of(names)}")
        paused = {"paused": question.paused}
        tiers = (
            tier.model_copy(update=paused) if tier.tier_name == question.tier else tier
            for tier in chain.tiers
        )
        new = chain.model_copy(update={"tiers": tuple(tiers)})
        return self._begun(self._changes.review(new), self._changes.request(new, version))

    def _begun(self, found: ChainDiff, pending: PendingChange) -> dict[str, Any]:
        number = next(self._numbers)
        self._asked[number] = pending
        for old in list(self._asked)[:-KEPT]:
            self._asked.pop(old, None)
        return {**self._answer(found, pending), "change": number}

    def change(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """What came of a change so far."""
        question = ChangeQuestion.model_validate(dict(parameters))
        pending = self._asked.get(question.change)
        if pending is None:
            raise QuestionRefused("no such change; ask for status")
        if question.withdraw:
            self._changes.withdraw(pending)
        return {**self._answer(None, pending), "change": question.change}

    def _answer(self, found: ChainDiff | None, pending: PendingChange | None) -> dict[str, Any]:
        answer: dict[str, Any] = {"version": self._changes.version, "over": True, "why": ""}
        if found is not None:
            answer |= {"diff": found.as_json(), "lines": found.lines()}
        if pending is not None:
            answer["over"] = pending.wait(0)
            answer |= {"why": pending.why, "in_part": pending.in_part}
            answer["remains"] = list(pending.remains)
            for watch in list(self._watches):
                if watch.pending is pending:
                    verdict = watch.verdict
                    answer["verdict"] = verdict.model_dump(mode="json")
                    answer["verdict_text"] = describe(verdict)
        return answer

    def close(self) -> None:
        """The engine ends: nothing is watched any more."""
        for watch in list(self._watches):
            watch.close()
