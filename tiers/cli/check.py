"""`kvtiers check`: does a tier type keep the contract?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tiers.cli.arguments import refused

if TYPE_CHECKING:
    from spec.offloading import StoreSpec

MADE_UP = {"path": "", "capacity": "8MiB", "url": "redis://127.0.0.1"}
"""What required keys of these names are, if they are not given; an empty one is a folder's path."""


def check(
    tier_type: Annotated[str, typer.Argument(metavar="TYPE", help="The tier type.")],
    settings: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="A key of the tier, as in the YAML."),
    ] = None,
    limit: Annotated[float, typer.Option(min=1, help="Seconds that one test may take.")] = 60.0,
) -> None:
    """Run the conformance kit on a tier type, in an empty place.

    Ends with status 1 if a test failed.

    \b
    kvtiers check disk --settings capacity=64MiB
    """
    import os
    import sys
    from collections import Counter
    from contextlib import ExitStack
    from tempfile import TemporaryDirectory

    from tiers.lab.server import in_own_place
    from tiers.testing.check import check as run_kit

    fates: Counter[str] = Counter()
    is_endless = False
    with TemporaryDirectory(prefix="kvtiers-check-") as folder, ExitStack() as stack:
        spec = _make(tier_type, settings or [], Path(folder))

        def place(name: str) -> StoreSpec:
            return in_own_place(spec, Path(folder, name), stack)

        # The kit's blocks have keys of their own, and one server has room for those of all tests.
        served = place("served") if tier_type == "redis" else None
        for result in run_kit(lambda name: served or place(name), limit):
            fates[result.fate] += 1
            is_endless |= result.is_endless
            why = f": {result.why}" if result.why else ""
            typer.echo(f"{result.fate:7}  {result.test}{why}")
    typer.echo(", ".join(f"{count} {fate}" for fate, count in fates.items()))
    if is_endless:  # its thread would keep this process from its end
        sys.stdout.flush()
        os._exit(1)
    if fates["failed"]:
        raise typer.Exit(1)


def _make(tier_type: str, settings: list[str], folder: Path) -> StoreSpec:
    """The tier's spec, with made-up values for keys that must be there and are not."""
    import yaml

    from spec.errors import reason_of
    from spec.offloading import StoreSpec
    from spec.plugins import BrokenPlugin, UnknownPlugin
    from spec.registry import make_tier, tier_class

    given = dict(setting.partition("=")[::2] for setting in settings)
    try:
        fields = tier_class(tier_type).model_fields
        needed = {key for key, field in fields.items() if field.is_required()}
        written: dict[object, object] = {"type": tier_type}
        written |= {key: MADE_UP[key] or str(folder) for key in needed & MADE_UP.keys()}
        written |= {key: yaml.safe_load(value) for key, value in given.items()}
        spec = make_tier(tier_type, written)
    except (UnknownPlugin, BrokenPlugin, ValueError, yaml.YAMLError) as error:
        raise refused(f"{tier_type}: {reason_of(error)}") from None
    if not isinstance(spec, StoreSpec):
        raise refused(f"{tier_type}: it keeps blocks in host memory; the kit tries stores")
    return spec
