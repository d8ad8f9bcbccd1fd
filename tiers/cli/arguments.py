"""Arguments, results, refusals and progress bars that commands share."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from contextvars import ContextVar
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from secrets import token_hex
from shutil import get_terminal_size
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, TextIO, TypeVar

import typer

from tiers.errors import KVTiersError

if TYPE_CHECKING:
    from spec.offloading import OffloadingSpec
    from tiers.control.ask_engines import EngineAnswer
    from tiers.traces.trace import Trace, TraceRequest, TraceSummary
    from tiers.tuning.machine import Machine

Value = TypeVar("Value")
DASH = Path("-")
"""Standard input or output, in place of a file."""
STDIN = Path("/dev/stdin")
_RESULT: ContextVar[TextIO | None] = ContextVar("result", default=None)
"""Standard output, where only the result is written there."""


def _or_stdin(file: Path | None) -> Path | None:
    return STDIN if file == DASH else file


CHAIN_FILE = typer.Argument(
    metavar="CHAIN",
    help="A chain's YAML; - is standard input.",
    show_default=False,
    callback=_or_stdin,
)
ChainFile = Annotated[Path, CHAIN_FILE]
"""The path of a chain; `load_chain` refuses one that can't be read."""

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
"""The path of a trace; `open_trace` refuses what is no trace."""

Conversations = Annotated[
    int,
    typer.Option(
        min=1, help="Conversations at a time, where a trace has no times of their beginnings."
    ),
]

ControlFolder = Annotated[
    Path | None,
    typer.Option(
        "--folder",
        help="The engines' control.folder, or one engine's socket in it. Unset: /run/kvtiers for "
        "root, else /tmp/kvtiers-UID.",
    ),
]
EngineName = Annotated[
    str | None,
    typer.Option("--from", metavar="NAME", help="The engine, by its name or the beginning of it."),
]


def other_version(engine: str) -> str:
    """Why an engine's answer can't be shown: this version can't read it."""
    return (
        f"engine {engine}: its answer is another version's; ask with the kvtiers of that engine, "
        "or write --json"
    )


def only_engine(answers: Sequence[EngineAnswer], option: str) -> EngineAnswer:
    """The one engine that answered; several are refused, for the user to name one by `option`."""
    if len(answers) > 1:
        names = " or ".join(answer.engine for answer in answers)
        raise refused(f"several engines listen: name one of them, {option} {names}")
    return answers[0]


def ask_engines(
    verb: str, parameters: Mapping[str, object], engine: str | None, folder: Path | None
) -> list[EngineAnswer]:
    """Ask running engines; problems of some are printed. Raises NoAnswer if none answers."""
    from tiers.control.ask_engines import ask
    from tiers.control.control_server import runtime_folder

    return ask(
        *(folder or runtime_folder(), verb, parameters, engine),
        warn=lambda problem: typer.echo(problem, err=True),
    )


def _to_stdout(context: typer.Context, file: Path | None) -> Path | None:
    """Keep standard output for the result alone, if it is written there: all other output is on
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
    if file == DASH:
        typer.echo(json.dumps(content, indent=1), file=_RESULT.get())
    elif file is not None:
        write_whole(file, json.dumps(content, indent=1) + "\n")


class CannotWrite(KVTiersError):
    """A result found no place; names the file."""


def write_whole(path: Path, text: str, like: Path | None = None) -> None:
    """Write a file beside `path`, which then takes its name, with the owner and mode of what was
    there, else of `like`; an error or an interrupt leaves what was there. Raises CannotWrite."""
    try:
        if path.exists() and not path.is_file():
            # A device or a pipe: a file in its place would end it for all.
            path.write_text(text, encoding="utf-8")
            return
        place = path.resolve()  # the target of a link is written, and the link stays
        model = next((one.stat() for one in (place, like) if one and one.is_file()), None)
        other = place.with_name(f".{place.stem}.{token_hex(8)}{place.suffix}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL  # which follows no link
        handle = os.open(other, flags, 0o600 if model else 0o666)
        try:
            with open(handle, "w", encoding="utf-8") as file:
                if model is not None:
                    with suppress(OSError):  # who is not root gives no file away
                        os.fchown(handle, model.st_uid, model.st_gid)
                    os.fchmod(handle, model.st_mode & 0o777)
                file.write(text)
            os.replace(other, place)
        finally:
            other.unlink(missing_ok=True)
    except OSError as error:
        why = error.strerror or str(error)
        raise CannotWrite(f"{path}: it can't be written: {why}; name another place") from error


def say(line: str, indent: int = 4, folds: bool = True) -> None:
    """Print a line. On a terminal a long one `folds` between words, with what follows indented."""
    if folds and sys.stdout is not None and sys.stdout.isatty():
        beneath = " " * (len(line) - len(line.lstrip()) + indent)
        line = fill(line, get_terminal_size().columns, subsequent_indent=beneath)
    typer.echo(line)


def refused(why: object, status: int = 2) -> typer.Exit:
    """Print the reason for having no result, and return the exit with that status."""
    typer.echo(str(why), err=True)
    return typer.Exit(status)


class Missing(KVTiersError):
    """A package of one of kvtiers' extras is not installed."""


def require_extra(package: str, *extras: str) -> None:
    """Raise Missing, naming the extras that bring it, unless `package` can be imported."""
    if find_spec(package) is None:
        install = " or ".join(f"'kvtiers[{extra}]'" for extra in extras)
        raise Missing(f"{package} is not installed, which this needs: pip install {install}")


def parsed(option: str, text: str, parse: Callable[[str], Value]) -> Value:
    """What an option's text means to `parse`; refuse what it raises ValueError for."""
    try:
        return parse(text)
    except ValueError as error:
        raise refused(f"{option} {text}: {error}") from None


def check_places(
    *files: Path | None, json_file: Path | None = None, keep: Sequence[Path | None] = ()
) -> None:
    """Refuse, before the work is done, files that can't be written, and those that would replace
    another result or an input (`keep`). Only `json_file` may be standard output."""
    taken = {file.resolve() for file in keep if file is not None}
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


@contextmanager
def bar(
    text: str, total: float | None = None, completed: int = 0, auto_refresh: bool = True
) -> Iterator[Callable[..., None]]:
    """A bar on a terminal, which vanishes when its work is done; yields Rich's update of it.
    `auto_refresh`: by a thread of its own, which a process that forks must not have."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    console.quiet = not console.is_terminal  # else Rich before 14.3 ends them by an empty line
    with Progress(
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
        console=console,
        transient=True,
        disable=console.quiet,
        auto_refresh=auto_refresh,
    ) as progress:
        yield partial(progress.update, progress.add_task(text, total=total, completed=completed))


def with_bar(trace: Trace) -> Iterator[TraceRequest]:
    with bar("the trace is read", trace.file_bytes) as update:
        for number, request in enumerate(trace):
            if number % 256 == 0:
                update(completed=trace.summary.bytes_read)
            yield request


def say_skipped(summary: TraceSummary, is_searched: bool = False) -> None:
    """Print the lines that the reader left out or mended, with examples. `is_searched`: refuse what
    is of several engines."""
    from tiers.traces.trace import TOGETHER

    for what, count in summary.skipped.items():
        typer.echo(f"{count} {what}", err=True)
    for note in summary.notes:
        typer.echo(f"  {note}", err=True)
    if is_searched and TOGETHER in summary.skipped:
        raise typer.Exit(2)


def say_shared(tiers: Iterable[OffloadingSpec]) -> None:
    """Print which tiers engines of other hosts may use, too: a trace is of one engine."""
    from spec.offloading import StoreSpec

    stores = (tier for tier in tiers if isinstance(tier, StoreSpec))
    if names := [tier.tier_name for tier in stores if tier.host_local is False]:
        typer.echo(
            f"{', '.join(names)}: taken to have the traffic of this trace alone; where other "
            "engines use the same place, they take a part of its room and link",
            err=True,
        )


def say_other_model(trace: Trace, machine: Machine) -> None:
    """Print that the machine's tokens have another size than those of the recorded engine."""
    recorded = trace.header.kv_bytes_per_token
    if recorded is not None and recorded != machine.kv_bytes_per_token:
        typer.echo(
            f"the profile says {machine.kv_bytes_per_token:,} KV bytes a token, and the engine "
            f"that recorded the trace had {recorded:,}: unless it is meant for another model, "
            "correct kv_bytes_per_token",
            err=True,
        )
