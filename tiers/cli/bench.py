"""`kvtiers bench`: measure kvtiers, the hardware's limit and other projects in one run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def bench(
    suites: Annotated[list[str], typer.Argument(help="Suites to run, or all.")],
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the rows to this file.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Write a picture of the curves to this PNG file.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Measure disks here; by default a temporary folder.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Measured rounds of each case.")] = 5,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Check only that every suite runs.")
    ] = False,
) -> None:
    """Measure tiers and what the hardware can do (from a checkout; bench/ is not installed)."""
    import sys
    from importlib.util import find_spec
    from tempfile import TemporaryDirectory

    checkout = Path(__file__).parents[2]
    if not (checkout / "bench" / "main.py").exists():
        raise _refused(f"there is no bench/ beside {checkout / 'tiers'}: run from a checkout")
    # bench/ is no part of the wheel, so the installed command finds it by its checkout's path.
    sys.path.insert(0, str(checkout))
    from bench import main

    wanted = list(main.SUITES) if suites == ["all"] else list(dict.fromkeys(suites))
    unknown = [name for name in wanted if name not in main.SUITES]
    if unknown:
        raise _refused(f"no suite {', '.join(unknown)}; there are all, {', '.join(main.SUITES)}")
    if plot is not None and find_spec("matplotlib") is None:
        raise _refused("--plot needs matplotlib: pip install 'kvtiers[bench]'")
    with TemporaryDirectory(prefix="kvtiers-bench-", dir=folder) as made:
        scale = main.Scale(smoke, Path(made), rounds)
        rows = main.run(wanted, scale, lambda line: typer.echo(line, err=True), json_file)
    main.show(rows, plot)


def _refused(why: str) -> typer.Exit:
    """Print why the arguments are refused, and return the exit with status 2."""
    typer.echo(why, err=True)
    return typer.Exit(2)
