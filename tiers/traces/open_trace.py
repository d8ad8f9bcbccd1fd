"""Opens a trace by its path: the content says which format it has. The published formats:

Mooncake: 512-token blocks, a JSON object a line, no header. Ids count up from 0 and stand for a
block and all before it; a prompt's partial last block has an id as well, which is dropped here.
Source: the files and README of FAST25-release/traces in kvcache-ai/Mooncake.

Qwen-Bailian: 16-token blocks, a JSON object a line, seconds, no header. The published ids are
digests of a block's tokens alone, so one id may stand for blocks after different prefixes. The
reader makes ids of a block and all before it from them, and drops the id of a partial last block. A
turn's prompt has its conversation's history in it, so `chat_id`, `parent_chat_id` and `turn` add
nothing to the ids and are checked only for being there. Source: the README of
alibaba-edu/qwen-bailian-usagetraces-anon (Apache-2.0).

WEKA's agentic traces: a conversation is a JSON object, with requests of agents nested in it.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, chain, count
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tiers.errors import TraceError
from tiers.paths import found_at
from tiers.traces.lines import (
    Malformed,
    Parse,
    full_blocks,
    hash_ids,
    number,
    parse_object,
    prefix_ids,
    read_lines,
    read_objects,
    shown,
    shown_keys,
    whole,
)
from tiers.traces.recorded import is_header, open_recorded
from tiers.traces.trace import Trace, TraceHeader, TraceRequest, TraceSummary

T = TypeVar("T")
_RECORDED = (".jsonl", ".jsonl.zst")


def open_trace(path: Path, conversations: int = 16) -> Trace:
    """Open a file, or a folder of recorded files or of conversations, and return its trace.

    Reads the first lines to find the format. Raises `TraceError` for other files.
    """
    if found_at(path) is None:
        raise TraceError(f"{path}: there is no such file or folder")
    if path.is_dir():
        names = sorted(file for file in path.iterdir() if not file.name.startswith("."))
        if recorded := [file for file in names if file.name.endswith(_RECORDED)]:
            return open_recorded(recorded)
        if found := [file for file in names if file.suffix == ".json"]:
            return _open_weka(found, conversations)
        raise TraceError(f"{path}: the folder has no file *{', *'.join(_RECORDED)} or *.json")
    if not path.is_file():
        raise TraceError(f"{path}: it is no file; a trace is read twice, so write it to a file")
    if path.suffix == ".json":
        return _open_weka([path], conversations)
    first = _first(path, dict)
    if is_header(first):
        return open_recorded([path])
    if _is_weka(first):
        return _open_weka([path], conversations)
    if _is_qwen(first):
        return _open_lines(path, TraceHeader(QWEN_TOKENS, "Qwen-Bailian"), _qwen)
    if "hash_ids" in first:
        header = TraceHeader(MOONCAKE_TOKENS, "Mooncake")
        return _open_lines(path, header, _mooncake)
    raise TraceError(
        f"{path}:1: its keys are those of no known format (kvtiers, Mooncake, Qwen-Bailian, "
        f"WEKA): {shown_keys(first)}"
    )


def _first(path: Path, parse: Callable[[dict[str, Any]], T]) -> T:
    """What `parse` makes of a file's first object."""
    summary = TraceSummary()
    for line in read_lines(path, summary):
        try:
            return parse(parse_object(line.text))
        except Malformed as error:
            raise error.at(path, line.number) from None
    raise TraceError(summary.notes[0] if summary.notes else f"{path}: it is empty")


def _open_lines(path: Path, header: TraceHeader, parse: Parse[TraceRequest]) -> Trace:
    return Trace(header, [path], lambda summary: read_objects(path, parse, summary))


# -- Mooncake ------------------------------------------------------------------------------------

MOONCAKE_TOKENS = 512


def _mooncake(found: dict[str, Any]) -> TraceRequest:
    length = whole(found, "input_length")
    ids = prefix_ids(found)
    return TraceRequest(
        number(found, "timestamp"),
        length,
        whole(found, "output_length"),
        full_blocks(ids, length, MOONCAKE_TOKENS),
    )


# -- Qwen-Bailian --------------------------------------------------------------------------------

QWEN_TOKENS = 16


def _is_qwen(found: dict[str, Any]) -> bool:
    return {"chat_id", "turn", "hash_ids"} <= found.keys()


def _qwen(found: dict[str, Any]) -> TraceRequest:
    if not _is_qwen(found):
        raise Malformed("it has no chat_id, turn or hash_ids, as the lines before have")
    length = whole(found, "input_length")
    ids = hash_ids(found)
    return TraceRequest(
        number(found, "timestamp") * 1000,
        length,
        whole(found, "output_length"),
        chained(full_blocks(ids, length, QWEN_TOKENS)),
    )


def chained(ids: Iterable[int]) -> array[int]:
    """Ids of 64 bits that each stand for an id and all before it.

    Needs no memory of other requests. Any two of 10 million different prefixes get the same id
    with a probability of 2 in 100,000: a link has 61 bits, as the hash of an int has.
    """
    # The hash of a tuple of ints is xxHash's and the same in every process: only that of text and
    # bytes has a seed.
    links = accumulate(ids, lambda before, block: hash((before, block)), initial=QWEN_TOKENS)
    next(links)
    return array("Q", (link & 2**64 - 1 for link in links))


# -- WEKA ----------------------------------------------------------------------------------------

_MAX_DEPTH = 16
_ID_BITS = 40
"""Bits of an id that count within its conversation; those above are the conversation's number."""


class _Call(NamedTuple):
    """A request of a conversation."""

    seconds: float
    input_length: int
    output_length: int
    ids: array[int]


class _Conversation(NamedTuple):
    first_id: int
    calls: list[_Call]


def _open_weka(paths: Sequence[Path], conversations: int) -> Trace:
    """The trace of these files, with `conversations` of them at a time."""
    block_tokens = _first(paths[0], lambda found: whole(found, "block_size", at_least=1))

    def read(summary: TraceSummary) -> Iterator[TraceRequest]:
        numbers = count(1)

        def parse(found: dict[str, Any]) -> _Conversation:
            return _conversation(found, next(numbers), block_tokens, summary)

        files = (read_objects(path, parse, summary) for path in paths)
        return _interleaved(chain.from_iterable(files), conversations)

    return Trace(TraceHeader(block_tokens, "WEKA"), paths, read)


def _is_weka(found: dict[str, Any]) -> bool:
    return {"block_size", "requests"} <= found.keys()


def _interleaved(found: Iterator[_Conversation], at_a_time: int) -> Iterator[TraceRequest]:
    """The requests of all conversations by time, where `at_a_time` run at once."""
    running: list[tuple[float, int, float, int, _Conversation]] = []

    def start(place: int, time: float) -> bool:
        for conversation in found:
            if conversation.calls:
                began = time - conversation.calls[0].seconds
                heapq.heappush(running, (time, place, began, 0, conversation))
                return True
        return False

    for place in range(at_a_time):
        if not start(place, 0.0):
            break
    while running:
        time, place, began, position, conversation = running[0]
        call = conversation.calls[position]
        ids = array("Q", (conversation.first_id + block for block in call.ids))
        yield TraceRequest(time * 1000, call.input_length, call.output_length, ids)
        if position + 1 < len(conversation.calls):
            following = began + conversation.calls[position + 1].seconds
            heapq.heapreplace(running, (following, place, began, position + 1, conversation))
        else:
            heapq.heappop(running)
            start(place, time)


def _conversation(
    found: dict[str, Any], place: int, block_tokens: int, summary: TraceSummary
) -> _Conversation:
    if not _is_weka(found):
        raise Malformed("it has no block_size or no requests, as those before have")
    if whole(found, "block_size", 1) != block_tokens:
        size = found["block_size"]
        raise Malformed(f"its block_size is {size}, but {block_tokens} in the first conversation")
    scope = found.get("hash_id_scope", "local")
    if scope not in ("local", "global"):
        raise Malformed(f"its hash_id_scope must be local or global, not {shown(scope)}")
    calls = sorted(_calls(found, "", block_tokens, summary, 0), key=lambda call: call.seconds)
    return _Conversation(place << _ID_BITS if scope == "local" else 0, calls)


def _calls(
    found: dict[str, Any], where: str, block_tokens: int, summary: TraceSummary, depth: int
) -> Iterator[_Call]:
    """The calls of a conversation or of a subagent, in the order in which they are written."""
    requests = found.get("requests")
    if type(requests) is not list:
        raise Malformed(f"{where}requests must be a list, not {shown(requests)}")
    if depth > _MAX_DEPTH:
        raise Malformed(f"{where[:60]}...: subagents are nested deeper than {_MAX_DEPTH}")
    for index, request in enumerate(requests):
        here = f"{where}requests[{index}]"
        if type(request) is not dict:
            raise Malformed(f"{here} must be an object, not {shown(request)}")
        try:
            seconds = number(request, "t")
            if request.get("type") != "subagent" and "hash_ids" in request:
                yield _call(request, seconds, block_tokens)
                continue
        except Malformed as error:
            raise Malformed(f"{here}: {error}") from None
        if request.get("type") == "subagent":
            nested = list(_calls(request, f"{here}.", block_tokens, summary, depth + 1))
            is_relative = any(call.seconds < seconds for call in nested)
            shift = seconds if is_relative else 0.0
            yield from (call._replace(seconds=call.seconds + shift) for call in nested)
        else:
            summary.skip("requests without hash_ids", f"{found.get('id', '')}{here}"[:200])


def _call(found: dict[str, Any], seconds: float, block_tokens: int) -> _Call:
    length = whole(found, "in")
    ids = prefix_ids(found)
    full = full_blocks(ids, length, block_tokens)
    if ids and max(ids) >> _ID_BITS:
        raise Malformed(f"hash_ids must be under 2**{_ID_BITS}, not {max(ids)}")
    return _Call(seconds, length, whole(found, "out"), full)
