"""`kvtiers replay`: what a chain would do with the traffic of a trace."""

from __future__ import annotations

import json
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.progress import Progress

    from spec.chain import ChainSpec
    from tiers.traces.trace import Trace, TraceRequest
    from tiers.tuning.machine import Machine
    from tiers.tuning.report import Report

Real = Annotated[
    bool,
    typer.Option(
        "--real",
        help="Serve it with real connectors and stores, in its own places.",
    ),
]
Most = Annotated[int | None, typer.Option(min=1, help="Replay the first so many requests alone.")]
Speed = Annotated[
    float | None,
    typer.Option(
        min=0.001,
        help="With --real: seconds of the trace in one of this machine's. Unset: time stands "
        "while this machine works, so that only the profile's times count.",
    ),
]
ScaleBytes = Annotated[
    int, typer.Option(min=1, help="With --real: bytes of KV for each token on this machine.")
]
Folder = Annotated[
    Path | None,
    typer.Option(help="With --real: a folder for disk tiers. Unset: a temporary one."),
]


class _Asked(NamedTuple):
    """What is replayed on what. `warm`: the part that only warms. `most`: requests; None: all."""

    trace: Trace
    chain: ChainSpec
    machine: Machine
    warm: float
    most: int | None


def replay(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="A trace: a file or a folder.")],
    spec: Annotated[Path, typer.Option(help="The chain's YAML.")],
    profile: Annotated[
        Path, typer.Option(help="The machine's YAML or JSON: rates, KV sizes, each tier's link.")
    ],
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Simulate the chain's decisions and their time.")
    ] = False,
    real: Real = False,
    warm: Annotated[
        float, typer.Option(min=0, max=0.99, help="Part of the requests that only warms.")
    ] = 0.0,
    requests: Most = None,
    speed: Speed = None,
    scale: ScaleBytes = 8,
    folder: Folder = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the report to this file.")
    ] = None,
) -> None:
    """Replay a trace over a chain and report what it does to links, disks, GPUs and waiting."""
    if simulate == real:
        typer.echo("say how: --simulate or --real", err=True)
        raise typer.Exit(2)
    from spec.load import load_chain
    from tiers.errors import KVTiersError
    from tiers.traces.opening import open_trace
    from tiers.tuning.machine import load_machine
    from tiers.tuning.table import table

    try:
        asked = _Asked(open_trace(trace), load_chain(spec), load_machine(profile), warm, requests)
        report = _simulated(asked) if simulate else _real(asked, speed, scale, folder)
    except KVTiersError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    typer.echo(table(report))
    if json_file is not None:
        json_file.write_text(json.dumps(report.to_json(), indent=1) + "\n", encoding="utf-8")


def _simulated(asked: _Asked) -> Report:
    from tiers.tuning.simulation import simulate

    served = islice(_read(asked.trace), asked.most)
    size = asked.trace.header.block_tokens
    return simulate(served, size, asked.chain, asked.machine, warm=asked.warm)


def _real(asked: _Asked, speed: float | None, scale: int, folder: Path | None) -> Report:
    from tiers.tuning.replay import ReplayOptions, replay

    trace, machine = asked.trace, asked.machine
    served = list(islice(_read(trace), asked.most))
    with _bar() as bar:
        task = bar.add_task("requests are served", total=len(served))
        options = ReplayOptions(
            speed, scale, folder, lambda count: bar.update(task, completed=count)
        )
        size = trace.header.block_tokens
        report = replay(served, size, asked.chain, machine, warm=asked.warm, options=options)
    typer.echo(
        f"real connectors and stores, with {scale} bytes of KV a token in place of "
        f"{machine.kv_bytes_per_token}, and tiers of as many blocks"
    )
    return report


@contextmanager
def _bar() -> Iterator[Progress]:
    """A place for bars, which go when what they show is done."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield progress


def _read(trace: Trace) -> Iterator[TraceRequest]:
    """The trace's requests, with a bar that goes when all are read."""
    with _bar() as progress:
        bar = progress.add_task("the trace is read", total=trace.file_bytes)
        for number, request in enumerate(trace):
            if number % 256 == 0:
                progress.update(bar, completed=trace.summary.bytes_read)
            yield request
