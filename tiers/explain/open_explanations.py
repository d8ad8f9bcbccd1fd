"""How a chain's explanations are opened: what is kept, and who may ask."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from spec.chain import ExplainSpec
from tiers.explain.accounts import Accounts
from tiers.explain.explain_server import ExplainServer, FolderRefused
from tiers.explain.explanations import Explanations
from tiers.explain.notes import RequestNotes
from tiers.explain.spans import Spans, engine_tracer

logger = logging.getLogger(__name__)

MAX_ANSWERS = 1000
"""Requests in one answer."""
Count = Annotated[int, Field(ge=1, le=MAX_ANSWERS)]


class ExplainQuestion(BaseModel):
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
            question = ExplainQuestion.model_validate_json(line)
        except ValidationError as error:
            return _lines([{"error": f"no question: {error.errors()[0]['msg']}"}])
        try:
            return _lines(map(accounts.of, question.choose(explanations.all())))
        except RuntimeError as error:  # something grew while it was read
            return _lines([{"error": f"ask again: {error}"}])

    return answer


def _lines(told: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in told)


def open_explanations(
    spec: ExplainSpec | None, names: Sequence[str], block_tokens: int
) -> Explanations | None:
    """What tells why requests of a chain of these tiers are served as they are; None: nothing does.

    A folder that can't be used is one line in the log: the engine serves without.
    """
    if spec is None:
        return None
    tracer = engine_tracer()
    spans = None if tracer is None else Spans(tracer, Accounts(names, block_tokens), block_tokens)
    tell = None if spans is None else spans.ended
    explanations = Explanations(names, block_tokens, spec.requests, spec.memory, tell)
    if spans is not None:
        explanations.on_close(spans.close)
    try:
        server = ExplainServer(spec.folder, answers(explanations))
    except (FolderRefused, OSError) as error:
        logger.warning("`kvtiers explain` finds nothing: no socket in explain.folder: %s", error)
        return explanations if spans is not None else None
    logger.info("`kvtiers explain --folder %s` tells why requests are served so", spec.folder)
    explanations.on_close(server.close)
    return explanations
