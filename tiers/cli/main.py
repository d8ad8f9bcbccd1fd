"""`kvtiers`: the commands, each a function.

To add one, write `tiers/cli/<command>.py` with a function of that name and list it in `COMMANDS`.
The module is imported for `kvtiers --help`, so its function imports all that is heavy.
"""

from __future__ import annotations

import os
import sys
from contextlib import redirect_stdout
from typing import Annotated, Any, TextIO

import typer

from spec.errors import SpecError
from tiers.cli.apply import apply
from tiers.cli.bench import bench
from tiers.cli.chain import config, schema, validate
from tiers.cli.check import check
from tiers.cli.curve import curve
from tiers.cli.data import export, gc, import_, inspect, scrub, verify
from tiers.cli.doctor import doctor
from tiers.cli.explain import explain
from tiers.cli.new_tier import new_tier
from tiers.cli.recommend import recommend
from tiers.cli.replay import replay
from tiers.cli.status import status
from tiers.cli.top import top
from tiers.cli.try_ import try_
from tiers.cli.tune import tune
from tiers.errors import KVTiersError, TraceError

COMMANDS = (
    *(validate, config, schema, doctor, status, top, explain, apply),
    *(inspect, verify, scrub, export, import_, gc),
    *(bench, curve, replay, tune, recommend),
    *(try_, check, new_tier),
)

app = typer.Typer(
    name="kvtiers",
    add_completion=True,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in COMMANDS:
    app.command(command.__name__.rstrip("_").replace("_", "-"))(command)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"kvtiers {version('kvtiers')}")
        raise typer.Exit


@app.callback()
def kvtiers(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Keep the KV cache of earlier prompts in a chain of tiers: CPU memory, disk, Redis."""


def main(commands: typer.Typer = app, name: str = "kvtiers") -> None:
    """Run a command line. Any command ends with status 2 for a chain or trace that can't be used,
    and with status 1 where else it can't do what it should, with the reason."""
    stdout: Any = None if sys.stdout is None else _UntilUnread(sys.stdout)  # None: it is closed
    try:
        with redirect_stdout(stdout):
            commands(prog_name=name)
    except KVTiersError as error:
        typer.echo(str(error), err=True)
        sys.exit(2 if isinstance(error, SpecError | TraceError) else 1)
    except OSError as error:
        if stdout is not None:
            stdout.discard()  # else the interpreter tries to write the rest at its end
        where = f"{error.filename}: " if error.filename else ""
        typer.echo(f"{where}the command was stopped: {error.strerror or error}", err=True)
        sys.exit(1)


class _UntilUnread:
    """Standard output whose reader may leave, as `head -1` does: then nothing more is printed, and
    the command still writes its files."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            self.discard()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except BrokenPipeError:
            self.discard()

    def discard(self) -> None:
        """Print nothing more."""
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self._stream.fileno())
        os.close(null)
