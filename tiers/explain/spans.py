"""Spans: an OpenTelemetry span for each request that has ended, where the engine traces.

vLLM makes the request's own span in another process, from attributes that no connector can add to.
So ours is a sibling of it: a child of the same trace context, which came with the request. Names of
attributes are those proposed for vLLM's span (vllm-project/vllm issue 53926).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from tiers.concurrency.executors import start_thread
from tiers.explain.accounts import Accounts
from tiers.explain.notes import RequestNotes

MAX_WAITING = 1024
"""Requests that wait to be traced; of more, the oldest are not."""
NAME = "kvtiers_request"
Attribute = str | int | float | bool | Sequence[str]


def engine_tracer() -> Any:
    """The tracer of this process; None: the engine does not trace, or OpenTelemetry is missing."""
    try:
        from opentelemetry import trace
    except ImportError:
        return None
    provider = trace.get_tracer_provider()
    if isinstance(provider, trace.ProxyTracerProvider | trace.NoOpTracerProvider):
        return None
    return provider.get_tracer("kvtiers")


class Spans:
    """Writes spans on a daemon thread of its own; `ended` is called by the scheduler's."""

    def __init__(self, tracer: Any, accounts: Accounts) -> None:
        """`tracer`: one of OpenTelemetry's."""
        self._tracer = tracer
        self._accounts = accounts
        self._waiting: deque[RequestNotes] = deque(maxlen=MAX_WAITING)
        self._some = threading.Event()
        self._closed = False
        self._thread = start_thread(self._write, "spans")

    def ended(self, notes: RequestNotes) -> None:
        """Write a span of this request soon."""
        self._waiting.append(notes)
        self._some.set()

    def close(self) -> None:
        """Write what waits, for a second at most."""
        self._closed = True
        self._some.set()
        self._thread.join(1.0)

    def _write(self) -> None:
        while not self._closed or self._waiting:
            self._some.wait()
            self._some.clear()
            while self._waiting:
                self._span(self._waiting.popleft())

    def _span(self, notes: RequestNotes) -> None:
        account = attributes(self._accounts.of(notes), self._accounts.block_tokens)
        began, ended = notes.began, notes.ended_at or notes.began
        span = self._tracer.start_span(
            NAME, context=_context(notes.trace), start_time=int(began * 1e9), attributes=account
        )
        span.end(end_time=int(ended * 1e9))


def attributes(account: Mapping[str, Any], block_tokens: int) -> dict[str, Attribute]:
    """The attributes of a request's span, summed over the times that it began.

    Blocks missed are the whole ones that it computed. What is not known counts as nothing.
    """
    hits: dict[str, int] = {}
    missed, seconds = 0, 0.0
    for attempt in account["attempts"]:
        for tier, tokens in attempt["loaded"].items():
            if tokens:
                hits[tier] = hits.get(tier, 0) + tokens // block_tokens
        missed += (attempt["computed"] or 0) // block_tokens
        seconds += (attempt["milliseconds"]["load"] or 0.0) / 1000
    return {
        "kv_cache.request_id": account["request"],
        "kv_cache.tier_hit": sorted(hits) or ["none"],
        "kv_cache.blocks_hit": sum(hits.values()),
        **{f"kv_cache.blocks_hit.{tier}": blocks for tier, blocks in hits.items()},
        "kv_cache.blocks_missed": missed,
        "kv_cache.promotion_latency_seconds": seconds,
    }


def _context(headers: Mapping[str, str] | None) -> Any:
    """The trace context that came with a request; an empty one: its span begins a trace."""
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract(headers or {}, Context())
