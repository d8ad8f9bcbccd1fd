"""`kvtiers recommend`: what to change of a running engine's chain, by what it recorded."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from tiers.cli.arguments import (
    ChainOption,
    ControlFolder,
    EngineName,
    JsonFile,
    ask_engines,
    bar,
    check_places,
    only_engine,
    refused,
    say_skipped,
    write_result,
    write_whole,
)
from tiers.cli.tune import INTERRUPTED, Chains, Processes, searched

if TYPE_CHECKING:
    from spec.chain import ChainSpec
    from spec.offloading import OffloadingSpec
    from tiers.control.engine_status import EngineStatus, RunningChain, TierStatus
    from tiers.traces.trace import Trace, TraceRequest
    from tiers.tuning.report import Report
    from tiers.tuning.search.advice import Advice
    from tiers.tuning.search.budget import Budget
    from tiers.tuning.search.tune import Tuned

AGREES = 0.1
"""Shares of tokens that differ by more are told."""
RECORD = "record: {path: /var/lib/kvtiers-trace}"


def recommend(
    recording: Annotated[
        Path | None,
        typer.Argument(
            metavar="RECORDING",
            help="A recording. Unset: what the engine itself has recorded since its start.",
        ),
    ] = None,
    engine: EngineName = None,
    folder: ControlFolder = None,
    chain: ChainOption = None,
    budget: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A budget's YAML, as for tune: prices, endurance, other media, limits, objective. "
            "What it leaves out is as the engine measured it.",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Write the chain's file with the changes to this file.")
    ] = None,
    json_file: JsonFile = None,
    chains: Chains = 250,
    minutes: Annotated[float, typer.Option(min=0.01, help="Search for so long at most.")] = 5.0,
    processes: Processes = 2,
) -> None:
    """Advise what to change of a running engine's chain, if anything.

    Chains near the present one are simulated on what the engine recorded, at the rates that it
    measured, within this host's memory and free disk. The advice is a change, with a file made from
    the chain's own; or to stay; or to record longer. A recording without an engine needs --chain
    and --budget.

    \b
    kvtiers recommend --from engine-4711 --output new.yaml
    kvtiers recommend /var/lib/kvtiers-trace --chain chain.yaml --budget budget.yaml
    """
    from spec.load import load_chain
    from tiers.tuning.search.advice import advise, too_few
    from tiers.tuning.search.tune import TuneOptions
    from tiers.tuning.simulation.simulate import simulate

    asks = recording is None or engine is not None or folder is not None
    asked = _ask(engine, folder) if asks else None
    file = chain or (asked and asked.running.file and Path(asked.running.file))
    if not file or not file.is_file():
        raise refused(f"{file or 'no chain'}: found no file: name the chain's file by --chain")
    check_places(output, json_file=json_file, keep=[file, budget])
    present = load_chain(file)
    _check_chain(present, asked, file)
    trace = _trace(recording, present, asked, file)
    requests = _read(trace, asked)
    if (advice := too_few(requests)) is not None:
        typer.echo(f"Record longer: {advice.why}.")
        write_result(json_file, advice.as_json())
        raise typer.Exit(1)
    given = _budget(budget, _known(file, present, asked, trace), asked)
    options = TuneOptions(chains, 60 * minutes, processes=processes, near_present=True)
    with bar("simulating chains", options.limit, auto_refresh=False) as update:
        found = searched(requests, trace, given, present, options, update)
    if found.is_cut_off:
        raise refused("interrupted before anything was judged", INTERRUPTED)
    size, tiers = trace.header.block_tokens, asked.status.tiers if asked is not None else ()
    advice = advise(found, requests, size)
    # Of all requests: the engine counts from its start, too.
    again = simulate(requests, size, found.judged["present"].chain, found.budget.machine)
    _print(found, advice, present, file, [*_measured(again, tiers)], output, json_file)
    if advice.verdict == "record longer":
        raise typer.Exit(1)


class Asked(NamedTuple):
    """What an engine answered. `engines`: how many listen in its folder, itself one of them."""

    running: RunningChain
    status: EngineStatus
    engines: int


# -- the engine, its chain and its recording -----------------------------------------------------


def _ask(engine: str | None, folder: Path | None) -> Asked:
    from importlib.metadata import version

    from pydantic import ValidationError

    from tiers.control.ask_engines import sockets
    from tiers.control.control_server import runtime_folder
    from tiers.control.engine_status import EngineStatus, RunningChain

    name, content = only_engine(ask_engines("status", {}, engine, folder), "--from")
    ours = version("kvtiers")
    theirs = content.get("version") if isinstance(content, dict) else None
    other = f"engine {name} runs kvtiers {theirs}, and this is {ours}: ask with that version"
    if theirs != ours:
        raise refused(other)
    ((_, chain),) = ask_engines("chain", {}, name, folder)
    engines = len(sockets(folder or runtime_folder()))
    try:
        running, status = RunningChain.model_validate(chain), EngineStatus.model_validate(content)
        return Asked(running, status, engines)
    except ValidationError:
        raise refused(other) from None


def _check_chain(present: ChainSpec, asked: Asked | None, file: Path) -> None:
    """Refuse a file that is not the chain that runs, and a chain that no search knows."""
    from spec.chain import shown_chain
    from tiers.tuning.machine import size_key, size_of

    here = shown_chain(present)
    there = here if asked is None else asked.running.chain
    if keys := [key for key in {**there, **here} if here.get(key) != there.get(key)]:
        raise refused(
            f"{file}: the engine runs another chain; {', '.join(keys)} differ: name the file that "
            "it runs by --chain"
        )
    types = [tier.type for tier in present.tiers]
    if twice := sorted({kind for kind in types if types.count(kind) > 1}):
        raise refused(f"{file}: found two tiers of type {twice[0]}: no search knows such chains")
    for tier in present.tiers:
        if size_of(tier) is None:
            raise refused(
                f"{file}: tier {tier.tier_name} has no size: write {size_key(type(tier))} there, "
                "as a server has it, and apply that first"
            )


def _trace(recording: Path | None, present: ChainSpec, asked: Asked | None, file: Path) -> Trace:
    """The recording named, or what the engine has recorded since its start."""
    from tiers.traces.open_trace import open_trace
    from tiers.traces.recorded import open_recorded
    from tiers.traces.recorder import writer_name

    if recording is not None:
        return open_trace(recording)
    assert asked is not None, "an engine was"
    if present.record is None:
        raise refused(f"{file}: found no record: add {RECORD}, and recommend after a day")
    folder = present.record.path
    writer = writer_name(asked.running.host, asked.running.pid)
    files = sorted(folder.glob("kvtiers-trace-*.jsonl*"))
    # In full: process 42 is not process 421.
    ours = [path for path in files if path.match(f"kvtiers-trace-{'?' * 13}-{writer}.jsonl*")]
    if not ours:
        more = f"; name it to use {len(files)} files of other engines" if files else ""
        raise refused(f"{folder}: found nothing that this engine recorded: serve requests{more}")
    if len(ours) < len(files):
        typer.echo(
            f"{len(files) - len(ours)} files of other engines, or of earlier starts, are left out: "
            f"name {folder} to use all",
            err=True,
        )
    return open_recorded(ours)


def _read(trace: Trace, asked: Asked | None) -> list[TraceRequest]:
    for key in ("block_tokens", "kv_bytes_per_token"):
        recorded, runs = getattr(trace.header, key), asked and getattr(asked.running, key)
        if None not in (recorded, runs) and recorded != runs:
            raise refused(
                f"{trace.paths[0]}: found {key} of {recorded:,}, and the engine has {runs:,}: name "
                "a recording of this model in this layout"
            )
    requests = list(trace)
    say_skipped(trace.summary, is_searched=True)
    if not requests:
        raise refused(f"{trace.paths[0]}: found no request; record some hundred")
    return requests


# -- what there could be -------------------------------------------------------------------------


def _known(file: Path, present: ChainSpec, asked: Asked | None, trace: Trace) -> dict[str, Any]:
    """What a budget need not say: the chain's own tiers, and what the engine measured."""
    from spec.document import read_yaml
    from tiers.tuning.machine import size_of
    from tiers.tuning.search.budget import TUNED

    written: Any = read_yaml(file.read_text(encoding="utf-8-sig")).data
    media = [
        {
            "type": tier.type,
            "limit": _most(tier, asked) or size_of(tier),
            "settings": {k: v for k, v in keys.items() if k not in ("type", *TUNED)},
        }
        for tier, keys in zip(present.tiers, written["tiers"], strict=True)
    ]
    if asked is None:
        return {"media": media}
    running, status = asked.running, asked.status
    machine: dict[str, Any] = {"tiers": dict(_profiles(running, status))}
    size = trace.header.kv_bytes_per_token or running.kv_bytes_per_token
    if size is not None:
        machine |= {"kv_bytes_per_token": size, "engine_cache": running.cache_tokens * size}
    if status.prefill_tokens_per_second:
        machine["prefill_rate"] = status.prefill_tokens_per_second
    return {"media": media, "machine": machine}


def _profiles(running: RunningChain, status: EngineStatus) -> Iterator[tuple[str, dict[str, Any]]]:
    """By type. Who was never seen to load, or to store, is taken to be as fast as at the other."""
    for tier in status.tiers:
        load = tier.measured_load_bytes_per_second
        store = running.store_bytes_per_second.get(tier.name)
        if load or store:
            link = {"load_bandwidth": load or store, "store_bandwidth": store or load}
            yield tier.type, {**link, "load_latency": tier.load_latency_seconds or 0.0}


def _budget(file: Path | None, known: Mapping[str, Any], asked: Asked | None) -> Budget:
    """The budget, with limits within what this host has, and the chain's own media: what is near it
    has them, too."""
    from tiers.tuning.search.budget import Budget, BudgetMedium, load_budget

    if file is not None:
        given = load_budget(file, known)
        types = {medium.type for medium in given.media}
        own = (one for one in known["media"] if one["type"] not in types)
        media = [
            one.model_copy(update={"limit": min(one.limit, _most(one.tier(), asked) or one.limit)})
            for one in (*given.media, *map(BudgetMedium.model_validate, own))
        ]
        return given.model_copy(update={"media": tuple(media)})
    if asked is None:
        raise refused("without an engine write --budget FILE, with its machine")
    machine = known["machine"]
    tiers = [tier for tier in asked.status.tiers if tier.type not in machine["tiers"]]
    missing = [f"loads from {tier.name}" for tier in tiers]
    missing += [] if "prefill_rate" in machine else ["computing"]
    if missing or "kv_bytes_per_token" not in machine:
        raise refused(
            f"can't tell: the engine has not measured {' and '.join(missing) or 'its blocks'}: "
            "wait until it has, or write the machine into --budget, as `kvtiers bench` "
            "measures it",
            status=1,
        )
    return Budget.model_validate(known)


def _most(tier: OffloadingSpec, asked: Asked | None) -> int | None:
    """Bytes that a tier may have on this host, if all its engines grow alike; None: it lies
    elsewhere, or no engine was asked."""
    from spec.offloading import HostSpec, StoreSpec

    place = tier.notes_folder if isinstance(tier, StoreSpec) else None
    if asked is None or (place is None and not isinstance(tier, HostSpec)):
        return None
    spare = asked.running.spare_memory_bytes
    if place is not None:
        found = os.statvfs(next(path for path in (place, *place.parents) if path.is_dir()))
        spare = found.f_bavail * found.f_frsize * 15 // 16
    same = next((now for now in asked.status.tiers if now.type == tier.type), None)
    used, capacity = (same.used_bytes, same.capacity_bytes) if same is not None else (0, 0)
    return max(1, int(capacity), int(used) + spare // asked.engines)


# -- the result ----------------------------------------------------------------------------------


def _print(
    found: Tuned,
    advice: Advice,
    present: ChainSpec,
    file: Path,
    measured: Sequence[str],
    output: Path | None,
    json_file: Path | None,
) -> None:
    from spec.chain_diff import diff
    from spec.load import parse_chain
    from tiers.tuning.search.chain_edit import edited
    from tiers.tuning.search.tune_report import as_json, comparison

    best = found.judged["chosen"]
    first = int(found.requests * found.split.searched) + 1
    lines = [
        _rates(found.budget),
        f"Simulated on requests {first:,} to {found.requests:,}, which no choice saw:",
        comparison(found, ("present", "chosen")),
        *measured,
        *(f"Beware: {text}." for text in best.report.warnings),
        *([] if found.growth is None else [f"The traffic has not settled: {found.growth}."]),
        f"{advice.verdict.capitalize()}: {advice.why}.",
    ]
    if advice.verdict == "change" and not best.chain.tiers:
        lines.append("No tier pays: run the engine without kvtiers.")
    typer.echo("\n".join(lines))
    content = {**advice.as_json(), "tuned": as_json(found, "recording")}
    try:
        if advice.verdict == "change" and best.chain.tiers:
            text = edited(file.read_text(encoding="utf-8-sig"), present, best.chain, found.budget)
            changes = diff(present, parse_chain(text))
            content["diff"] = changes.as_json()  # the text has the salts of the chain's tenants
            typer.echo("\n".join(f"  {line}" for line in changes.lines()))
            if output is not None:
                write_whole(output, text, like=file)
                typer.echo(f"The chain is in {output}: kvtiers apply {output} --dry-run")
    finally:  # what was found in minutes is told, too, where the file can't be edited
        write_result(json_file, content)


def _rates(budget: Budget) -> str:
    from spec.text import bytes_text, format_number

    machine = budget.machine
    tiers = ", ".join(
        f"{kind} loads {bytes_text(tier.load_bandwidth)}/s after "
        f"{format_number(1000 * tier.load_latency)} ms"
        for kind, tier in machine.tiers.items()
    )
    return f"Rates: {machine.prefill_rate:,.0f} prompt tokens/s are computed; {tiers}."


def _measured(report: Report, tiers: Sequence[TierStatus]) -> Iterator[str]:
    """How far a simulation of the present chain agrees with what the engine counted."""
    simulated = {use.name: use.hit_tokens / max(1, report.prompt_tokens) for use in report.tiers}
    if never := [tier.name for tier in tiers if not tier.measured_load_bytes_per_second]:
        taken = "taken to load as fast as it stores, unless the budget says"
        yield f"Nothing was loaded from {' and '.join(never)}: {taken}."
    shares = {
        tier.name: (tier.token_share, simulated[tier.name])
        for tier in tiers
        if tier.token_share is not None and tier.name in simulated
    }
    if shares:
        texts = (f"{name} {ours:.0%} and {theirs:.0%}" for name, (theirs, ours) in shares.items())
        yield f"Tokens from tiers, simulated and counted by the engine: {', '.join(texts)}."
    if any(abs(ours - theirs) > AGREES for theirs, ours in shares.values()):
        yield "Beware: these differ: the recording is of other traffic, or the rates are wrong."
