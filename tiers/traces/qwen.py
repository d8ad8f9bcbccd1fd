"""Qwen-Bailian's traces: 16-token blocks, a JSON object a line, seconds, no header.

The published ids are digests of a block's own tokens, not of what precedes it, so one id may stand
for blocks after different prefixes. The reader makes ids of a block and all before it from them. It
drops the id of a partial last block. A turn's prompt has its conversation's history in it, so
`chat_id`, `parent_chat_id` and `turn` add nothing to the ids and are checked only for being there.
Source: the README of alibaba-edu/qwen-bailian-usagetraces-anon (Apache-2.0).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

from tiers.traces import json_fields
from tiers.traces.lines import Malformed, read_requests
from tiers.traces.trace import Trace, TraceHeader, TraceRequest, TraceSummary

BLOCK_TOKENS = 16
_MASK = 2**64 - 1


def open_qwen(path: Path, skip_bad_lines: bool = False) -> Trace:
    """The trace of one file."""

    def read(summary: TraceSummary) -> Iterator[TraceRequest]:
        return read_requests(path, parse, summary, skip_bad_lines)

    return Trace(TraceHeader(BLOCK_TOKENS, "Qwen-Bailian"), [path], read)


def is_qwen(found: dict[str, Any]) -> bool:
    """Whether a first line is that of this format."""
    return {"chat_id", "turn", "hash_ids"} <= found.keys()


def parse(found: dict[str, Any]) -> TraceRequest:
    """A line as a request; raises `Malformed`."""
    if not is_qwen(found):
        raise Malformed("it has no chat_id, turn or hash_ids, as the lines before have")
    length = json_fields.whole(found, "input_length")
    ids = json_fields.hash_ids(found)
    return TraceRequest(
        json_fields.number(found, "timestamp") * 1000,
        length,
        json_fields.whole(found, "output_length"),
        chained(json_fields.full_blocks(ids, length, BLOCK_TOKENS)),
    )


def chained(ids: list[int]) -> list[int]:
    """Ids of 64 bits that each stand for an id and all before it.

    Needs no memory of other requests. Any two of 10 million different prefixes get the same id
    with a probability of 2 in 100,000: a link has 61 bits, as the hash of an int has.
    """
    # The hash of a tuple of ints is xxHash's and the same in every process: only that of text and
    # bytes has a seed.
    links = accumulate(ids, lambda before, own: hash((before, own)), initial=BLOCK_TOKENS)
    next(links)
    return [link & _MASK for link in links]
