"""WEKA's agentic traces: a conversation is a JSON object, with requests of agents nested in it.

    {"id": "trace_0001", "block_size": 64, "hash_id_scope": "local", "requests": [
      {"t": 0.0, "type": "n", "in": 130, "out": 9, "hash_ids": [1, 2]},
      {"t": 8.5, "type": "subagent", "requests": [{"t": 0.0, "type": "s", ...}]}]}

A file `*.json` has one, a `*.jsonl` one in each line; a folder has many files. Times are seconds
from the conversation's start. Those of a subagent count from its marker as published by WEKA and
from the conversation's start as published by SemiAnalysis; times before the marker's are the
former. Ids stand for a block and all before it, within a conversation alone, unless the scope is
`global`. The traces do not say when a conversation began: `conversations` of them run at a time,
and one that ends makes room for the next. Source: docs/trace_replay_tester.md and the traces of
callanjfox/kv-cache-tester (Apache-2.0).
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tiers.errors import TraceError
from tiers.traces import json_fields
from tiers.traces.lines import MAX_LINE, Line, Malformed, parse_object, place, read_lines
from tiers.traces.trace import Trace, TraceHeader, TraceRequest, TraceSummary

_MAX_DEPTH = 16
_ID_BITS = 40
"""Bits of an id that count within its conversation; those above are the conversation's number."""


class _Call(NamedTuple):
    """A request of a conversation; its ids take 8 bytes each, since all of a conversation wait."""

    seconds: float
    input_length: int
    output_length: int
    ids: array[int]


class _Conversation(NamedTuple):
    block_tokens: int
    first_id: int
    calls: list[_Call]


def open_weka(
    paths: Sequence[Path], skip_bad_lines: bool = False, conversations: int = 16
) -> Trace:
    """The trace of these files, with so many conversations at a time."""
    first = next(_objects(paths[0], TraceSummary()))
    try:
        block_tokens = json_fields.whole(parse_object(first.text), "block_size", at_least=1)
    except Malformed as error:
        raise place(error, paths[0], first.number) from None

    def read(summary: TraceSummary) -> Iterator[TraceRequest]:
        found = _conversations(paths, block_tokens, summary, skip_bad_lines)
        return _interleaved(found, conversations)

    return Trace(TraceHeader(block_tokens, "WEKA"), paths, read)


def is_weka(found: dict[str, Any]) -> bool:
    """Whether a first object is that of this format."""
    return {"block_size", "requests"} <= found.keys()


def _interleaved(found: Iterator[_Conversation], at_a_time: int) -> Iterator[TraceRequest]:
    """The requests of all conversations by time, where so many run at a time."""
    running: list[tuple[float, int, float, int, _Conversation]] = []

    def start(number: int, time: float) -> bool:
        for one in found:
            if one.calls:
                began = time - one.calls[0].seconds
                heapq.heappush(running, (time, number, began, 0, one))
                return True
        return False

    for number in range(at_a_time):
        if not start(number, 0.0):
            break
    while running:
        time, number, began, position, one = running[0]
        call = one.calls[position]
        ids = [one.first_id + own for own in call.ids]
        yield TraceRequest(time * 1000, call.input_length, call.output_length, ids)
        if position + 1 < len(one.calls):
            following = began + one.calls[position + 1].seconds
            heapq.heapreplace(running, (following, number, began, position + 1, one))
        else:
            heapq.heappop(running)
            start(number, time)


def _conversations(
    paths: Sequence[Path], block_tokens: int, summary: TraceSummary, skip_bad: bool
) -> Iterator[_Conversation]:
    number = 0
    for path in paths:
        for line in _objects(path, summary):
            number += 1
            try:
                yield _parse(parse_object(line.text), number, block_tokens, summary)
            except Malformed as error:
                placed = place(error, path, line.number)
                if not skip_bad:
                    raise placed from None
                summary.skip("bad conversations", str(placed))


def _objects(path: Path, summary: TraceSummary) -> Iterator[Line]:
    """The conversations of a file, not parsed; a `.json` has one, over any number of lines."""
    if path.suffix != ".json":
        yield from read_lines(path, summary)
        return
    try:
        with path.open("rb") as file:
            text = file.read(MAX_LINE + 1)
    except OSError as error:
        raise TraceError(f"{path}: it can't be read: {error.strerror or error}") from error
    if len(text) > MAX_LINE:
        raise TraceError(f"{path}: the conversation is longer than {MAX_LINE >> 20} MiB")
    summary.bytes_read += len(text)
    yield Line(1, text, True)


def _parse(
    found: dict[str, Any], number: int, block_tokens: int, summary: TraceSummary
) -> _Conversation:
    if not is_weka(found):
        raise Malformed("it has no block_size or no requests, as those before have")
    if json_fields.whole(found, "block_size", 1) != block_tokens:
        size = found["block_size"]
        raise Malformed(f"its block_size is {size}, but {block_tokens} in the first conversation")
    scope = found.get("hash_id_scope", "local")
    if scope not in ("local", "global"):
        raise Malformed(
            f"its hash_id_scope must be local or global, not {json_fields.shown(scope)}"
        )
    calls = list(_calls(found, "", 0.0, block_tokens, summary, 0))
    calls.sort(key=lambda call: call.seconds)
    return _Conversation(block_tokens, number << _ID_BITS if scope == "local" else 0, calls)


def _calls(
    found: dict[str, Any],
    where: str,
    began: float,
    block_tokens: int,
    summary: TraceSummary,
    depth: int,
) -> Iterator[_Call]:
    """The calls of a conversation or of a subagent, in the order in which they are written."""
    requests = found.get("requests")
    if type(requests) is not list:
        raise Malformed(f"{where}requests must be a list, not {json_fields.shown(requests)}")
    if depth > _MAX_DEPTH:
        raise Malformed(f"{where[:60]}...: subagents are nested deeper than {_MAX_DEPTH}")
    for index, one in enumerate(requests):
        here = f"{where}requests[{index}]"
        if type(one) is not dict:
            raise Malformed(f"{here} must be an object, not {json_fields.shown(one)}")
        try:
            seconds = began + json_fields.number(one, "t")
            if one.get("type") != "subagent" and "hash_ids" in one:
                yield _call(one, seconds, block_tokens)
                continue
        except Malformed as error:
            raise Malformed(f"{here}: {error}") from None
        if one.get("type") == "subagent":
            nested = list(_calls(one, f"{here}.", 0.0, block_tokens, summary, depth + 1))
            is_relative = any(call.seconds < seconds for call in nested)
            shift = seconds if is_relative else 0.0
            yield from (call._replace(seconds=call.seconds + shift) for call in nested)
        else:
            summary.skip("requests without hash_ids", f"{found.get('id', '')}{here}"[:200])


def _call(one: dict[str, Any], seconds: float, block_tokens: int) -> _Call:
    length = json_fields.whole(one, "in")
    ids = json_fields.prefix_ids(one)
    full = json_fields.full_blocks(ids, length, block_tokens)
    if ids and max(ids) >> _ID_BITS:
        raise Malformed(f"hash_ids must be under 2**{_ID_BITS}, not {max(ids)}")
    return _Call(seconds, length, json_fields.whole(one, "out"), array("Q", full))
