"""Arguments that several commands take, and how they end without a result."""

from __future__ import annotations

import os
from collections.abc import Sequence
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


def check_places(*files: Path | None, keep: Sequence[Path | None] = ()) -> None:
    """Refuse, before the work is done, files that can't be written, and those that would take the
    place of another result or of what is read (`keep`)."""
    taken = {one.resolve() for one in keep if one is not None}
    for file in files:
        if file is None:
            continue
        if file.is_dir():
            raise refused(f"{file}: found a folder; write the path of a file")
        is_device = file.exists() and not file.is_file()
        if not os.access(file if is_device else file.resolve().parent, os.W_OK):
            raise refused(f"{file}: its folder is not there, or can't be written to")
        if file.resolve() in taken and not is_device:
            raise refused(f"{file}: it is written or read already; name another file")
        taken.add(file.resolve())


def check_folder(folder: Path | None) -> None:
    """Refuse a folder to work in that is none, before the work is done."""
    if folder is not None and not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise refused(f"{folder}: it is no folder that can be written to; make it, or name another")
