"""The format that kvtiers records: a header line, then a JSON object a line.

    {"format": "kvtiers-trace", "version": 1, "block_tokens": 16, "started": 1763797000000.0,
     "writer": "host-1234", "kv_bytes_per_token": 131072}
    {"timestamp": 12.5, "input_length": 40, "output_length": 7, "hash_ids": [71, 72]}

`started` is the time of the file's timestamp 0 in milliseconds of Unix time; `hash_ids` has the
full blocks of the prompt alone, `answer_hash_ids` those that the answer filled. Lines are in the
order in which requests ended. `open_since` is when the first request came that had not ended yet,
so that no later line of this writer has an earlier timestamp; without it lines are in order.
`writer`, `kv_bytes_per_token` and a request's `salt` (a keyed digest), `answer_hash_ids` and
`open_since` may be absent. A file may be compressed with zstd (`.zst`), in any number of frames.
A folder is read as the files that rotation left: those of one writer in the order of their start,
several writers merged by time, and those that wrote at the same time are counted.
"""

from __future__ import annotations

import heapq
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

from tiers.errors import TraceError
from tiers.traces.lines import (
    Malformed,
    number,
    prefix_ids,
    read_objects,
    short_text,
    shown,
    whole,
)
from tiers.traces.trace import TOGETHER, Trace, TraceHeader, TraceRequest, TraceSummary

FORMAT = "kvtiers-trace"
VERSION = 1


class FileHeader(NamedTuple):
    block_tokens: int
    started: float
    """Unix time of timestamp 0, in milliseconds."""
    writer: str | None = None
    """Who wrote the file, where several write into one folder."""
    kv_bytes_per_token: int | None = None


def encode_header(header: FileHeader) -> bytes:
    return _line({"format": FORMAT, "version": VERSION, **header._asdict()})


def encode_request(request: TraceRequest, open_since: float | None = None) -> bytes:
    """A request's line, with its newline; `timestamp` counts from the file's `started`."""
    return _line(
        {
            "timestamp": round(request.timestamp, 3),
            "input_length": request.input_length,
            "output_length": request.output_length,
            "hash_ids": list(request.blocks),
            "answer_hash_ids": list(request.answer_blocks) or None,
            "open_since": None if open_since is None else round(open_since, 3),
            "salt": request.salt,
        }
    )


def _line(content: dict[str, object]) -> bytes:
    known = {key: value for key, value in content.items() if value is not None}
    return json.dumps(known, separators=(",", ":")).encode() + b"\n"


def open_recorded(paths: Sequence[Path]) -> Trace:
    """The trace of these files; raises `TraceError` where they can't be one trace."""
    headers = {path: header for path in paths if (header := _header_of(path)) is not None}
    if not headers:
        raise TraceError(f"{paths[0].parent}: none of the files has a whole first line")
    first_path, first = next(iter(headers.items()))
    for path, header in headers.items():
        for key in ("block_tokens", "kv_bytes_per_token"):
            if getattr(header, key) != getattr(first, key):
                raise TraceError(
                    f"{path}:1: {key} is {getattr(header, key)}, but {getattr(first, key)} in "
                    f"{first_path}; they are no one trace: read them apart"
                )
    origin = min(header.started for header in headers.values())
    files = sorted(headers.items(), key=lambda item: (item[1].started, item[0].name))
    by_writer: dict[str | None, list[tuple[Path, float]]] = defaultdict(list)
    for path, header in files:
        by_writer[header.writer].append((path, header.started - origin))

    def read(summary: TraceSummary) -> Iterator[TraceRequest]:
        for path in set(paths) - headers.keys():
            summary.skip("files without a whole first line", str(path))
        streams = [
            zip(repeat(writer), _read_files(of_one, first.block_tokens, summary), strict=False)
            for writer, of_one in by_writer.items()
        ]
        spans: dict[str | None, list[float]] = {}
        for writer, request in heapq.merge(*streams, key=lambda pair: pair[1].timestamp):
            spans.setdefault(writer, [request.timestamp])[1:] = [request.timestamp]
            yield request
        if (engines := _at_a_time(spans.values())) > 1:
            summary.skipped[TOGETHER] = engines

    described = TraceHeader(first.block_tokens, "kvtiers", first.kv_bytes_per_token)
    return Trace(described, list(headers), read)


def _at_a_time(spans: Iterable[list[float]]) -> int:
    """How many there are at a time; 1 where they overlap for less than a tenth of it, as where an
    engine takes over from another. A span: its first moment and its last."""
    total, covered, end = 0.0, 0.0, -math.inf
    for first, last in sorted(spans):
        total += last - first
        covered += max(0.0, last - max(first, end))
        end = max(end, last)
    return math.ceil(total / covered - 0.1) if covered else 1


def is_header(found: dict[str, Any]) -> bool:
    return found.get("format") == FORMAT


def _header_of(path: Path) -> FileHeader | None:
    """The header of a file; None if its writer crashed before it was written."""
    return next(read_objects(path, _parse_header, TraceSummary()), None)


def _parse_header(found: dict[str, Any]) -> FileHeader:
    if not is_header(found):
        raise Malformed(f'the first line must have "format": "{FORMAT}"')
    if (version := found.get("version")) != VERSION:
        raise Malformed(
            f"its version is {shown(version)}, and this release reads version {VERSION}"
        )
    has_kv_bytes = "kv_bytes_per_token" in found
    return FileHeader(
        whole(found, "block_tokens", at_least=1),
        number(found, "started"),
        short_text(found, "writer"),
        whole(found, "kv_bytes_per_token", 1) if has_kv_bytes else None,
    )


def _read_files(
    files: list[tuple[Path, float]], block_tokens: int, summary: TraceSummary
) -> Iterator[TraceRequest]:
    """One writer's requests, in the order in which they came. In memory are those that came after
    one that had not ended yet."""
    waiting: list[tuple[float, int, TraceRequest]] = []
    since = math.inf
    count = 0
    for path, shift in files:

        def parse(found: dict[str, Any], shift: float = shift) -> TraceRequest | None:
            nonlocal since
            if is_header(found):
                return None
            request = _parse_request(found, block_tokens, shift)
            is_said = "open_since" in found
            since = number(found, "open_since") + shift if is_said else math.inf
            return request

        # A folder may be read while it is recorded into, and rotation deletes old files there.
        if not path.exists():
            summary.skip("files that were deleted meanwhile", str(path))
            continue
        for request in read_objects(path, parse, summary):
            count += 1
            heapq.heappush(waiting, (request.timestamp, count, request))
            while waiting and waiting[0][0] <= since:
                yield heapq.heappop(waiting)[2]
    while waiting:
        yield heapq.heappop(waiting)[2]


def _parse_request(found: dict[str, Any], block_tokens: int, shift: float) -> TraceRequest:
    length = whole(found, "input_length")
    ids = prefix_ids(found)
    if len(ids) > length // block_tokens:
        raise Malformed(
            f"{len(ids)} hash_ids are more than the full blocks of {length} tokens, "
            f"{length // block_tokens} of {block_tokens} tokens each"
        )
    output = whole(found, "output_length")
    of_answer = prefix_ids(found, "answer_hash_ids") if "answer_hash_ids" in found else ()
    if len(ids) + len(of_answer) > (length + output) // block_tokens:
        raise Malformed(
            f"{len(ids)} hash_ids and {len(of_answer)} answer_hash_ids are more than the full "
            f"blocks of {length + output} tokens, of {block_tokens} tokens each"
        )
    return TraceRequest(
        number(found, "timestamp") + shift,
        length,
        output,
        ids,
        short_text(found, "salt"),
        of_answer,
    )
