"""How a process comes into a folder: what it waits for, checks and repairs.

The folder's lock is held for moments: to see who is there, and to be there. What takes the longer
the larger the tier is happens before (the index against its seal) or after (what the dead left, a
smaller capacity), in steps that hold nobody up.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from tiers.disk import seal
from tiers.disk.access import Access
from tiers.disk.direct_io import choose_direct
from tiers.disk.failures import Damaged, translated
from tiers.disk.folder import Folder
from tiers.disk.index import Index
from tiers.disk.owner import Census, Owner, survey
from tiers.disk.rows import Slot
from tiers.disk.slab import Slabs
from tiers.disk.vault import Vault
from tiers.errors import TierError, TierNotOpen, TierUnusable

_TRIES = 5

logger = logging.getLogger(__name__)

LetGo = Callable[[Vault], None]


class _Entered(NamedTuple):
    """A vault that is yet to begin: who was there, and what the dead had reserved."""

    vault: Vault
    census: Census
    orphans: list[tuple[Slot, bytes]]


def open_vault(path: Path, capacity: int, access: Access, let_go: LetGo) -> Vault:
    """Open a folder that this process does not have open; see `Vault` for `let_go`.

    Raises TierUnusable, and TierNotOpen for what may pass: a lock that another process holds, a
    host or a container that has the folder, a disk that is full or not there.
    """
    folder = Folder(path)
    folder.prepare()
    try:
        with translated(path):
            for _ in range(_TRIES):
                vault = _open(folder, capacity, access, let_go)
                if vault is not None:
                    return vault
            raise TierNotOpen(f"{path}: other processes came and went all the time")
    except (TierUnusable, TierNotOpen):
        raise
    except TierError as error:
        raise TierNotOpen(f"the disk tier can't be opened: {error}") from error


def _open(folder: Folder, capacity: int, access: Access, let_go: LetGo) -> Vault | None:
    """None: what was seen without the lock was not so any more, or was damaged; try again."""
    with seal.compared(folder.index, folder.seal) as compared, folder.locked():
        entered = _come_in(folder, capacity, access, compared, let_go)
    if entered is None:
        return None
    vault, census, orphans = entered
    try:
        folder.remove_gone()
        with vault.translated():
            vault.begin(census, orphans, capacity)
    except Damaged as error:
        vault.abandon()
        if census.alive:
            raise
        logger.warning("disk tier %s: %s", folder.path, error)
        return None  # condemned now, so that the next try wipes it
    except BaseException:
        vault.abandon()
        raise
    return vault


def _come_in(
    folder: Folder, capacity: int, access: Access, compared: seal.Compared, let_go: LetGo
) -> _Entered | None:
    """Be an owner of the folder, in order to repair and use it. Only under the folder's lock."""
    census = survey(folder.owners, folder.one_host)
    if census.refusal is not None:
        raise TierNotOpen(census.refusal)
    if not census.alive:
        if seal.state(folder.index, folder.seal) != compared.state:
            return None
        if census.torn:
            folder.wipe("the machine went down while it was in use")
        elif compared.wrong is not None:
            folder.wipe(compared.wrong)
    direct = choose_direct(folder.path, folder.lock, access.io, capacity)
    try:
        return _enter(folder, census, access, direct, let_go)
    except Damaged as error:
        if census.alive:
            raise
        folder.wipe(str(error))
        return _enter(folder, census, access, direct, let_go)


def _enter(folder: Folder, census: Census, access: Access, direct: bool, let_go: LetGo) -> _Entered:
    with translated(folder.path), ExitStack() as undo:
        # Before any change, so that a machine that stops now finds who had begun to write.
        owner = Owner(folder.owners, access.synced)
        undo.callback(owner.leave, clean=True)
        index = Index(folder.index, access.synced, lasting=access.durability == "sync")
        undo.callback(index.close)
        slabs = Slabs(folder.path, direct)
        undo.callback(slabs.close)
        vault = Vault(folder, index, slabs, owner, access, let_go)
        if not census.alive:
            seal.remove(folder.seal)
        orphans = vault.take_stock(census)
        undo.pop_all()
        return _Entered(vault, census, orphans)
