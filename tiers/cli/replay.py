"""`kvtiers replay`: a trace over a chain, simulated or real."""

from __future__ import annotations

import os
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from tiers.cli.arguments import (
    CHAIN,
    Conversations,
    JsonFile,
    TraceFile,
    bar,
    check_places,
    refused,
    say_other_model,
    say_shared,
    say_skipped,
    with_bar,
    write_result,
)


def replay(
    trace: TraceFile,
    chain_file: Annotated[Path, CHAIN],
    profile: Annotated[
        Path | None,
        typer.Option(help="The machine's YAML or JSON, to which kvtiers bench adds the tiers."),
    ] = None,
    real: Annotated[
        bool,
        typer.Option(
            "--real",
            help="Serve it with real connectors and stores, in empty places. Unset: simulate the "
            "chain's decisions and their time.",
        ),
    ] = False,
    warm: Annotated[
        float, typer.Option(min=0, max=0.99, help="Part, the first, that only fills tiers.")
    ] = 0.0,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Replay only the first N requests.")
    ] = None,
    scale: Annotated[
        int, typer.Option(min=1, help="With --real: bytes of KV for each token on this machine.")
    ] = 8,
    folder: Annotated[
        Path | None,
        typer.Option(help="With --real: a folder for disk tiers. Unset: a temporary one."),
    ] = None,
    conversations: Conversations = 16,
    json_file: JsonFile = None,
) -> None:
    """Replay a trace over a chain and report what it does to links, disks, GPUs and waiting.

    \b
    kvtiers replay traffic.jsonl --chain chain.yaml --profile machine.json
    """
    if profile is None:
        from tiers.tuning.machine import EXAMPLE

        raise refused(f"no profile; {EXAMPLE}, then kvtiers bench --chain {chain_file} --save FILE")
    check_places(json_file=json_file, keep=[trace, chain_file, profile])
    if folder is not None and not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise refused(f"{folder}: it is no folder that can be written to; make it, or name another")
    from spec.load import load_chain
    from tiers.errors import KVTiersError
    from tiers.traces.open_trace import open_trace
    from tiers.tuning.machine import load_machine
    from tiers.tuning.report import table
    from tiers.tuning.simulation.simulate import simulate

    try:
        opened = open_trace(trace, conversations)
        size, served = opened.header.block_tokens, islice(with_bar(opened), requests)
        chain, machine = load_chain(chain_file), load_machine(profile)
        if real:
            from spec.plugins import stdout_to_stderr  # stores may print
            from tiers.lab.replay.replay_trace import replay as serve

            came = list(served)
            with stdout_to_stderr(), bar("requests are served", len(came)) as update:
                here = partial(serve, folder=folder, progress=lambda n: update(completed=n))
                report = here(came, size, chain, machine, warm=warm, bytes_per_token=scale)
        else:
            report = simulate(served, size, chain, machine, warm=warm)
    except KVTiersError as error:
        raise refused(error) from None
    say_skipped(opened.summary)
    say_other_model(opened, machine)
    say_shared(chain.tiers)
    if chain.tenants:
        typer.echo("rules of tenants are not replayed: a trace has no names of tenants", err=True)
    if chain.ghosts:
        typer.echo("ghosts are not replayed: curve is exact", err=True)
    if real and any(getattr(tier, "ttl", None) for tier in chain.tiers):
        typer.echo("nothing expires with --real: a ttl passes in this machine's time", err=True)
    if real and any(getattr(tier, "maxmemory", None) for tier in chain.tiers):
        typer.echo("redis evicts worse with --real: it tells ages apart by its seconds", err=True)
    if real:
        typer.echo(
            f"real connectors and stores, with {scale} bytes of KV a token in place of "
            f"{machine.kv_bytes_per_token}, and tiers of as many blocks"
        )
    typer.echo(table(report))
    write_result(json_file, report.to_json())
