"""`kvtiers status`: how the tiers of running engines do."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from spec.errors import one_line
from spec.text import aligned, bytes_text, format_number, span
from tiers.cli.arguments import ControlFolder, EngineName, ask_engines, other_version, say

if TYPE_CHECKING:
    from tiers.control.engine_status import EngineStatus, GhostStatus, Percentiles, TierStatus

HEADS = ("tier", "state", "fill", "share", "load/s", "store/s", "lookup ms", "load ms", "queue")


def status(
    engine: EngineName = None,
    folder: ControlFolder = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object an engine.")] = False,
) -> None:
    """Show how the tiers of running engines do.

    For each tier: its state and last error, how full it is, the share of the prompts' tokens that
    it loaded, bytes a second loaded (of those it could, as measured) and stored, p50 and p99 of
    lookups and loads, and how many loads and stores are in flight. Rates and shares are those of
    the last minute. Status 1: a tier is not open.

    \b
    kvtiers status
    kvtiers status --from engine-4711 --json
    """
    from pydantic import ValidationError

    from tiers.control.engine_status import EngineStatus

    all_open = True
    for name, content in ask_engines("status", {}, engine, folder):
        try:
            found = EngineStatus.model_validate(content)
        except ValidationError:
            if not (as_json and isinstance(content, dict)):
                typer.echo(other_version(name), err=True)
                all_open = False
                continue
        tiers = content.get("tiers")
        has_states = isinstance(tiers, list) and all(isinstance(tier, dict) for tier in tiers)
        all_open &= has_states and all(tier.get("state") == "open" for tier in tiers)
        for line in [json.dumps({"engine": name, **content})] if as_json else lines(name, found):
            say(line, folds=not as_json)
    if not all_open:
        raise typer.Exit(1)


def lines(name: str, status: EngineStatus) -> Iterator[str]:
    """The lines of one engine; its table is within 80 columns for names of up to 6 letters."""
    yield f"engine {one_line(name)}: {summary(status)}"
    yield from aligned([HEADS, *map(row, status.tiers)], gap=1)
    for tier in status.tiers:
        yield from (f"  {one_line(tier.name)}: {note}" for note in notes(tier))
    yield from (f"  {line}" for line in ghost_lines(status.ghosts))


def summary(status: EngineStatus) -> str:
    """What holds for the whole engine."""
    rate = status.prefill_tokens_per_second
    ago = status.measured_seconds_ago
    parts = [
        f"up {span(status.up_seconds)}",
        f"load policy {one_line(status.load_policy)}",
        f"chain version {status.chain_version}",
        f"{status.prompt_tokens:,.0f} prompt tokens, {status.prompt_tokens_late:,.0f} of late",
        "computing is not yet measured" if rate is None else f"computes {rate:,.0f} tokens/s",
    ]
    if ago is None or ago > 10:
        parts.append("no step yet" if ago is None else f"its last step was {span(ago)} ago")
    return ", ".join(parts)


def row(tier: TierStatus) -> tuple[str, ...]:
    """The cells of one tier, in the order of `HEADS`."""
    most = tier.measured_load_bytes_per_second
    load = bytes_text(tier.loaded_bytes_per_second)
    return (
        one_line(tier.name),
        "paused" if tier.paused and tier.state == "open" else one_line(tier.state),
        _fill(tier),
        "-" if tier.token_share_late is None else f"{tier.token_share_late:.1%}",
        load if most is None else f"{load}/{bytes_text(most)}",
        bytes_text(tier.stored_bytes_per_second),
        _milliseconds(tier.lookup_seconds),
        _milliseconds(tier.load_seconds),
        f"{tier.loading_jobs:.0f}+{tier.storing_jobs:.0f}",
    )


def notes(tier: TierStatus) -> Iterator[str]:
    """What else an operator should know of a tier."""
    if tier.paused:
        yield f"paused: {tier.paused}"
    if tier.why:
        yield one_line(tier.why)
    elif tier.state != "open":
        yield f"it is {one_line(tier.state)}"
    parts: Mapping[str, float] = {
        **{f"dropped ({one_line(reason)})": count for reason, count in tier.dropped_blocks.items()},
        "evicted": tier.sums.get("evictions", 0.0),
        "failed to load": tier.sums.get("load_failures", 0.0),
        "damaged": tier.sums.get("damaged_blocks", 0.0),
        "failed to store": tier.sums.get("store_failures", 0.0),
    }
    if counted := [f"{count:,.0f} {what}" for what, count in parts.items() if count]:
        yield "blocks: " + ", ".join(counted)


def ghost_lines(ghosts: Sequence[GhostStatus]) -> Iterator[str]:
    """What tiers would have with other settings, against the tier as it is."""
    present = {ghost.tier: ghost for ghost in ghosts}
    for ghost in ghosts:
        line = f"ghost {one_line(ghost.tier)}: {ghost.hit_ratio:.1%} of blocks +- {ghost.error:.1%}"
        now = present.get(ghost.tier.partition(" (")[0])
        if now is not None and now is not ghost:
            more = ghost.hit_ratio - now.hit_ratio
            is_sure = abs(more) > ghost.error + now.error
            line += f", {100 * more:+.1f} points" if is_sure else ", as good as now"
        if ghost.prompt_seconds is not None:
            line += f", {format_number(1000 * ghost.prompt_seconds)} ms for 1,000 tokens"
        yield line


def _fill(tier: TierStatus) -> str:
    used = bytes_text(tier.used_bytes)
    if not tier.capacity_bytes:
        return used if tier.used_bytes else "-"  # not counted: it is not empty
    part = tier.used_bytes / tier.capacity_bytes
    return f"{part:.0%} of {bytes_text(tier.capacity_bytes)}"


def _milliseconds(found: Percentiles | None) -> str:
    each = () if found is None else (found.p50, found.p99)
    return "/".join(format_number(1000 * seconds, digits=2) for seconds in each) or "-"
