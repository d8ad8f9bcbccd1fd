"""What commands that take their time, or read a trace, share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.progress import Progress

    from tiers.traces.trace import Trace, TraceRequest, TraceSummary
    from tiers.tuning.machine import Machine


def bars(auto_refresh: bool = True) -> Progress:
    """A place for bars on a terminal, which go when what they show is done. `auto_refresh`: by a
    thread of its own, which a process that forks must not have."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    return Progress(
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
        console=console,
        transient=True,
        disable=not console.is_terminal,
        auto_refresh=auto_refresh,
    )


def with_bar(trace: Trace) -> Iterator[TraceRequest]:
    """The trace's requests, with a bar that goes when all are read."""
    with bars() as progress:
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


def say_other_model(trace: Trace, machine: Machine) -> None:
    """Print that the machine's tokens are not as large as those of the engine that recorded."""
    recorded = trace.header.kv_bytes_per_token
    if recorded is not None and recorded != machine.kv_bytes_per_token:
        typer.echo(
            f"the profile says {machine.kv_bytes_per_token:,} KV bytes a token, and the engine "
            f"that recorded the trace had {recorded:,}: unless it is meant for another model, "
            "correct kv_bytes_per_token",
            err=True,
        )
