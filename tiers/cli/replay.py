"""`kvtiers replay`: what a chain would do with the traffic of a trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiers.traces.trace import Trace, TraceRequest


def replay(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="A trace: a file or a folder.")],
    spec: Annotated[Path, typer.Option(help="The chain's YAML.")],
    profile: Annotated[
        Path, typer.Option(help="The machine's YAML or JSON: rates, KV sizes, each tier's link.")
    ],
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Simulate the chain's decisions and their time.")
    ] = False,
    warm: Annotated[
        float, typer.Option(min=0, max=0.99, help="Part of the requests that only warms.")
    ] = 0.0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the report to this file.")
    ] = None,
) -> None:
    """Replay a trace over a chain and report what it does to links, disks, GPUs and waiting."""
    if not simulate:
        typer.echo("say how: --simulate", err=True)
        raise typer.Exit(2)
    from spec.load import load_chain
    from tiers.errors import TraceError
    from tiers.traces.opening import open_trace
    from tiers.tuning.machine import load_machine
    from tiers.tuning.simulation import simulate as run
    from tiers.tuning.table import table

    chain, machine = load_chain(spec), load_machine(profile)
    try:
        opened = open_trace(trace)
        report = run(_read(opened), opened.header.block_tokens, chain, machine, warm=warm)
    except TraceError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    typer.echo(table(report))
    if json_file is not None:
        json_file.write_text(json.dumps(report.to_json(), indent=1) + "\n", encoding="utf-8")


def _read(trace: Trace) -> Iterator[TraceRequest]:
    """The trace's requests, with a bar that goes when all are read."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("the trace is read", total=trace.file_bytes)
        for number, request in enumerate(trace):
            if number % 256 == 0:
                progress.update(bar, completed=trace.summary.bytes_read)
            yield request
