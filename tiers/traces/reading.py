"""What readers of a JSON object a line share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tiers.errors import TraceError
from tiers.traces.lines import Malformed, parse_object, read_lines
from tiers.traces.trace import TraceRequest, TraceSummary

Parse = Callable[[dict[str, Any]], TraceRequest | None]
"""A line's object as a request, or None for a line that holds none; raises `Malformed`."""


def read_requests(
    path: Path, parse: Parse, summary: TraceSummary, skip_bad: bool
) -> Iterator[TraceRequest]:
    """Yield a file's requests. A bad line is a `TraceError` with its place, or is skipped and
    counted; a last line that was cut off is always skipped."""
    for line in read_lines(path, summary):
        try:
            request = parse(parse_object(line.text))
        except Malformed as error:
            placed = place(error, path, line.number)
            if not line.is_whole:
                summary.skip("last lines that were cut off", f"{path}:{line.number}: cut off")
            elif skip_bad:
                summary.skip("bad lines", str(placed))
            else:
                raise placed from None
        else:
            if request is not None:
                yield request


def place(error: Malformed, path: Path, line: int) -> TraceError:
    """The error with its file and line."""
    return TraceError(f"{path}:{line}: {error}")
