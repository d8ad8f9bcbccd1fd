"""`kvtiers tune`: the chain that serves a trace best within a budget."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spec.errors import one_line
from tiers.cli.arguments import (
    ChainOption,
    Conversations,
    JsonFile,
    SkipBadLines,
    TraceFile,
    check_places,
    check_plot,
    refused,
    write_result,
)

if TYPE_CHECKING:
    from spec.chain import ChainSpec
    from tiers.traces.trace import Trace
    from tiers.tuning.search.budget import Budget
    from tiers.tuning.search.tune import Tuned


BudgetFile = Annotated[
    Path, typer.Option(help="The budget's YAML: media, machine, objective, constraints.")
]
Out = Annotated[Path | None, typer.Option(help="Write the chosen chain to this file.")]
Plot = Annotated[
    Path | None, typer.Option(help="Draw waiting times against prices; needs matplotlib.")
]
Chains = Annotated[
    int, typer.Option(min=20, help="Simulate this many chains at most in the search.")
]
Processes = Annotated[int, typer.Option(min=1, max=64, help="Simulate in this many processes.")]

FEW = 8
"""Requests, so that each part of a trace has some."""


def tune(
    trace: TraceFile,
    budget: BudgetFile,
    chain_file: ChainOption = None,
    out: Out = None,
    json_file: JsonFile = None,
    plot: Plot = None,
    chains: Chains = 250,
    processes: Processes = 2,
    conversations: Conversations = 16,
    skip_bad_lines: SkipBadLines = False,
) -> None:
    """Search the chain that serves a trace best within a budget, and write its YAML.

    Simulation chooses tiers, order, sizes and policies, and compares them with the present chain
    (--chain). The first quarter of the trace only warms;
    the second half judges what the search found in the second quarter.

    \b
    kvtiers tune traffic.jsonl --budget budget.yaml --chain present.yaml --out chain.yaml
    """
    from spec.load import load_chain
    from tiers.errors import KVTiersError
    from tiers.traces.opening import open_trace
    from tiers.tuning.search.budget import load_budget

    check_plot(plot)
    check_places(out, plot, json_file=json_file, keep=[trace, budget])
    given = load_budget(budget)
    present = None if chain_file is None else load_chain(chain_file)
    try:
        opened = open_trace(trace, skip_bad_lines, conversations)
        found = _search(opened, given, present, chains, processes)
    except KVTiersError as error:
        raise refused(error) from None
    _tell(found, one_line(trace.name), present, out, json_file, plot)
    if found.broken:
        raise typer.Exit(1)


def _search(
    trace: Trace, budget: Budget, present: ChainSpec | None, chains: int, processes: int
) -> Tuned:
    from tiers.cli.reading import bars, say_skipped
    from tiers.errors import TraceError
    from tiers.tuning.curve import measure
    from tiers.tuning.search.tune import tune as run
    from tiers.tuning.simulation.workload import Workload

    size = trace.header.block_tokens
    with bars(auto_refresh=False) as progress:  # the simulating processes are forked from this one
        bar = progress.add_task("reading the trace", total=None)
        progress.refresh()
        requests = list(trace)
        say_skipped(trace.summary)
        if len(requests) < FEW:
            raise TraceError(
                f"{trace.paths[0]}: found {len(requests)} requests; a search needs {FEW} at "
                "least, and hundreds to mean anything"
            )
        curve = measure(requests, size, second_use=False).all
        block_bytes = size * budget.machine.kv_bytes_per_token
        progress.update(bar, total=chains, description="simulating chains", refresh=True)
        return run(
            Workload.of(requests, size),
            budget,
            lambda capacity: curve.ratio(capacity // block_bytes),
            present,
            limit=chains,
            processes=processes,
            advance=lambda: progress.update(bar, advance=1, refresh=True),
        )


def _tell(
    found: Tuned,
    trace: str,
    present: ChainSpec | None,
    out: Path | None,
    json_file: Path | None,
    plot: Path | None,
) -> None:
    from tiers.tuning.files import write_whole
    from tiers.tuning.search.picture import draw
    from tiers.tuning.search.result import as_json, as_text, as_yaml, lacking

    chain = as_yaml(found, trace, present)
    typer.echo(as_text(found))
    if chain is None:
        typer.echo("\nNo tier pays: there is no chain to write.")
    elif out is None:
        typer.echo(f"\n{chain}", nl=False)
    else:
        write_whole(out, lambda file: file.write_text(chain, encoding="utf-8"))
        typer.echo(f"\nThe chain is in {out}.")
        if lacks := lacking(found, present):
            typer.echo(lacks.replace("here", "there"))
    write_result(json_file, as_json(found, trace))
    if plot is not None:
        write_whole(plot, lambda file: draw(found, file))
