"""Arguments that several commands take, and how they end without a result."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, TextIO

import typer

DASH = Path("-")
"""Standard input or output, in place of a file."""
STDIN = Path("/dev/stdin")
_RESULT: ContextVar[TextIO | None] = ContextVar("result", default=None)
"""Standard output, where it is kept for the result."""


def _or_stdin(file: Path | None) -> Path | None:
    return STDIN if file == DASH else file


ChainFile = Annotated[
    Path,
    typer.Argument(
        metavar="FILE",
        help="A chain's YAML; - is standard input.",
        show_default=False,
        callback=_or_stdin,
    ),
]
"""The path of a chain; whether it can be read is for `load_chain` to say."""

CHAIN = typer.Option(
    "--chain", metavar="FILE", help="A chain's YAML; - is standard input.", callback=_or_stdin
)
"""The same for commands that are about something else, such as a trace."""
ChainOption = Annotated[Path | None, CHAIN]

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
        min=1, help="Conversations at a time, where a trace has no times of their beginnings."
    ),
]


def _to_stdout(context: typer.Context, file: Path | None) -> Path | None:
    """Keep standard output for the result alone where it goes there: what is told besides goes to
    standard error until the command ends."""
    if file == DASH and not context.resilient_parsing:
        _RESULT.set(sys.stdout)
        context.with_resource(redirect_stdout(sys.stderr))
    return file


JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="FILE",
        help="Write the result to this file, as JSON; - is standard output, and all other output "
        "is on standard error.",
        callback=_to_stdout,
    ),
]
"""Where a command writes its result by `write_result`."""


def write_result(file: Path | None, content: object) -> None:
    """Write a command's result as JSON where --json says; None: nowhere. Raises CannotWrite."""
    import json

    from tiers.tuning.files import write_json

    if file == DASH:
        typer.echo(json.dumps(content, indent=1), file=_RESULT.get())
    elif file is not None:
        write_json(file, content)


def refused(why: object, status: int = 2) -> typer.Exit:
    """Print why there is no result, and return the exit with that status."""
    typer.echo(str(why), err=True)
    return typer.Exit(status)


def check_places(
    *files: Path | None, json_file: Path | None = None, keep: Sequence[Path | None] = ()
) -> None:
    """Refuse, before the work is done, files that can't be written, and those that would take the
    place of another result or of what is read (`keep`). Only `json_file` may be standard output."""
    taken = {one.resolve() for one in keep if one is not None}
    for file in (*files, None if json_file == DASH else json_file):
        if file is None:
            continue
        if file == DASH:
            raise refused("-: --json alone writes to standard output; write the path of a file")
        if file.is_dir():
            raise refused(f"{file}: found a folder; write the path of a file")
        is_device = file.exists() and not file.is_file()
        if not os.access(file if is_device else file.resolve().parent, os.W_OK):
            raise refused(f"{file}: its folder is not there, or can't be written to")
        if file.resolve() in taken and not is_device:
            raise refused(f"{file}: it is written or read already; name another file")
        taken.add(file.resolve())


def check_plot(picture: Path | None) -> None:
    """Refuse to draw a picture without what draws it, before the work is done."""
    from importlib.util import find_spec

    if picture is not None and find_spec("matplotlib") is None:
        raise refused("--plot needs matplotlib: pip install matplotlib")


def check_folder(folder: Path | None) -> None:
    """Refuse a folder to work in that is none, before the work is done."""
    if folder is not None and not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise refused(f"{folder}: it is no folder that can be written to; make it, or name another")
