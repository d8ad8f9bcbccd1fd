"""What saturates first: counted from a trace, held against what was measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import scale
from bench.report import read_json
from bench.scale import MODELS, PAGE, Traffic, main, parts
from bench.tables import CHECKOUT, newest
from tiers.traces.trace import TraceRequest

TRACE = CHECKOUT.parent / "shared" / "traces" / "mooncake_conversation.jsonl"


def test_what_a_trace_asks_for_in_a_second() -> None:
    trace = [
        TraceRequest(0.0, 40, 8, [1, 2]),
        TraceRequest(1000.0, 40, 8, [3, 2]),
        TraceRequest(2000.0, 50, 4, [1, 2, 4]),
    ]
    asked = Traffic.of(trace, 16)
    assert asked == (1.5, 65.0, 16.0, 59.0), "a block behind one that is new is no prefix"
    twice = Traffic.of(trace, 16, threshold=2)
    assert twice == (1.5, 65.0, 0.0, 16.0), "blocks 2 and 1 come again, and none a third time first"
    with pytest.raises(ValueError, match="no rate"):
        Traffic.of(trace[:1], 16)


def test_parts_share_what_ranks_share_and_no_more() -> None:
    traffic = Traffic(1.0, 16_000.0, 8_000.0, 8_000.0)
    _, rows = read_json(newest()[0])
    one, eight = ({p.name: p for p in parts(traffic, m, r, rows)} for _, m, r in MODELS)
    gather, disk = "store: gather of one rank", "store: one disk"
    assert one[disk].used == one[gather].used == pytest.approx(8_000 * 131072 / 1e9)
    assert eight[disk].used == pytest.approx(8 * eight[gather].used)
    prompts = "scheduler: prompts, one core"
    assert eight[prompts].used > one[prompts].used
    assert one["look-up: one Redis"].used == 16_000 / 16, "a name of each block"
    for operations in ("look-up: one Redis", "store: index of one disk"):
        assert eight[operations].used == 8 * one[operations].used
    assert eight["scheduler: steps"].used == one["worker: steps"].used
    assert all(part.times == pytest.approx(part.able / part.used) for part in eight.values())


@pytest.mark.skipif(not TRACE.exists(), reason=f"there is no {TRACE.name} beside the checkout")
def test_the_page_has_what_the_newest_result_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "scale.md"
    page.write_text(PAGE.read_text())
    monkeypatch.setattr(scale, "PAGE", page)
    main([str(TRACE), "--write"])
    assert page.read_text() == PAGE.read_text()
