"""Mooncake's traces: 512-token blocks, a JSON object a line, no header.

Ids count up from 0 and stand for a block and all before it; a prompt's partial last block has an id
as well, which is dropped here. Source: the files and README of FAST25-release/traces in
kvcache-ai/Mooncake.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tiers.traces import json_fields
from tiers.traces.lines import read_requests
from tiers.traces.trace import Trace, TraceHeader, TraceRequest, TraceSummary

BLOCK_TOKENS = 512


def open_mooncake(path: Path, skip_bad_lines: bool = False) -> Trace:
    """The trace of one file."""

    def read(summary: TraceSummary) -> Iterator[TraceRequest]:
        return read_requests(path, parse, summary, skip_bad_lines)

    return Trace(TraceHeader(BLOCK_TOKENS, "Mooncake"), [path], read)


def parse(found: dict[str, Any]) -> TraceRequest:
    """A line as a request; raises `Malformed`."""
    length = json_fields.whole(found, "input_length")
    ids = json_fields.prefix_ids(found)
    return TraceRequest(
        json_fields.number(found, "timestamp"),
        length,
        json_fields.whole(found, "output_length"),
        json_fields.full_blocks(ids, length, BLOCK_TOKENS),
    )
