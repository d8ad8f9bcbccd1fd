"""The verbs that change an engine's chain: one asks for it, the other for what came of it."""

from __future__ import annotations

import itertools
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
"""Changes whose end can still be asked for, beside those that are watched."""

_Asked = tuple[PendingChange, ChangeWatch | None]
"""A change that was asked for, and its watch, which ends when another change is in effect."""


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
        self._asked: dict[int, _Asked] = {}
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
        pending, watch = self._changes.request(chain, question.if_version), None
        if question.watch is not None and pending.before is not None:
            watch = ChangeWatch(self._changes, self._history, pending, question.watch)
        return self._begun(found, (pending, watch))

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
        return self._begun(self._changes.review(new), (self._changes.request(new, version), None))

    def _begun(self, found: ChainDiff, asked: _Asked) -> dict[str, Any]:
        number = next(self._numbers)
        self._asked[number] = asked
        for old, (_, watch) in list(self._asked.items())[:-KEPT]:
            if watch is None or watch.verdict.outcome != "watching":
                self._asked.pop(old, None)
        return {**self._answer(found, asked), "change": number}

    def change(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """What came of a change so far."""
        question = ChangeQuestion.model_validate(dict(parameters))
        asked = self._asked.get(question.change)
        if asked is None:
            raise QuestionRefused("no such change; ask for status")
        if question.withdraw:
            self._changes.withdraw(asked[0])
        return {**self._answer(None, asked), "change": question.change}

    def _answer(self, found: ChainDiff | None, asked: _Asked | None) -> dict[str, Any]:
        pending, watch = asked or (None, None)
        answer: dict[str, Any] = {"over": True, "why": ""}
        if found is not None:
            answer |= {"diff": found.as_json(), "lines": found.lines()}
        if pending is not None:
            answer |= {"over": pending.wait(0), "why": pending.why, "in_part": pending.in_part}
            answer["remains"] = list(pending.remains)
        if watch is not None:
            verdict = watch.verdict
            answer["verdict"] = verdict.model_dump(mode="json")
            answer["verdict_text"] = describe(verdict)
        return {"version": self._changes.version, **answer}  # read last: an end has its version

    def close(self) -> None:
        """The engine ends: nothing is watched any more."""
        for _, watch in list(self._asked.values()):
            if watch is not None:
                watch.close()
