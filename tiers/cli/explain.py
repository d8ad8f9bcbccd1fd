"""`kvtiers explain`: why requests were served as they were."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from tiers.cli.arguments import ChainOption, refused

FOLDER = Path("/run/kvtiers")


def explain(
    request: Annotated[
        str | None,
        typer.Argument(help="The request, by the engine's name or its beginning."),
    ] = None,
    chain_file: ChainOption = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            help="In place of --chain: the folder of its explain, or one engine's socket in it. "
            f"Without both: {FOLDER}."
        ),
    ] = None,
    last: Annotated[int | None, typer.Option(min=1, help="The last N requests.")] = None,
    slowest: Annotated[
        int | None, typer.Option(min=1, help="The N requests that waited longest for tiers.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Tell why requests were served as they were.

    For each: its tokens by where they came from, what each tier answered and why it did not serve,
    and how long it took. The engine's chain must have `explain`.

    \b
    kvtiers explain --chain chain.yaml --last 5
    kvtiers explain --chain chain.yaml chatcmpl-81f
    """
    from tiers.explain.ask_engines import NoAnswer, ask

    asked = {"request": request, "last": last, "slowest": slowest}
    question = {name: value for name, value in asked.items() if value is not None}
    if len(question) != 1:
        raise refused("give one of: a request, --last N, --slowest N")
    if chain_file is not None and folder is not None:
        raise refused("give one of: --chain, --folder")
    folder = folder or (FOLDER if chain_file is None else _folder_of(chain_file))
    try:
        accounts = ask(folder, question, lambda problem: typer.echo(problem, err=True))
    except NoAnswer as error:
        raise refused(error, status=1) from None
    if not accounts:
        raise refused(
            f"no such request is known in {folder}; the oldest ones are dropped", status=1
        )
    for account in accounts:
        for line in _lines(account, as_json):
            typer.echo(line)


def _folder_of(chain_file: Path) -> Path:
    """The folder in which the engines of a chain listen."""
    from spec.load import load_chain

    chain = load_chain(chain_file)
    if chain.explain is None:
        raise refused(f"{chain_file}: it has no explain; add explain: {{folder: {FOLDER}}}")
    return chain.explain.folder


def _lines(account: dict[str, Any], as_json: bool) -> list[str]:
    """The lines of one request."""
    from tiers.explain.accounts import lines

    try:
        return [json.dumps(account)] if as_json else [*lines(account)]
    except (KeyError, TypeError, AttributeError):
        raise refused(
            f"engine {account['engine']}: its answer is another version's; ask with the kvtiers of "
            "that engine, or write --json",
            status=1,
        ) from None
