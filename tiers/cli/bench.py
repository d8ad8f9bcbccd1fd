"""`kvtiers bench`: measure kvtiers, the hardware's limit and other projects in one run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tiers.cli.arguments import check_folder, check_places, refused

Suites = Annotated[
    list[str], typer.Argument(help="Suites to run, or all; or tiers, for a chain's profile.")
]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the rows to this file.")]
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
    int | None, typer.Option(min=1, help="disk: measure only its index, one of so many blocks.")
]
Spec = Annotated[Path | None, typer.Option(help="tiers: the chain's YAML.")]
Save = Annotated[Path | None, typer.Option(help="tiers: write the profile here.")]
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
    spec: Spec = None,
    save: Save = None,
    block_tokens: BlockTokens = 16,
    kv_bytes_per_token: KVBytes = None,
    engine_cache: EngineCache = None,
    prefill_rate: PrefillRate = None,
) -> None:
    """Measure tiers and what the hardware can do.

    `kvtiers bench tiers` measures the tiers of a chain once, for replays and tuning. All other
    suites run from a checkout; bench/ is not installed.
    """
    if suites == ["tiers"]:
        from tiers.cli.bench_tiers import bench_tiers

        facts = {
            "kv_bytes_per_token": kv_bytes_per_token,
            "engine_cache": engine_cache,
            "prefill_rate": prefill_rate,
        }
        bench_tiers(spec, save, block_tokens, facts)
        return
    _run(
        suites,
        json_file,
        plot,
        compare,
        folder,
        {"rounds": rounds, "smoke": smoke, "blocks": blocks},
    )


def _run(
    suites: list[str],
    json_file: Path | None,
    plot: Path | None,
    compare: Path | None,
    folder: Path | None,
    scale: dict[str, Any],
) -> None:
    import sys
    from importlib.util import find_spec
    from tempfile import TemporaryDirectory

    checkout = Path(__file__).parents[2]
    if not (checkout / "bench" / "main.py").exists():
        raise refused(f"there is no bench/ beside {checkout / 'tiers'}: run from a checkout")
    # bench/ is no part of the wheel, so the installed command finds it by its checkout's path.
    sys.path.insert(0, str(checkout))
    from bench import main, report

    wanted = list(main.SUITES) if suites == ["all"] else list(dict.fromkeys(suites))
    unknown = [name for name in wanted if name not in main.SUITES]
    if unknown:
        raise refused(f"no suite {', '.join(unknown)}; there are all, {', '.join(main.SUITES)}")
    if plot is not None and find_spec("matplotlib") is None:
        raise refused("--plot needs matplotlib: pip install 'kvtiers[bench]'")
    check_places(json_file, plot, keep=[compare])
    check_folder(folder)
    try:
        before = None if compare is None else report.read_json(compare)[1]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise refused(f"--compare {compare}: no result of kvtiers bench --json: {error}") from error
    with TemporaryDirectory(prefix="kvtiers-bench-", dir=folder) as made:
        whole = main.Scale(folder=Path(made), **scale)
        rows = main.run(wanted, whole, lambda line: typer.echo(line, err=True), json_file)
    main.show(rows, plot, before)
