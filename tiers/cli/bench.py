"""`kvtiers bench tiers`: measure a chain's tiers, for replays and tuning."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

import typer

from tiers.cli.arguments import CHAIN, bar, check_places, refused

MACHINE = ("kv_bytes_per_token", "engine_cache", "prefill_rate")
"""Facts that every profile has."""


def bench(
    what: Annotated[str, typer.Argument(metavar="tiers", show_default=False)],
    chain_file: Annotated[Path, CHAIN],
    save: Annotated[Path, typer.Option(help="Write the profile here.")],
    live: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TIER",
            help="Measure this tier where engines keep their blocks, as a Redis can only be: "
            "hundreds of MiB are stored there and dropped, for which a full store evicts as much.",
        ),
    ] = None,
    block_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a block.")] = 16,
    kv_bytes_per_token: Annotated[
        int | None, typer.Option(min=1, help="For a new profile, as are the next two.")
    ] = None,
    engine_cache: Annotated[
        str | None, typer.Option(help="KV that the engine keeps, like 40GB.")
    ] = None,
    prefill_rate: Annotated[
        float | None, typer.Option(help="Prompt tokens that a GPU computes per second.")
    ] = None,
) -> None:
    """Measure the tiers of a chain once, for replays and tuning. An existing profile keeps all
    else.

    \b
    kvtiers bench tiers --chain chain.yaml --save machine.json
    """
    from spec.errors import SpecError, one_of
    from spec.fields import format_number
    from spec.load import load_chain, problem_line
    from tiers.tuning.files import write_json
    from tiers.tuning.machine import Machine, load_machine

    if what != "tiers":
        raise refused(f"{what}: write tiers; a checkout measures all else by python -m bench")
    check_places(save, keep=[chain_file])
    chain = load_chain(chain_file)
    names = [tier.tier_name for tier in chain.tiers]
    if unknown := [name for name in live or () if name not in names]:
        raise refused(f"--live {unknown[0]}: no such tier; use {one_of(names)}")
    facts = dict(zip(MACHINE, (kv_bytes_per_token, engine_cache, prefill_rate), strict=True))
    given: dict[str, Any] = {key: value for key, value in facts.items() if value is not None}
    _check_facts(given)
    if save.exists():
        machine = load_machine(save)
    elif missing := [key for key in MACHINE if key not in given]:
        options = ", ".join(f"--{key.replace('_', '-')}" for key in missing)
        raise SpecError([problem_line(str(save), None, (), "no such file", f"add {options}")])
    else:
        machine = Machine.model_validate(given)
    profiles = _measure(chain, machine.kv_bytes_per_token * block_tokens, live or ())
    kept = {name: profile for name, profile in machine.tiers.items() if name not in profiles}
    for name, profile in profiles.items():
        before = machine.tiers.get(name)
        known = before.model_dump() if before is not None else {}
        measured = profile.model_dump(exclude_unset=True)
        kept[name] = profile.model_validate({**known, **measured})
        typer.echo(
            f"{name}: loads {profile.load_bandwidth / 1e9:.3g} GB/s after "
            f"{format_number(profile.load_latency * 1e3)} ms, stores "
            f"{profile.store_bandwidth / 1e9:.3g} GB/s after "
            f"{format_number(profile.store_latency * 1e3)} ms"
        )
    whole = Machine.model_validate({**machine.model_dump(), **given, "tiers": kept})
    write_json(save, whole.model_dump(mode="json", exclude_none=True))


def _check_facts(given: dict[str, Any]) -> None:
    """Refuse facts that no machine has, each by its option."""
    from pydantic import ValidationError

    from spec.document import Document
    from spec.load import explain
    from tiers.tuning.machine import Machine

    try:
        Machine.model_validate({**dict.fromkeys(MACHINE, 1), **given})
    except ValidationError as error:
        document = Document(given, model=Machine)
        raise refused("\n".join(explain(error, document, "options"))) from None


def _measure(chain: Any, block_bytes: int, live: Collection[str]) -> Any:
    from spec.plugins import stdout_to_stderr
    from tiers.tuning.profiling import profile_tiers

    with stdout_to_stderr(), bar("", len(chain.tiers), -1) as update:  # stores may print
        return profile_tiers(
            chain,
            block_bytes,
            live=live,
            progress=lambda tier: update(advance=1, description=tier),
        )
