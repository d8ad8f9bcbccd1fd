"""`kvtiers try`: does a chain work here?"""

from __future__ import annotations

from pathlib import Path

import typer

from spec.text import aligned
from tiers.cli.arguments import ChainFile


def try_(chain_file: ChainFile) -> None:
    """See a chain work in a minute, without a model: in two processes, one after the other.

    Its tiers are tried in empty places, a Redis on a server of its own; those that engines use
    are neither changed nor asked. Ends with status 1 if an answer was wrong, or if nothing that
    stores had stored was loaded by the second process.

    \b
    kvtiers try chain.yaml
    """
    import logging
    from tempfile import TemporaryDirectory

    from spec.load import load_chain
    from spec.offloading import StoreSpec
    from spec.plugins import stdout_to_stderr
    from tiers.lab.try_chain import try_chain

    chain = load_chain(chain_file)
    logging.basicConfig(level=logging.WARNING)
    with TemporaryDirectory(prefix="kvtiers-try-") as folder, stdout_to_stderr():
        first, second = try_chain(chain, Path(folder))
    rows = [("tier", "stored blocks", "tokens loaded again", "by another process")]
    for name, stored in first.stored.items():
        rows.append((name, str(stored), str(first.loaded[name]), str(second.loaded[name])))
    typer.echo("\n".join(aligned(rows)))
    for name in (name for name, stored in first.stored.items() if not stored):
        typer.echo(f"{name} stored nothing: the log above says why, or its settings do")
    # One may serve all that others have, too.
    shared = [tier for tier in chain.tiers if isinstance(tier, StoreSpec) and tier.may_load]
    kept = [tier.tier_name for tier in shared if first.stored[tier.tier_name]]
    in_vain = bool(kept) and not any(second.loaded[name] for name in kept)
    if in_vain:
        line = (
            "another process loaded nothing of what was stored in %s: kvtiers check tries a store"
        )
        typer.echo(line % ", ".join(kept))
    typer.echo(f"each tier was tried in an empty place: kvtiers doctor {chain_file} asks yours")
    wrong = first.wrong + second.wrong
    typer.echo(f"{wrong} of {first.prompts + second.prompts} answers were wrong")
    if wrong or in_vain:
        raise typer.Exit(1)
