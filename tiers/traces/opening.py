"""Opening a trace by its path: the content says which format it has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiers.errors import TraceError
from tiers.traces.lines import Malformed, parse_object, read_lines
from tiers.traces.mooncake import open_mooncake
from tiers.traces.reading import place
from tiers.traces.recorded import is_header, open_recorded
from tiers.traces.trace import Trace, TraceSummary

_SUFFIXES = (".jsonl", ".jsonl.zst")


def open_trace(path: Path, skip_bad_lines: bool = False) -> Trace:
    """Open a file, or a folder of recorded files, and return its trace.

    Reads the first lines to tell the format. Raises `TraceError` for what is no trace.
    """
    if not path.exists():
        raise TraceError(f"{path}: there is no such file or folder")
    if path.is_dir():
        files = sorted(one for one in path.iterdir() if one.name.endswith(_SUFFIXES))
        if not files:
            raise TraceError(f"{path}: the folder has no file *{' or *'.join(_SUFFIXES)}")
        return open_recorded(files, skip_bad_lines)
    first = _first_object(path)
    if is_header(first):
        return open_recorded([path], skip_bad_lines)
    if "hash_ids" in first:
        return open_mooncake(path, skip_bad_lines)
    keys = ", ".join(sorted(first)[:8])
    raise TraceError(f"{path}:1: its keys are those of no known format of traces: {keys}")


def _first_object(path: Path) -> dict[str, Any]:
    for line in read_lines(path, TraceSummary()):
        try:
            return parse_object(line.text)
        except Malformed as error:
            raise place(error, path, line.number) from None
    raise TraceError(f"{path}: it is empty")
