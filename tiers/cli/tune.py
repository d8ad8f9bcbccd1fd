"""`kvtiers tune`: the chain that serves a trace best within a budget."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from spec.chain import ChainSpec
    from tiers.tuning.search.budget import Budget
    from tiers.tuning.search.tune import Tuned


TraceFile = Annotated[Path, typer.Argument(metavar="TRACE", help="A trace: a file or a folder.")]
BudgetFile = Annotated[
    Path, typer.Option(help="The budget's YAML: media, machine, objective, constraints.")
]
Present = Annotated[Path | None, typer.Option(help="The present chain's YAML, to compare with.")]
Out = Annotated[Path | None, typer.Option(help="Write the chosen chain to this file.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")]
Plot = Annotated[
    Path | None, typer.Option(help="Draw waiting times against prices; needs matplotlib.")
]
Chains = Annotated[
    int, typer.Option(min=20, help="Simulate this many chains at most in the search.")
]
Processes = Annotated[int, typer.Option(min=1, max=64, help="Simulate in this many processes.")]


def tune(
    trace: TraceFile,
    budget: BudgetFile,
    spec: Present = None,
    out: Out = None,
    json_file: Json = None,
    plot: Plot = None,
    chains: Chains = 250,
    processes: Processes = 2,
) -> None:
    """Search the chain that serves a trace best within a budget, and write its YAML.

    Simulation chooses tiers, order, sizes and policies. The first quarter of the trace only warms;
    the second half judges what the search found in the second quarter.
    """
    from importlib.util import find_spec

    from spec.load import load_chain
    from tiers.errors import KVTiersError
    from tiers.tuning.search.budget import load_budget

    if plot is not None and find_spec("matplotlib") is None:
        raise typer.BadParameter(
            "it needs matplotlib: pip install 'kvtiers[bench]'", param_hint="--plot"
        )
    given = load_budget(budget)
    present = None if spec is None else load_chain(spec)
    try:
        found = _search(trace, given, present, chains, processes)
        _tell(found, trace.name, out, json_file, plot)
    except KVTiersError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    except OSError as error:
        typer.echo(f"{error.filename}: found no place to write ({error.strerror})", err=True)
        raise typer.Exit(1) from None
    if found.broken:
        raise typer.Exit(1)


def _search(
    trace: Path, budget: Budget, present: ChainSpec | None, chains: int, processes: int
) -> Tuned:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from tiers.traces.opening import open_trace
    from tiers.tuning.curve import measure
    from tiers.tuning.search.tune import tune as run
    from tiers.tuning.simulation.workload import Workload

    opened = open_trace(trace)
    size = opened.header.block_tokens
    columns = (BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    # Without a thread that refreshes: the simulating processes are forked from this one.
    with Progress(
        *columns, console=Console(stderr=True), transient=True, auto_refresh=False
    ) as progress:
        bar = progress.add_task("reading the trace", total=None)
        progress.refresh()
        requests = list(opened)
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
    found: Tuned, trace: str, out: Path | None, json_file: Path | None, plot: Path | None
) -> None:
    from tiers.tuning.files import write_json, write_whole
    from tiers.tuning.search.picture import draw
    from tiers.tuning.search.result import as_json, as_text, as_yaml

    chain = as_yaml(found, trace)
    typer.echo(as_text(found))
    if chain is None:
        typer.echo("\nNo tier pays: there is no chain to write.")
    elif out is None:
        typer.echo(f"\n{chain}", nl=False)
    else:
        write_whole(out, lambda file: file.write_text(chain, encoding="utf-8"))
        typer.echo(f"\nThe chain is in {out}.")
    if json_file is not None:
        write_json(json_file, as_json(found, trace))
    if plot is not None:
        write_whole(plot, lambda file: draw(found, file))
