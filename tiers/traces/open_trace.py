"""Opens a trace by its path: the content says whether kvtiers recorded it, or it is Mooncake's.

Mooncake: 512-token blocks, a JSON object a line, no header. Ids count up from 0 and stand for a
block and all before it; a prompt's partial last block has an id as well, which is dropped here.
Source: the files and README of FAST25-release/traces in kvcache-ai/Mooncake.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiers.errors import TraceError
from tiers.paths import found_at
from tiers.traces.lines import (
    Malformed,
    number,
    parse_object,
    prefix_ids,
    read_lines,
    read_objects,
    shown_keys,
    whole,
)
from tiers.traces.recorded import is_header, open_recorded
from tiers.traces.trace import Trace, TraceHeader, TraceRequest, TraceSummary

_RECORDED = (".jsonl", ".jsonl.zst")
MOONCAKE_TOKENS = 512


def open_trace(path: Path) -> Trace:
    """Open a file, or a folder of recorded files, and return its trace.

    Reads the first lines to find the format. Raises `TraceError` for other files.
    """
    if found_at(path) is None:
        raise TraceError(f"{path}: there is no such file or folder")
    if path.is_dir():
        names = sorted(file for file in path.iterdir() if not file.name.startswith("."))
        if recorded := [file for file in names if file.name.endswith(_RECORDED)]:
            return open_recorded(recorded)
        raise TraceError(f"{path}: the folder has no file *{' or *'.join(_RECORDED)}")
    if not path.is_file():
        raise TraceError(f"{path}: it is no file; a trace is read twice, so write it to a file")
    first = _first(path)
    if is_header(first):
        return open_recorded([path])
    if "hash_ids" not in first or "chat_id" in first:  # Qwen-Bailian's ids are of other blocks
        raise TraceError(
            f"{path}:1: its keys are those of no known format (kvtiers, Mooncake): "
            f"{shown_keys(first)}"
        )
    header = TraceHeader(MOONCAKE_TOKENS, "Mooncake")
    return Trace(header, [path], lambda summary: read_objects(path, _mooncake, summary))


def _first(path: Path) -> dict[str, Any]:
    """A file's first object."""
    summary = TraceSummary()
    for line in read_lines(path, summary):
        try:
            return parse_object(line.text)
        except Malformed as error:
            raise error.at(path, line.number) from None
    raise TraceError(summary.notes[0] if summary.notes else f"{path}: it is empty")


def _mooncake(found: dict[str, Any]) -> TraceRequest:
    length = whole(found, "input_length")
    ids, blocks = prefix_ids(found), -(-length // MOONCAKE_TOKENS)
    if len(ids) > blocks:
        raise Malformed(
            f"{len(ids)} hash_ids are more than the blocks of {length} tokens, "
            f"{blocks} of {MOONCAKE_TOKENS} tokens each"
        )
    full = ids[: length // MOONCAKE_TOKENS]
    return TraceRequest(number(found, "timestamp"), length, whole(found, "output_length"), full)
