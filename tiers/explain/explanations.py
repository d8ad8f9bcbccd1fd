"""Explanations: the notes of the requests in flight, and of the last ones that ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, Field

from tiers.contract.protocols import Request, SchedulerOutput
from tiers.explain.accounts import Accounts
from tiers.explain.notes import UNNOTED, Attempt, Decision, Explained, RequestNotes
from tiers.explain.spans import Spans

MAX_REQUESTS = 1000
MAX_BYTES = 16 << 20
MAX_IN_FLIGHT = 16384
"""Requests in flight that are noted; an engine that queues more has those begin unnoted."""

MAX_ANSWERS = 1000
"""Requests in one answer."""
Count = Annotated[int, Field(ge=1, le=MAX_ANSWERS)]
Shares = Mapping[int, Sequence[range]]


class Explanations:
    """A `RequestObserver` that keeps the notes of at most `max_requests` ended requests, in at most
    `MAX_BYTES`. One that observes no requests notes nothing, for a chain without `explain`.

    Only the scheduler's thread changes it; other threads read `all`.
    """

    def __init__(
        self,
        names: Sequence[str] = (),
        block_tokens: int = 1,
        max_requests: int = MAX_REQUESTS,
        tracer: Any = None,
    ) -> None:
        """`names`: of the children. `tracer`: OpenTelemetry's, which is given a span of each
        request that has ended; None: nobody traces."""
        self.accounts = Accounts(names, block_tokens)
        self._max_requests = max_requests
        self._spans = None if tracer is None else Spans(tracer, self.accounts)
        self._in_flight: dict[str, RequestNotes] = {}
        self._ended: deque[RequestNotes] = deque()
        self._bytes = 0

    # -- the scheduler's thread --------------------------------------------------------------

    def arrived(self, request: Request) -> None:
        if len(self._in_flight) < MAX_IN_FLIGHT:
            trace = getattr(request, "trace_headers", None)
            notes = RequestNotes(request.request_id, request.num_prompt_tokens, trace)
            self._in_flight[request.request_id] = notes

    def asked(self, request: Request, computed: int) -> Attempt:
        """The engine looks a request up; `computed` tokens are in its own cache."""
        notes = self._in_flight.get(request.request_id)
        if notes is None:
            return UNNOTED
        attempt = notes.pending
        if attempt is None:
            attempt = notes.pending = Attempt()
        attempt.begin(request.num_tokens, computed, getattr(request, "num_preemptions", 0))
        return attempt

    def begins(
        self,
        request: Request,
        choice: Decision,
        shares: Shares,
        external: int,
        explained: Mapping[int, Explained],
    ) -> Attempt:
        """The engine begins it; the children load their `shares`, `external` tokens together.
        `explained`: see `Attempt.begins`."""
        notes = self._in_flight.get(request.request_id)
        attempt = None if notes is None else notes.pending
        if notes is None or attempt is None:
            return UNNOTED
        attempt.begins(choice, shares, external, request, explained)
        notes.add(attempt)
        if external and not attempt.preempted:
            notes.external += external
            hits, size = notes.hits, self.accounts.block_tokens
            for part in attempt.parts:
                hits[part.child] = hits.get(part.child, 0) + part.blocks * size
        return attempt

    def runs(self, output: SchedulerOutput) -> None:
        """Note what requests have computed that now run for the first time, or again."""
        if not self._in_flight:
            return
        for new in output.scheduled_new_reqs:
            self._runs(new.req_id, new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        if cached.resumed_req_ids:
            for request_id, computed in zip(
                cached.req_ids, cached.num_computed_tokens, strict=True
            ):
                if request_id in cached.resumed_req_ids:
                    self._runs(request_id, computed)

    def _runs(self, request_id: str, computed: int) -> None:
        notes = self._in_flight.get(request_id)
        if notes is not None and notes.attempts and notes.attempts[-1].started is None:
            notes.attempts[-1].runs(computed)

    def ended(self, request: Request) -> None:
        """Keep the request among those that ended; the oldest go for it."""
        notes = self._in_flight.pop(request.request_id, None)
        if notes is None:
            return
        notes.end(_status(request))
        self._ended.append(notes)
        self._bytes += notes.bytes
        while len(self._ended) > self._max_requests or self._bytes > MAX_BYTES:
            self._bytes -= self._ended.popleft().bytes
        if self._spans is not None:
            self._spans.ended(notes)

    def take_measures(self) -> dict[str, dict[str, float]]:
        return {}

    def close(self) -> None:
        """Write the spans that wait, for a second at most."""
        if self._spans is not None:
            self._spans.close()

    # -- any thread --------------------------------------------------------------------------

    def all(self) -> list[RequestNotes]:
        """The requests that ended, oldest first, then those in flight."""
        # Each list is made in one go while this thread holds the interpreter.
        return [*list(self._ended), *list(self._in_flight.values())]


def _status(request: Any) -> str:
    status = getattr(request, "status", None)
    return str(getattr(status, "name", "") or status or "").removeprefix("FINISHED_").lower()


class ExplainQuestion(BaseModel, frozen=True, extra="forbid", strict=True):
    """One of: a request by its name or the beginning of it, the last ones, the slowest ones."""

    request: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    last: Count | None = None
    slowest: Count | None = None

    def choose(self, known: list[RequestNotes]) -> list[RequestNotes]:
        """Which of all known requests, oldest first, it asks for."""
        if self.request is not None:
            same = [notes for notes in known if notes.request_id == self.request]
            begin = [notes for notes in known if notes.request_id.startswith(self.request)]
            return (same or begin)[-MAX_ANSWERS:]
        if self.slowest is not None:
            return sorted(known, key=waited, reverse=True)[: self.slowest]
        return known[-(self.last or 1) :]


def waited(notes: RequestNotes) -> float:
    """Seconds that a request waited for tiers: for lookups, for its own loads and for others'."""
    return sum(notes.waited for notes in list(notes.attempts))


def answer(explanations: Explanations, parameters: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The accounts of the requests that an `ExplainQuestion` asks for. Raises ValidationError, and
    RuntimeError where something grew while it was read. May be called by any thread."""
    chosen = ExplainQuestion.model_validate(dict(parameters)).choose(explanations.all())
    return [explanations.accounts.of(notes) for notes in chosen]
