"""What commands that read a trace share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiers.traces.trace import Trace, TraceRequest, TraceSummary


def with_bar(trace: Trace) -> Iterator[TraceRequest]:
    """The trace's requests, with a bar on a terminal that goes when all are read."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    console = Console(stderr=True)
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        bar = progress.add_task("the trace is read", total=trace.file_bytes)
        for number, request in enumerate(trace):
            if number % 256 == 0:
                progress.update(bar, completed=trace.summary.bytes_read)
            yield request


def say_skipped(summary: TraceSummary) -> None:
    """Print what the reader left out or mended, with examples."""
    for what, count in summary.skipped.items():
        typer.echo(f"{count} {what}", err=True)
    for note in summary.notes:
        typer.echo(f"  {note}", err=True)
