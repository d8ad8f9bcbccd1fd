"""Where a tier's journals lie, with tokens and salts of what was announced, and their removal.

`connector/scheduler/inventory` writes them: each in a folder of one engine, which has the lock
there locked while it lives.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from glob import escape, glob
from itertools import product
from pathlib import Path

from spec.offloading import StoreSpec
from tiers.block import NAMESPACE_BYTES
from tiers.concurrency.file_locks import release, try_lock

SUFFIX = ".runs"
DRAFT = ".draft"


def journals(tier: StoreSpec, events: Path | None) -> list[str]:
    """What the paths of a tier's journals begin with; a namespace follows. New ones go to the first
    place. `events`: the operator's folder for them."""
    places = [] if events is None else [f"{events}/{tier.tier_name}."]
    return places if tier.notes_folder is None else [*places, f"{tier.notes_folder}/"]


def forget(tier: StoreSpec, events: Path | None, namespaces: Sequence[bytes]) -> None:
    """Remove what dead engines announced of a tier's blocks, in namespaces that begin as one of
    these. Raises OSError."""
    for place, space in product(journals(tier, events), namespaces):
        rest = "[0-9a-f]" * (2 * (NAMESPACE_BYTES - len(space)))
        for found in glob(escape(place) + space.hex() + rest):
            forget_dead(Path(found))


def forget_dead(namespace: Path) -> None:
    """Remove what dead engines left of a namespace. Raises OSError."""
    with suppress(FileNotFoundError):  # another process does the same
        for file in dead(namespace):
            file.unlink()
    with suppress(OSError):  # an engine lives that has stored nothing since
        namespace.rmdir()


def dead(namespace: Path, mine: Path | None = None) -> Iterator[Path]:
    """The files that dead engines left of a namespace, oldest first for each; remove each when it
    is done with. Files of engines that live are left alone, as is the folder `mine`."""
    for folder in sorted(namespace.iterdir()):
        if folder == mine or not folder.is_dir():
            continue
        if (held := lock(folder)) is None:
            # Empty where an engine was killed before it had a lock, or here, behind the last
            # file. One that is just starting makes another.
            with suppress(OSError):
                folder.rmdir()
            continue
        try:
            yield from segments(folder)
            for draft in folder.glob(f"*{DRAFT}"):
                draft.unlink()
            if not segments(folder):
                (folder / "lock").unlink()
                folder.rmdir()
        finally:
            release(held)


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{SUFFIX}"))


def lock(folder: Path, flags: int = 0) -> int | None:
    """Lock an engine's folder; None: its engine lives, or it is, or was, being taken over. `flags`:
    to open the lock with; without O_CREAT a folder that has none yet is left to its engine."""
    path = folder / "lock"
    try:
        file = os.open(path, flags | os.O_RDWR | os.O_NOFOLLOW, 0o600)
    except FileNotFoundError:
        return None
    is_locked = False
    try:
        # The one that had it may have removed it, folder and all, before it let go.
        with suppress(FileNotFoundError):
            is_locked = try_lock(file) and os.path.samestat(path.stat(), os.fstat(file))
    finally:
        if not is_locked:
            os.close(file)
    return file if is_locked else None
