"""Opening a trace by its path: the content says which format it has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiers.errors import TraceError
from tiers.traces.json_fields import shown
from tiers.traces.lines import Malformed, parse_object, place, read_lines
from tiers.traces.mooncake import open_mooncake
from tiers.traces.qwen import is_qwen, open_qwen
from tiers.traces.recorded import is_header, open_recorded
from tiers.traces.trace import Trace, TraceSummary
from tiers.traces.weka import is_weka, open_weka

_RECORDED = (".jsonl", ".jsonl.zst")


def open_trace(path: Path, skip_bad_lines: bool = False, conversations: int = 16) -> Trace:
    """Open a file, or a folder of recorded files or of conversations, and return its trace.

    Reads the first lines to tell the format. Conversations that do not say when they began run so
    many at a time (`weka.py`). Raises `TraceError` for what is no trace.
    """
    if not path.exists():
        raise TraceError(f"{path}: there is no such file or folder")
    if path.is_dir():
        return _open_folder(path, skip_bad_lines, conversations)
    if not path.is_file():
        raise TraceError(f"{path}: it is no file; a trace is read twice, so write it to a file")
    if path.suffix == ".json":
        return open_weka([path], skip_bad_lines, conversations)
    first = _first_object(path)
    if is_header(first):
        return open_recorded([path], skip_bad_lines)
    if is_weka(first):
        return open_weka([path], skip_bad_lines, conversations)
    if is_qwen(first):
        return open_qwen(path, skip_bad_lines)
    if "hash_ids" in first:
        return open_mooncake(path, skip_bad_lines)
    keys = ", ".join(sorted(map(shown, first))[:8])
    raise TraceError(
        f"{path}:1: its keys are those of no known format (kvtiers, Mooncake, Qwen-Bailian, "
        f"WEKA): {keys or 'none'}"
    )


def _open_folder(path: Path, skip_bad_lines: bool, conversations: int) -> Trace:
    names = sorted(one for one in path.iterdir() if not one.name.startswith("."))
    if recorded := [one for one in names if one.name.endswith(_RECORDED)]:
        return open_recorded(recorded, skip_bad_lines)
    if found := [one for one in names if one.suffix == ".json"]:
        return open_weka(found, skip_bad_lines, conversations)
    raise TraceError(f"{path}: the folder has no file *{', *'.join(_RECORDED)} or *.json")


def _first_object(path: Path) -> dict[str, Any]:
    summary = TraceSummary()
    for line in read_lines(path, summary):
        try:
            return parse_object(line.text)
        except Malformed as error:
            raise place(error, path, line.number) from None
    raise TraceError(summary.notes[0] if summary.notes else f"{path}: it is empty")
