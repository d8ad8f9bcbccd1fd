"""A bucket of an object store: S3, GCS, Azure, and a folder of files, by obstore."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, GenericError

from tiers.block import Buffer
from tiers.errors import TierUnavailable, TierUnusable
from tiers.remote.packs.bucket import Listed

LOADED_IN = os.getpid()
"""The process that loaded obstore, whose threads a forked child has not: it would hang."""

_LISTED_AT_ONCE = 1000
_AUTHENTICATION = re.compile(r"\b(ExpiredToken|InvalidAccessKeyId|40[13])\b|expired", re.IGNORECASE)


class ObstoreBucket:
    """A `Bucket` over a store of obstore's, which retries what may be tried again."""

    def __init__(self, make: Callable[[], Any], place: str, prefix: str) -> None:
        """`make` opens obstore's store, again where its credentials may have changed. `place`: its
        name for people. Raises TierUnusable."""
        if os.getpid() != LOADED_IN:
            raise TierUnusable(
                "this process was forked from one that uses object stores; start it by spawn"
            )
        self._make, self._place = make, place
        self._prefix = prefix.strip("/") + "/" if prefix.strip("/") else ""
        self._store = make()

    def put(self, name: str, parts: Sequence[Buffer]) -> bool:
        with self._translated():
            try:
                obstore.put(self._store, self._prefix + name, list(parts), mode="create")
            except AlreadyExistsError:
                return False
        return True

    def read(self, name: str, start: int, into: Sequence[memoryview]) -> int | None:
        size = sum(map(len, into))
        path = self._prefix + name
        with self._translated():
            try:
                data = obstore.get_range(self._store, path, start=start, length=size)
            except FileNotFoundError:
                return None
            except GenericError:
                if not start or self._size(path) > start:
                    raise
                return 0  # a range behind its end
        return _fill(memoryview(data), into)

    def _size(self, path: str) -> int:
        try:
            return int(obstore.head(self._store, path)["size"])
        except FileNotFoundError:
            return 0

    def delete(self, names: Sequence[str]) -> None:
        with self._translated():
            for name in names:
                with suppress(FileNotFoundError):
                    obstore.delete(self._store, self._prefix + name)

    def list(self, prefix: str) -> Iterator[Sequence[Listed]]:
        with self._translated():
            found = obstore.list(
                self._store, self._prefix + prefix or None, chunk_size=_LISTED_AT_ONCE
            )
            for some in found:
                yield [
                    Listed(
                        each["path"].removeprefix(self._prefix),
                        each["size"],
                        each["last_modified"].timestamp(),
                    )
                    for each in some
                ]

    def describe(self) -> str:
        return self._place

    def close(self) -> None:
        """obstore's store goes with its last user."""

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (BaseError, OSError, ValueError) as error:
            raise TierUnavailable(f"{self._place}: {reason(error)}") from None


def reason(error: Exception) -> str:
    """The first line of an error's text, which may name a path, and no credential."""
    text = str(error).partition("\n")[0].strip()
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


def _fill(data: memoryview, into: Sequence[memoryview]) -> int:
    at = 0
    for view in into:
        part = data[at : at + len(view)]
        view[: len(part)] = part
        at += len(part)
        if len(part) < len(view):
            break
    return at
