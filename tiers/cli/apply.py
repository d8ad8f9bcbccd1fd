"""`kvtiers apply`: change the chain of a running engine."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from spec.errors import one_line
from tiers.cli.arguments import ChainFile, ControlFolder, ask_engines, only_engine, parsed, refused


def apply(
    chain: ChainFile,
    engine: Annotated[
        str | None,
        typer.Option(
            "--to", metavar="NAME", help="The engine, by its name or the beginning of it."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print what it would do.")
    ] = False,
    if_version: Annotated[
        int | None,
        typer.Option(
            "--if-version", metavar="N", help="Only if the chain has this version: see status."
        ),
    ] = None,
    watch: Annotated[
        str | None,
        typer.Option(
            "--watch",
            metavar="TIME",
            help="Compare what the tiers save in this time, like 15m, with as long before, and go "
            "back if it is less.",
        ),
    ] = None,
    folder: ControlFolder = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Change the chain of a running engine to this one, on all ranks at once or not at all.

    Prints what becomes of each tier: kept, changed, resized, reopened, added, drained. Requests in
    flight keep their plan. The engine goes on to watch a change with --watch when this command is
    interrupted. --dry-run asks no rank for memory, so a rank may still refuse. The engine is looked
    for in the chain's control.folder unless --folder is given. Status 1: the change was refused, so
    that nothing has changed; or it was taken back; or a tier is missing now, which did not close or
    did not open again.

    \b
    kvtiers apply chain.yaml --dry-run
    kvtiers apply chain.yaml --to engine-4711 --if-version 3 --watch 15m
    """
    from spec.load import load_chain
    from tiers.control.ask_engines import await_change

    spec = load_chain(chain)
    # Without the defaults, of which an engine of another version may not know one.
    written = spec.model_dump(mode="json", exclude_unset=True)
    # Pydantic writes a plugin's SecretStr so; what an operator wrote so comes back.
    if "*" * 10 in json.dumps(written) and load_chain(written) != spec:
        raise refused(f"{chain}: a secret in it can't be handed over; restart the engine with it")
    if folder is None and spec.control is not None:
        folder = spec.control.folder
    name = only_engine(ask_engines("status", {}, engine, folder), "--to").engine
    question = {"chain": written, "dry_run": dry_run}
    if if_version is not None:
        question["if_version"] = if_version
    if watch is not None:
        question["watch"] = _seconds(watch)
    answer = _ask("apply", question, name, folder)
    if not as_json:
        for line in answer["lines"]:
            typer.echo(one_line(line))
    if not dry_run:
        answer = await_change(answer, lambda asked: _ask("change", asked, name, folder))
        if not answer["over"]:
            raise refused(f"engine {name}: the change is not over yet; see status", status=1)
    if as_json:
        typer.echo(json.dumps({"engine": name, "dry_run": dry_run, **answer}))
    elif not dry_run:
        _print_outcome(name, answer)
    has_changed = not answer["why"] or answer.get("in_part")
    if watch is not None and has_changed and "verdict" in answer:
        _watch(answer["change"], name, folder, as_json)
    if answer["why"] or answer["diff"]["refused"]:
        raise typer.Exit(1)


def _seconds(watch: str) -> float:
    from spec.fields import parse_duration
    from tiers.control.change_verbs import MAX_WATCH

    seconds = parsed("--watch", watch, parse_duration)
    if seconds > MAX_WATCH:
        raise refused(f"--watch {watch}: an hour at most")
    return seconds


def _watch(number: int, name: str, folder: Path | None, as_json: bool) -> None:
    """Wait for the verdict on a change, and print it."""
    if not as_json:
        typer.echo("it is watched; the engine goes on when this is interrupted")
    while True:
        answer = _ask("change", {"change": number}, name, folder)
        if answer["verdict"]["outcome"] != "watching":
            break
        time.sleep(1.0)
    typer.echo(json.dumps(answer) if as_json else one_line(answer["verdict_text"]))
    if answer["verdict"]["outcome"] == "worse":
        raise typer.Exit(1)


def _ask(verb: str, question: dict[str, Any], name: str, folder: Path | None) -> dict[str, Any]:
    ((_, answer),) = ask_engines(verb, question, name, folder)
    return dict(answer)


def _print_outcome(name: str, answer: dict[str, Any]) -> None:
    if answer["why"]:
        if not answer["diff"]["refused"]:
            what = "changed in part" if answer.get("in_part") else "refused"
            typer.echo(f"{what}: {one_line(answer['why'])}", err=True)
        return
    typer.echo(f"engine {name}: its chain has version {answer['version']}")
    for tier in answer["remains"]:
        line = f"tier {tier}: blocks are still in flight; it closes when they have ended"
        typer.echo(one_line(line))
