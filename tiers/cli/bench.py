"""`kvtiers bench`: measure a chain's tiers, or kvtiers beside the hardware and other projects."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

import typer

from tiers.cli.arguments import (
    DASH,
    ChainOption,
    JsonFile,
    bars,
    check_folder,
    check_places,
    check_plot,
    refused,
    write_result,
)

MACHINE = ("kv_bytes_per_token", "engine_cache", "prefill_rate")
"""Facts that every profile has."""
CHECKOUT = Path(__file__).parents[2]
IS_CHECKOUT = (CHECKOUT / "bench" / "main.py").exists()
"""Whether bench/, which is not installed, is beside us; its suites are offered only then."""

Suites = Annotated[
    list[str],
    typer.Argument(
        metavar="SUITE",
        show_default=False,
        help="tiers, for a chain's profile"
        + ("; or all, or names of the suites in bench/." if IS_CHECKOUT else "."),
    ),
]
Plot = Annotated[Path | None, typer.Option(help="Write a picture of the curves to this PNG file.")]
Compare = Annotated[
    Path | None, typer.Option(help="Show the rows beside those of this file, of an earlier --json.")
]
Folder = Annotated[
    Path | None, typer.Option(help="Measure disks here; by default a temporary folder.")
]
Rounds = Annotated[int, typer.Option(min=1, help="Measured rounds of each case.")]
Smoke = Annotated[bool, typer.Option("--smoke", help="Check only that every suite runs.")]
Blocks = Annotated[
    int | None, typer.Option(min=1, help="disk: measure only its index, with this many blocks.")
]
Save = Annotated[Path | None, typer.Option(help="tiers: write the profile here.")]
Live = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TIER",
        help="tiers: measure this tier where engines keep their blocks, as a Redis can only be: "
        "hundreds of MiB are stored there and dropped, for which a full store evicts as much.",
    ),
]
BlockTokens = Annotated[int, typer.Option(min=1, help="tiers: tokens of a block.")]
KVBytes = Annotated[
    int | None, typer.Option(min=1, help="tiers: for a new profile, as are the next two.")
]
EngineCache = Annotated[
    str | None, typer.Option(help="tiers: KV that the engine keeps, like 40GB.")
]
PrefillRate = Annotated[
    float | None, typer.Option(help="tiers: prompt tokens that a GPU computes per second.")
]


def bench(
    suites: Suites,
    json_file: JsonFile = None,
    plot: Plot = None,
    compare: Compare = None,
    folder: Folder = None,
    rounds: Rounds = 5,
    smoke: Smoke = False,
    blocks: Blocks = None,
    chain_file: ChainOption = None,
    save: Save = None,
    live: Live = None,
    block_tokens: BlockTokens = 16,
    kv_bytes_per_token: KVBytes = None,
    engine_cache: EngineCache = None,
    prefill_rate: PrefillRate = None,
) -> None:
    """Measure tiers and what the hardware can do.

    `kvtiers bench tiers` measures the tiers of a chain once, for replays and tuning. All other
    suites run from a checkout, whose bench/ is not installed.

    \b
    kvtiers bench tiers --chain chain.yaml --save machine.json
    """
    if suites == ["tiers"]:
        facts = {
            "kv_bytes_per_token": kv_bytes_per_token,
            "engine_cache": engine_cache,
            "prefill_rate": prefill_rate,
        }
        _bench_tiers(chain_file, save, block_tokens, facts, live or ())
        return
    import sys
    from tempfile import TemporaryDirectory

    if not IS_CHECKOUT:
        raise refused(
            f"no suite {', '.join(suites)}: an installation has tiers alone, like kvtiers bench "
            "tiers --chain FILE --save PROFILE; a checkout has the others"
        )
    # bench/ is no part of the wheel, so the installed command finds it by its checkout's path.
    sys.path.insert(0, str(CHECKOUT))
    from bench import main, report

    wanted = list(main.SUITES) if suites == ["all"] else list(dict.fromkeys(suites))
    unknown = [name for name in wanted if name not in main.SUITES]
    if unknown:
        raise refused(f"no suite {', '.join(unknown)}; there are all, {', '.join(main.SUITES)}")
    check_plot(plot)
    check_places(plot, json_file=json_file, keep=[compare])
    check_folder(folder)
    try:
        before = None if compare is None else report.read_json(compare)[1]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise refused(f"--compare {compare}: no result of kvtiers bench --json: {error}") from error
    with TemporaryDirectory(prefix="kvtiers-bench-", dir=folder) as made:
        whole = main.Scale(smoke, Path(made), rounds, blocks)
        each_suite = None if json_file == DASH else json_file
        rows = main.run(wanted, whole, lambda line: typer.echo(line, err=True), each_suite)
    main.show(rows, plot, before)
    if json_file == DASH:
        write_result(json_file, report.as_json(rows))


def _bench_tiers(
    chain_file: Path | None,
    save: Path | None,
    block_tokens: int,
    facts: dict[str, Any],
    live: Collection[str],
) -> None:
    """Write the profile of each tier; an existing file keeps all else."""
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
        known = before.model_dump() if before is not None else {}
        measured = profile.model_dump(exclude_unset=True)
        kept[name] = profile.model_validate({**known, **measured})
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
    from spec.plugins import stdout_to_stderr
    from tiers.errors import KVTiersError
    from tiers.tuning.profiling import profile_tiers

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
