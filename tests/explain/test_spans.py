"""Spans of requests: what they tell, whose children they are, and that nobody waits for them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.support.replay import ReplayEngine
from tests.support.replay_chains import MODEL, chain_of, cpu, disk
from tiers.explain import spans
from tiers.explain.explanations import Explanations
from tiers.explain.spans import engine_tracer

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01"}


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """Engines made in this test trace, and this has their spans."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    yield exporter
    provider.shutdown()


def run(tmp_path: Path, headers: Any, prompts: int = 2) -> None:
    """The same prompt again and again, over an engine without a cache of its own."""
    chain = chain_of(cpu(2), disk(tmp_path), explain={})
    made = ReplayEngine(chain, MODEL, prefix_caching=False)
    for _ in range(prompts):
        request = made.add([*range(41)], 2)
        request.trace_headers = headers  # type: ignore[attr-defined]
        assert made.connector is not None
        made.connector._observers[-1]._in_flight[request.request_id].trace = headers  # type: ignore[attr-defined]
        made.run()
        made.settle()
    made.close()


def told(span: ReadableSpan) -> dict[str, Any]:
    named = (span.attributes or {}).items()
    return {name.removeprefix("kv_cache."): value for name, value in named}


def test_a_span_tells_what_served(exported: InMemorySpanExporter, tmp_path: Path) -> None:
    run(tmp_path, HEADERS)
    first, second = map(told, exported.get_finished_spans())
    assert first["tier_hit"] == ("none",)
    assert (first["blocks_hit"], first["blocks_missed"]) == (0, 10)
    assert first["promotion_latency_seconds"] == 0
    assert second["tier_hit"] == ("cpu", "disk")
    assert second["blocks_hit"] == 10 == second["blocks_hit.cpu"] + second["blocks_hit.disk"]
    assert second["blocks_missed"] == 0 < second["promotion_latency_seconds"]
    assert second["request_id"] == "request-1"


def test_it_is_of_the_requests_trace(exported: InMemorySpanExporter, tmp_path: Path) -> None:
    run(tmp_path, HEADERS, prompts=1)
    (span,) = exported.get_finished_spans()
    assert span.context is not None
    assert f"{span.context.trace_id:032x}" == TRACE
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == PARENT
    assert span.start_time is not None
    assert span.end_time is not None
    assert span.start_time <= span.end_time


@pytest.mark.parametrize("headers", [None, {}, {"traceparent": "rubbish"}])
def test_without_a_trace_it_begins_one(
    exported: InMemorySpanExporter, tmp_path: Path, headers: Any
) -> None:
    run(tmp_path, headers, prompts=1)
    (span,) = exported.get_finished_spans()
    assert span.parent is None


def test_no_span_where_the_engine_does_not_trace(tmp_path: Path) -> None:
    assert engine_tracer() is None
    made = Explanations(["cpu"], 4, tracer=engine_tracer())
    assert made._spans is None
    made.close()


def test_a_slow_exporter_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes faster than it takes is dropped, the oldest first."""
    monkeypatch.setattr(spans, "MAX_WAITING", 3)
    go_on, seen = threading.Event(), []

    class Slow:
        def start_span(self, name: str, **options: Any) -> Any:
            go_on.wait(10)
            seen.append(options["attributes"]["kv_cache.request_id"])
            return self

        def end(self, end_time: int) -> None: ...

    from tiers.explain.accounts import Accounts
    from tiers.explain.notes import RequestNotes

    made = spans.Spans(Slow(), Accounts(["cpu"], 4))
    for number in range(20):
        made.ended(RequestNotes(str(number), 8))
    go_on.set()
    made.close()
    assert 3 <= len(seen) <= 5
    assert seen[-3:] == ["17", "18", "19"]
