"""`kvtiers bench`: measure a chain's tiers, for replays and tuning."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

import typer

from tiers.cli.arguments import CHAIN, bar, check_places, refused, write_result


def bench(
    chain_file: Annotated[Path, CHAIN],
    save: Annotated[
        Path, typer.Option(help="A machine's profile, whose tiers are written, and all as JSON.")
    ],
    live: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TIER",
            help="Measure this tier where engines keep their blocks; a Redis is measured in no "
            "other way. Hundreds of MiB are stored there and dropped; a full store evicts as much.",
        ),
    ] = None,
    block_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a block.")] = 16,
) -> None:
    """Measure the tiers of a chain once, for replays and tuning.

    \b
    kvtiers bench --chain chain.yaml --save machine.json
    """
    from spec.errors import one_of
    from spec.load import load_chain
    from spec.text import format_number
    from tiers.tuning.machine import EXAMPLE, load_machine

    check_places(save, keep=[chain_file])
    chain = load_chain(chain_file)
    types = {tier.tier_name: tier.type for tier in chain.tiers}
    if unknown := [name for name in live or () if name not in types]:
        raise refused(f"--live {unknown[0]}: no such tier; use {one_of([*types])}")
    if not save.exists():
        raise refused(f"{save}: found no such file; {EXAMPLE}")
    machine = load_machine(save)
    profiles: dict[str, Any] = {}
    try:
        _measure(chain, machine.kv_bytes_per_token * block_tokens, live or (), profiles)
    finally:  # what is measured stays where the next one fails
        kept = {name: profile for name, profile in machine.tiers.items() if name not in profiles}
        for name, profile in profiles.items():
            before = machine.tiers.get(name, machine.tiers.get(types[name]))
            known = before.model_dump() if before is not None else {}
            measured = profile.model_dump(exclude_unset=True)
            kept[name] = profile.model_validate({**known, **measured})
            typer.echo(
                f"{name}: loads {profile.load_bandwidth / 1e9:.3g} GB/s after "
                f"{format_number(profile.load_latency * 1e3)} ms, stores "
                f"{profile.store_bandwidth / 1e9:.3g} GB/s after "
                f"{format_number(profile.store_latency * 1e3)} ms"
            )
        whole = machine.model_copy(update={"tiers": kept})
        if profiles:
            write_result(save, whole.model_dump(mode="json", exclude_none=True))


def _measure(chain: Any, block_bytes: int, live: Collection[str], profiles: dict[str, Any]) -> None:
    from spec.plugins import stdout_to_stderr
    from tiers.tuning.profiling import profile_tiers

    with stdout_to_stderr(), bar("", len(chain.tiers), -1) as update:  # stores may print
        args = chain, block_bytes, live, lambda tier: update(advance=1, description=tier)
        profiles.update(profile_tiers(*args))
