"""`kvtiers tune`: the chain that serves a trace best within a budget."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spec.errors import one_line
from tiers.cli.arguments import (
    ChainOption,
    Conversations,
    JsonFile,
    TraceFile,
    bar,
    check_places,
    refused,
    say_other_model,
    say_shared,
    say_skipped,
    write_result,
    write_whole,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from spec.chain import ChainSpec
    from tiers.traces.trace import Trace, TraceRequest
    from tiers.tuning.search.budget import Budget
    from tiers.tuning.search.search import Trials
    from tiers.tuning.search.tune import Tuned, TuneOptions


Chains = Annotated[
    int, typer.Option(min=20, help="Simulate this many chains at most in the search.")
]
Processes = Annotated[int, typer.Option(min=1, max=64, help="Simulate in this many processes.")]

INTERRUPTED = 130
FEW = 8
"""Requests, so that each part of a trace has some."""


def tune(
    trace: TraceFile,
    budget: Annotated[
        Path, typer.Option(help="The budget's YAML: media, machine, objective, constraints.")
    ],
    chain_file: ChainOption = None,
    out: Annotated[Path | None, typer.Option(help="Write the chosen chain to this file.")] = None,
    json_file: JsonFile = None,
    chains: Chains = 250,
    minutes: Annotated[
        float | None, typer.Option(min=0.01, help="Search for so long at most, and take the best.")
    ] = None,
    judge: Annotated[
        Path | None,
        typer.Option(
            metavar="OTHER_TRACE",
            help="Judge what was found on this trace, of other traffic or another day, and search "
            "all of TRACE.",
        ),
    ] = None,
    processes: Processes = 2,
    conversations: Conversations = 16,
) -> None:
    """Search the chain that serves a trace best within a budget, and write its YAML.

    Simulation chooses tiers, order, sizes and policies, and compares them with the present chain
    (--chain). The first fifth of the trace only fills tiers, the next two fifths choose, and the
    rest judges what they chose. An interrupt ends the search with the best so far.

    \b
    kvtiers tune traffic.jsonl --budget budget.yaml --chain present.yaml --out chain.yaml
    """
    from spec.load import load_chain
    from tiers.errors import KVTiersError
    from tiers.traces.open_trace import open_trace
    from tiers.tuning.search.budget import load_budget
    from tiers.tuning.search.tune import TuneOptions
    from tiers.tuning.search.tune_report import as_json, as_text, as_yaml, too_little, unsearched

    check_places(out, json_file=json_file, keep=[trace, budget, judge, chain_file])
    given = load_budget(budget)
    present = None if chain_file is None else load_chain(chain_file)
    try:
        opened = open_trace(trace, conversations)
        other = None if judge is None else open_trace(judge, conversations)
        with bar("reading the trace", auto_refresh=False) as update:  # simulations are forked
            update(refresh=True)
            requests = _read(opened)
            say_other_model(opened, given.machine)
            judged = None if other is None else _read(other, opened.header.block_tokens)
            seconds = None if minutes is None else minutes * 60
            options = TuneOptions(chains, seconds, processes=processes, judge=judged)
            found = searched(requests, opened, given, present, options, update)
    except KVTiersError as error:
        raise refused(error) from None
    judged_on = None if judge is None else one_line(judge.name)
    chain_yaml = as_yaml(found, one_line(trace.name), present, judged_on)
    typer.echo(as_text(found, judged_on))
    if chain_yaml is None:
        how_far = ", as far as so little traffic tells" if too_little(found) else ""
        typer.echo(f"\nNo tier pays{how_far}: there is no chain to write.")
    elif out is None:
        typer.echo(f"\n{chain_yaml}", nl=False)
    else:
        write_whole(out, chain_yaml)
        typer.echo(f"\nThe chain is in {out}.")
        if more := unsearched(found, present):
            typer.echo(more.replace("here", "there"))
    write_result(json_file, as_json(found, one_line(trace.name)))
    if found.is_cut_off:
        raise typer.Exit(INTERRUPTED)
    if found.broken:
        raise typer.Exit(1)


def searched(
    requests: Sequence[TraceRequest],
    trace: Trace,
    budget: Budget,
    present: ChainSpec | None,
    options: TuneOptions,
    update: Callable[..., None],
) -> Tuned:
    """Search, and show how far it is by a bar's `update`. Forks."""
    from tiers.tuning.search.tune import tune as run

    say_shared([medium.tier() for medium in budget.media])
    began = time.monotonic()

    def show(trials: Trials) -> None:
        text = _so_far(trials, options, time.monotonic() - began)
        total = max(options.limit, len(trials))
        update(total=total, completed=len(trials), description=text, refresh=True)

    return run(requests, trace.header.block_tokens, budget, present, options, show)


def _read(trace: Trace, block_tokens: int | None = None) -> list[TraceRequest]:
    """A trace's requests. Raises TraceError for too few, or other blocks than `block_tokens`."""
    from tiers.errors import TraceError

    requests = list(trace)
    say_skipped(trace.summary, is_searched=True)
    if len(requests) < FEW:
        raise TraceError(
            f"{trace.paths[0]}: found {len(requests)} requests; a search needs {FEW} at "
            "least, and hundreds to mean anything"
        )
    if block_tokens not in (None, trace.header.block_tokens):
        raise TraceError(
            f"{trace.paths[0]}: found blocks of {trace.header.block_tokens} tokens, and the trace "
            f"that is searched has {block_tokens}; name one that was recorded with the same"
        )
    return requests


def _so_far(trials: Trials, asked: TuneOptions, seconds: float) -> str:
    """How far a search is, the best so far, and for how long it may go on."""
    from spec.text import seconds as words

    left = seconds / len(trials) * max(0, asked.limit - len(trials))
    if asked.seconds is not None:
        left = min(left, max(0.0, asked.seconds - seconds))
    ttft = words(trials.tried[0].report.ttft_mean)
    return (
        f"{len(trials)} of {asked.limit} chains at most, best so far {ttft}, "
        f"{left / 60:.1f} min left at most"
    )
