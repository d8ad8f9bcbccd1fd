"""`kvtiers curve`: the hit ratio of every size, from a trace."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tiers.cli.arguments import (
    ChainOption,
    Conversations,
    JsonFile,
    TraceFile,
    check_places,
    refused,
    say_skipped,
    with_bar,
    write_result,
)

if TYPE_CHECKING:
    from tiers.traces.trace import Trace
    from tiers.tuning.curve_report import CurveReport


def curve(
    trace: TraceFile,
    chain_file: ChainOption = None,
    kv_bytes_per_token: Annotated[
        int | None, typer.Option(min=1, help="KV bytes of a token, over all layers and ranks.")
    ] = None,
    conversations: Conversations = 16,
    json_file: JsonFile = None,
) -> None:
    """Measure which part of a trace's blocks a cache would have served, for every size.

    Exact for LRU. The engine's own cache and all tiers together serve what the largest of them
    would; --chain marks the tiers.

    \b
    kvtiers curve traffic.jsonl --chain chain.yaml
    kvtiers curve traffic.jsonl --json - | jq .
    """
    from tiers.traces.open_trace import open_trace

    check_places(json_file=json_file, keep=[trace, chain_file])
    opened = open_trace(trace, conversations)
    token_bytes = kv_bytes_per_token or opened.header.kv_bytes_per_token
    report = _measured(opened, chain_file, token_bytes)
    typer.echo(_facts(opened, report))
    typer.echo(report.table())
    write_result(json_file, {"trace": str(trace), **report.to_json()})


def _measured(trace: Trace, chain_file: Path | None, token_bytes: int | None) -> CurveReport:
    from spec.load import load_chain
    from tiers.tuning.curve import measure
    from tiers.tuning.curve_report import CurveReport, marks_of

    block_tokens = trace.header.block_tokens
    chain = None if chain_file is None else load_chain(chain_file)
    if chain is not None and token_bytes is None:
        raise refused(
            "--chain has sizes in bytes: say what a token takes, with --kv-bytes-per-token"
        )
    curves = measure(with_bar(trace), block_tokens)
    say_skipped(trace.summary)
    if not curves.all.references:
        raise refused(f"{trace.paths[0]}: no prompt has a full block of {block_tokens} tokens")
    tiers = () if chain is None else chain.tiers
    marks, without = marks_of(tiers, block_tokens * (token_bytes or 1))
    for line in without:
        typer.echo(line, err=True)
    return CurveReport(curves, token_bytes, marks)


def _facts(trace: Trace, report: CurveReport) -> str:
    header, curves = trace.header, report.curves
    token = "" if report.token_bytes is None else f", {report.token_bytes:,} KV bytes a token"
    own = "only hits beyond the size of the engine's own cache come from tiers\n"
    return (
        f"{header.format} trace, blocks of {header.block_tokens} tokens{token}\n"
        f"{curves.all.requests:,} requests, {curves.all.tokens:,} prompt tokens, "
        f"{curves.all.references:,} full blocks, {curves.distinct:,} different ones\n"
        f"{own if report.marks else ''}"
    )
