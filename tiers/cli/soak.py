"""`kvtiers soak`: run a small engine over a chain of tiers that break."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from tiers.cli.arguments import JsonFile, check_places, refused, write_result


def soak(
    minutes: Annotated[float, typer.Option(min=0.01, help="Minutes to run.")] = 10.0,
    json_file: JsonFile = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Take the prompts from this trace, such as one of Mooncake's (Apache-2.0). By "
            "default conversations are made up.",
        ),
    ] = None,
    every: Annotated[float, typer.Option(min=0.05, help="Mean seconds between two faults.")] = 3.0,
    seed: Annotated[int, typer.Option(help="Seed of the prompts and faults.")] = 0,
) -> None:
    """Break disk and Redis again and again under an engine whose answers show a wrong byte.

    Ends with status 1 if an answer was wrong, a request stuck, or a slot or descriptor leaked.

    \b
    kvtiers soak --minutes 60 --seed 7
    """
    import logging
    import random
    from dataclasses import asdict
    from socket import socket
    from tempfile import TemporaryDirectory

    from tiers.errors import KVTiersError
    from tiers.lab.replay import ReplayModel
    from tiers.lab.server import Server
    from tiers.lab.soak.soak import Soak
    from tiers.lab.soak.soak_prompts import conversations, from_trace

    check_places(json_file=json_file, keep=[trace])
    # The soak prints the faults that it injects; of the tiers' log only errors are news.
    logging.getLogger("tiers").setLevel(logging.ERROR)
    typer.echo(f"prompts: {trace or 'conversations made up; name a trace with --trace'}")
    tokens = ReplayModel().block_tokens
    try:
        made_up = conversations(random.Random(seed), tokens)
        prompts = made_up if trace is None else from_trace(trace, tokens)
        with TemporaryDirectory(prefix="kvtiers-soak-") as name:
            with socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = int(probe.getsockname()[1])
            server = Server(Path(name), {"maxmemory": "16mb"}, port)
            try:
                run = Soak(prompts, server, Path(name), every, seed, typer.echo)
                run.run(minutes * 60)
            finally:
                server.kill()
    except KVTiersError as error:
        raise refused(error, status=1) from error
    typer.echo(", ".join(f"{name}: {count}" for name, count in run.chance.counts.most_common()))
    report = asdict(run.report)
    typer.echo(json.dumps(report))
    write_result(json_file, report)
    if not run.report.is_clean():
        raise typer.Exit(1)
