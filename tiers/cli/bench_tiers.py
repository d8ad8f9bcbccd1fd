"""`kvtiers bench tiers`: measure a chain's tiers once, for replays and tuning."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import typer

from tiers.cli.arguments import check_places, refused

MACHINE = ("kv_bytes_per_token", "engine_cache", "prefill_rate")


def bench_tiers(
    chain_file: Path | None,
    save: Path | None,
    block_tokens: int,
    facts: dict[str, Any],
    live: Collection[str] = (),
) -> None:
    """Write the profile of each tier; a profile that is there already keeps all else."""
    from spec.errors import SpecError, one_of
    from spec.load import load_chain, problem_line
    from tiers.tuning.files import write_json
    from tiers.tuning.machine import Machine, load_machine

    if chain_file is None or save is None:
        raise refused("kvtiers bench tiers needs --chain FILE and --save PROFILE")
    check_places(save, keep=[chain_file])
    chain = load_chain(chain_file)
    names = [tier.tier_name for tier in chain.tiers]
    if unknown := [name for name in live if name not in names]:
        raise refused(f"--live {unknown[0]}: no such tier; use {one_of(names)}")
    given = {key: value for key, value in facts.items() if value is not None}
    _check_facts(given)
    if save.exists():
        machine = load_machine(save)
    elif missing := [key for key in MACHINE if key not in given]:
        options = ", ".join(f"--{key.replace('_', '-')}" for key in missing)
        raise SpecError([problem_line(str(save), None, (), "no such file", f"add {options}")])
    else:
        machine = Machine.model_validate(given)
    profiles = _measure(chain, machine.kv_bytes_per_token * block_tokens, live)
    kept = {name: profile for name, profile in machine.tiers.items() if name not in profiles}
    for name, profile in profiles.items():
        before = machine.tiers.get(name)
        said = before.model_dump() if before is not None else {}
        measured = profile.model_dump(exclude_unset=True)
        kept[name] = profile.model_validate({**said, **measured})
        typer.echo(
            f"{name}: loads {profile.load_bandwidth / 1e9:.3g} GB/s after "
            f"{profile.load_latency * 1e3:.3g} ms, stores {profile.store_bandwidth / 1e9:.3g} GB/s "
            f"after {profile.store_latency * 1e3:.3g} ms"
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
        document = Document(given)
        document.model = Machine
        raise refused("\n".join(explain(error, document, "options"))) from None


def _measure(chain: Any, block_bytes: int, live: Collection[str]) -> Any:
    from spec.registry import stdout_to_stderr
    from tiers.cli.progress import bars
    from tiers.errors import KVTiersError
    from tiers.tuning.profiling.profile import profile_tiers

    with stdout_to_stderr(), bars() as progress:  # stores may print
        bar = progress.add_task("", total=len(chain.tiers), completed=-1)
        try:
            return profile_tiers(
                chain,
                block_bytes,
                live=live,
                progress=lambda tier: progress.update(bar, advance=1, description=tier),
            )
        except KVTiersError as error:
            raise refused(error, status=1) from None
