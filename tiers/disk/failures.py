"""What LMDB and the operating system raise, translated once."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb

from tiers.disk.slab import NO_SPACE
from tiers.errors import TierFull, TierUnavailable

UNREADABLE = frozenset({errno.EIO, errno.ENODATA, errno.EILSEQ, errno.EUCLEAN})
"""The error numbers of a read from a place that the device has lost, until it is written again."""

_FULL = (lmdb.MapFullError, lmdb.DiskError)
_DAMAGE = (
    lmdb.CorruptedError,
    lmdb.InvalidError,
    lmdb.PageNotFoundError,
)


class Damaged(TierUnavailable):
    """The folder's content can't be right; nothing but a wipe repairs it."""


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """Raise vendor errors of the body as TierFull, TierUnavailable or Damaged of this path."""
    try:
        yield
    except _FULL as error:
        raise TierFull(f"{path}: no space for the index: {error}") from error
    except _DAMAGE as error:
        raise Damaged(f"{path}: the index is damaged: {error}") from error
    except lmdb.Error as error:
        raise TierUnavailable(f"{path}: {error}") from error
    except OSError as error:
        kind = TierFull if error.errno in NO_SPACE else TierUnavailable
        raise kind(f"{path}: {error.strerror or error}") from error
