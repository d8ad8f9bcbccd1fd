"""`kvtiers doctor`: whether a chain would serve here, before an engine starts."""

from __future__ import annotations

import json
import os
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spec.errors import SpecError
from tiers.cli.arguments import CHAIN_FILE, parsed, refused, say

if TYPE_CHECKING:
    from tiers.doctor.isolated import Found

LOAD_SECONDS = 60.0
"""Limit for reading the chain and the files that it names."""


def doctor(
    chain_file: Annotated[Path | None, CHAIN_FILE] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            help="The model's folder: check also what vLLM makes of it, without its weights. Takes "
            "ten seconds."
        ),
    ] = None,
    engine_args: Annotated[
        str, typer.Option(help="With --model: the engine's other arguments, in quotes.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check this host, and a chain on it, before an engine starts.

    Memory, the engine, plugins and each tier of the chain are looked at where they will serve, for
    20 s each at most (plugins 60), and nothing is left there. Run it as the engine's user, in its
    container. Status 1: something would keep a tier from serving. 2: the chain can't be used.

    \b
    kvtiers doctor
    kvtiers doctor chain.yaml
    kvtiers doctor chain.yaml --model /models/llama --engine-args "--tensor-parallel-size 2"
    """
    from dataclasses import asdict

    from tiers.doctor.examine import examine, load_in_time

    if engine_args and model is None:
        raise refused("--engine-args needs --model")
    words = parsed("--engine-args", engine_args, shlex.split)
    if model is not None and not (model / "config.json").is_file():
        raise refused(f"{model}: found no config.json in it; write the path of a model's folder")
    try:
        chain = None if chain_file is None else load_in_time(chain_file, LOAD_SECONDS)
    except TimeoutError:
        late = f"{chain_file}: it, or a file that it names, was not read in {LOAD_SECONDS:g} s"
        raise refused(late) from None
    except SpecError as error:
        if not as_json:
            raise
        typer.echo(json.dumps({"problems": error.problems}, indent=1))
        raise typer.Exit(2) from None
    # The engine opens the file again, which standard input can't be.
    file = chain_file if chain_file is not None and chain_file.is_file() else None
    found = examine(chain, file, os.environ, model, words)
    if as_json:
        findings = [{"about": each.about, **asdict(each.finding)} for each in found]
        typer.echo(json.dumps({"findings": findings}, indent=1))
    else:
        _print(found)
    raise typer.Exit(int(any(each.finding.gravity == "error" for each in found)))


def _print(found: Sequence[Found]) -> None:
    for each in found:
        finding = each.finding
        say(f"{finding.gravity:<10}  {each.about}: {finding.found}", 12)
        if finding.change:
            say(f"{'':12}change: {finding.change}", 2)
            if finding.cost:
                say(f"{'':12}cost: {finding.cost}", 2)
    counts = Counter(each.finding.gravity for each in found)
    typer.echo(", ".join(f"{count} {gravity}" for gravity, count in counts.items()))
