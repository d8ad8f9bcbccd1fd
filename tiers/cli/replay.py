"""`kvtiers replay`: what a chain would do with the traffic of a trace."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from tiers.cli.arguments import (
    CHAIN,
    Conversations,
    JsonFile,
    SkipBadLines,
    TraceFile,
    check_folder,
    check_places,
    refused,
    write_result,
)

if TYPE_CHECKING:
    from spec.chain import ChainSpec
    from tiers.traces.trace import Trace
    from tiers.tuning.machine import Machine
    from tiers.tuning.report import Report

Profile = Annotated[
    Path, typer.Option(help="The machine's YAML or JSON: rates, KV sizes, each tier's link.")
]
Warm = Annotated[float, typer.Option(min=0, max=0.99, help="Part of the requests that only warms.")]
Real = Annotated[
    bool,
    typer.Option(
        "--real",
        help="Serve it with real connectors and stores, in its own places.",
    ),
]
Most = Annotated[int | None, typer.Option(min=1, help="Replay only the first N requests.")]
Speed = Annotated[
    float | None,
    typer.Option(
        min=0.001,
        max=1_000_000,
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
    trace: TraceFile,
    chain_file: Annotated[Path, CHAIN],
    profile: Profile,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Simulate the chain's decisions and their time.")
    ] = False,
    real: Real = False,
    warm: Warm = 0.0,
    requests: Most = None,
    speed: Speed = None,
    scale: ScaleBytes = 8,
    folder: Folder = None,
    conversations: Conversations = 16,
    skip_bad_lines: SkipBadLines = False,
    json_file: JsonFile = None,
) -> None:
    """Replay a trace over a chain and report what it does to links, disks, GPUs and waiting.

    \b
    kvtiers replay traffic.jsonl --chain chain.yaml --profile machine.json --simulate
    """
    if simulate == real:
        raise refused("give one of: --simulate, --real")
    check_places(json_file=json_file, keep=[trace, chain_file, profile])
    check_folder(folder)
    from spec.load import load_chain
    from tiers.errors import KVTiersError
    from tiers.traces.open_trace import open_trace
    from tiers.tuning.machine import load_machine
    from tiers.tuning.report import table

    try:
        opened = open_trace(trace, skip_bad_lines, conversations)
        asked = _Asked(opened, load_chain(chain_file), load_machine(profile), warm, requests)
        report = _simulated(asked) if simulate else _real(asked, speed, scale, folder)
    except KVTiersError as error:
        raise refused(error) from None
    _say_left_out(asked, simulate)
    typer.echo(table(report))
    write_result(json_file, report.to_json())


def _say_left_out(asked: _Asked, simulate: bool) -> None:
    from tiers.cli.progress import say_other_model, say_skipped

    say_skipped(asked.trace.summary)
    say_other_model(asked.trace, asked.machine)
    if asked.chain.tenants:
        typer.echo("rules of tenants are not replayed: a trace has no names of tenants", err=True)
    if simulate and asked.chain.ghosts:
        typer.echo("ghosts are not simulated: --real has them, and curve is exact", err=True)


def _simulated(asked: _Asked) -> Report:
    from tiers.cli.progress import with_bar
    from tiers.tuning.simulation import simulate

    served = islice(with_bar(asked.trace), asked.most)
    size = asked.trace.header.block_tokens
    return simulate(served, size, asked.chain, asked.machine, warm=asked.warm)


def _real(asked: _Asked, speed: float | None, scale: int, folder: Path | None) -> Report:
    from spec.registry import stdout_to_stderr
    from tiers.cli.progress import bars, with_bar
    from tiers.lab.replay.replay_trace import ReplayOptions, replay

    trace, machine = asked.trace, asked.machine
    served = list(islice(with_bar(trace), asked.most))
    with stdout_to_stderr(), bars() as bar:  # stores may print
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
