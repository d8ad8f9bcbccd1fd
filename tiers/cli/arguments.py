"""Arguments that several commands take, and how they end without a result."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

ChainFile = Annotated[
    Path, typer.Argument(metavar="FILE", help="A chain's YAML.", show_default=False)
]
"""The path of a chain; whether it can be read is for `load_chain` to say."""

TraceFile = Annotated[
    Path,
    typer.Argument(
        metavar="TRACE", help="A trace: a file, or a folder of files.", show_default=False
    ),
]
"""The path of a trace; what is wrong with it is for `open_trace` to say."""

SkipBadLines = Annotated[
    bool, typer.Option("--skip-bad-lines", help="Count bad lines of the trace and go on.")
]

Conversations = Annotated[
    int,
    typer.Option(
        min=1, help="Conversations at a time, where a trace does not say when they began."
    ),
]

JsonFile = Annotated[
    Path | None, typer.Option("--json", help="Write the result to this file, as JSON.")
]


def refused(why: object, status: int = 2) -> typer.Exit:
    """Print why there is no result, and return the exit with that status."""
    typer.echo(str(why), err=True)
    return typer.Exit(status)


def check_places(*files: Path | None) -> None:
    """Refuse files to write that have no folder, before the work is done."""
    for file in files:
        if file is not None and not os.access(file.parent, os.W_OK):
            raise refused(f"{file}: its folder is not there, or can't be written to")
