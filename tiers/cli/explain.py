"""`kvtiers explain`: why requests were served as they were."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from spec.errors import one_line
from tiers.cli.arguments import ControlFolder, EngineName, ask_engines, other_version, refused, say


def explain(
    request: Annotated[
        str | None, typer.Argument(help="The request, by the engine's name or its beginning.")
    ] = None,
    last: Annotated[int | None, typer.Option(min=1, help="The last N requests.")] = None,
    slowest: Annotated[
        int | None, typer.Option(min=1, help="The N requests that waited longest for tiers.")
    ] = None,
    engine: EngineName = None,
    folder: ControlFolder = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Tell why requests were served as they were.

    For each: its tokens by where they came from, what each tier answered and why it did not serve,
    and how long it took. The engine's chain must have `explain`.

    \b
    kvtiers explain --last 5
    kvtiers explain chatcmpl-81f --from engine-4711
    """
    from tiers.explain.accounts import lines

    asked = {"request": request, "last": last, "slowest": slowest}
    question = {name: value for name, value in asked.items() if value is not None}
    if len(question) != 1:
        raise refused("give one of: a request, --last N, --slowest N")
    known = [one for one in ask_engines("explain", question, engine, folder) if one.content]
    if not known:
        raise refused("no engine knows such a request; the oldest ones are dropped", status=1)
    for name, accounts in known:
        if len(known) > 1 and not as_json:
            typer.echo(f"engine {one_line(name)}")
        for account in accounts:
            try:
                of_it = [json.dumps({"engine": name, **account})] if as_json else [*lines(account)]
            except (KeyError, TypeError, AttributeError):
                raise refused(other_version(name), status=1) from None
            for line in of_it:
                say(line, folds=not as_json)
