"""Mooncake's format, and its conversation trace (Apache-2.0) where it lies beside the checkout."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiers.traces.open_trace import open_trace

CONVERSATION = Path(__file__).parents[3] / "shared" / "traces" / "mooncake_conversation.jsonl"


def test_the_partial_last_block_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(
        '{"timestamp": 0, "input_length": 1024, "output_length": 5, "hash_ids": [0, 1]}\n'
        '{"timestamp": 9, "input_length": 1025, "output_length": 5, "hash_ids": [0, 1, 2]}\n'
    )
    trace = open_trace(path)
    assert (trace.header.block_tokens, trace.header.format) == (512, "Mooncake")
    assert [[*request.blocks] for request in trace] == [[0, 1], [0, 1]]


@pytest.mark.skipif(not CONVERSATION.exists(), reason="mooncake_conversation.jsonl is not there")
def test_the_conversation_trace() -> None:
    trace = open_trace(CONVERSATION)
    requests = list(trace)
    blocks = [block for request in requests for block in request.blocks]
    assert (len(requests), len(blocks), len(set(blocks))) == (12_031, 276_491, 170_899)
    assert trace.summary.skipped == {}
