"""A bucket of an object store: S3, GCS, Azure, and a folder of files, by obstore."""

from __future__ import annotations

import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import cache, partial
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    GenericError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from obstore.store import AzureStore, GCSStore, LocalStore, MemoryStore, S3Store

from spec.secret import Secret
from tiers.block import Buffer, after, copy
from tiers.concurrency.executors import IoExecutor
from tiers.errors import TierFull, TierNotOpen, TierRefused, TierUnavailable, TierUnusable
from tiers.remote.packs.bucket import Listed, is_mark
from tiers.remote.packs.pack import key_of
from tiers.store import time_left

_STORES: Mapping[str, Callable[..., Any]] = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}


def open_client(
    url: str,
    config: Mapping[str, str],
    secrets: Mapping[str, Secret],
    connect_seconds: float,
    transfer_seconds: float,
) -> Any:
    """Make obstore's store. Reads credentials, connects to nothing. Raises TierUnusable.

    `config`, `secrets`: by obstore's names. `transfer_seconds`: of a request that moves a pack.
    """
    parts = urlsplit(url)
    try:
        if parts.scheme == "file":
            return LocalStore(parts.path, automatic_cleanup=True, mkdir=True)
        revealed = {name: secret.reveal() for name, secret in secrets.items()}
        return _STORES[parts.scheme](
            parts.netloc,
            config={**config, **revealed},
            client_options={
                "timeout": timedelta(seconds=transfer_seconds),
                "connect_timeout": timedelta(seconds=connect_seconds),
                "allow_http": config.get("endpoint", "").startswith("http://"),
            },
            retry_config={"max_retries": 0},  # whoever calls it has a budget
        )
    except (BaseError, ValueError, OSError) as error:
        # Not chained, and without a text that may quote a secret.
        shown = type(error).__name__ if secrets else str(error).partition("\n")[0]
        raise TierUnusable(f"{url}: the client can't be made: {shown}") from None


T = TypeVar("T")

LOADED_IN = os.getpid()
"""The process that loaded obstore, whose threads a forked child has not: it would hang."""

RETRIES = 2
"""A request that was refused for the moment, or lost its connection, is sent so often again."""
FIRST_PAUSE = 0.05
"""Seconds before the first of them, about; twice as many before the next."""
RENEW_SECONDS = 1.0
"""Seconds between two looks for other credentials, at least."""
PIECE_BYTES = 256 << 10
"""Bytes of an object that are taken at once, before it is asked whether they are waited for."""
LISTED_AT_ONCE = 1000
_STATUS = re.compile(r"status(?: code)?:? (\d{3}[ A-Za-z]*)")
_CODE = re.compile(r"<Code>(\w{1,64})</Code>|\(code: (\w{1,64})\)")
_REFUSED = re.compile(r"status(?: code)?:? 40[13]\b|\(code: AccessDenied\)")
"""How a listing, and one delete of many, is refused."""
_FULL = re.compile(r"status(?: code)?:? 507\b|<Code>(?:XMinioStorageFull|QuotaExceeded)</Code>")

_BEGINNING = threading.Lock()
_DESCRIPTORS = 16
"""More than obstore's threads begin with."""


@cache
def _begin() -> None:
    """Have obstore begin its threads, once they can be had: it tries once in a process, and where
    that fails every call panics, for ever. Raises TierNotOpen."""
    with ExitStack() as tried:
        try:
            tried.callback(IoExecutor(os.cpu_count() or 1, "trial").shutdown)
            for _ in range(_DESCRIPTORS):
                tried.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        except (OSError, RuntimeError) as error:
            raise TierNotOpen(f"obstore lacks threads or descriptors: {error}") from error
    list(obstore.list(MemoryStore()))


class RetryBudget:
    """How many requests may be sent again: one for each ten that are answered, and a few at first.
    So a server that refuses all is not asked three times as much. Thread-safe."""

    MOST = 16.0
    A_REQUEST = 0.1

    def __init__(self) -> None:
        self._left = self.MOST
        # Without it two threads could spend the same one.
        self._lock = threading.Lock()

    def earn(self) -> None:
        with self._lock:
            self._left = min(self.MOST, self._left + self.A_REQUEST)

    def spend(self) -> bool:
        """Whether one more may be sent."""
        with self._lock:
            if self._left < 1:
                return False
            self._left -= 1
            return True


class ObstoreBucket:
    """A `Bucket` over a store of obstore's."""

    def __init__(self, make: Callable[[], Any], place: str, prefix: str, timeout: float) -> None:
        """`make` opens obstore's store, again where its credentials may have changed. `place`: its
        name for people. `timeout`: seconds after which nothing is sent again. Raises TierUnusable,
        and TierNotOpen.
        """
        if os.getpid() != LOADED_IN:
            raise TierUnusable(
                "this process was forked from one that uses object stores; start it by spawn"
            )
        with _BEGINNING:
            _begin()
        self._make, self._place, self._timeout = make, place, timeout
        self._prefix = prefix.strip("/") + "/" if prefix.strip("/") else ""
        self._budget = RetryBudget()
        self._renewing = threading.Lock()
        self._renew_at = 0.0
        self._store = make()

    def put(self, name: str, parts: Sequence[Buffer]) -> bool:
        """Where the answer to one that was kept is lost, the next try says that it is taken. A
        server without room is left alone for a while, as one that is down: it is sent a whole pack
        before it refuses it."""
        try:
            return self._put(name, parts, "create")
        except TierFull as error:
            raise TierUnavailable(str(error)) from None

    def replace(self, name: str, data: bytes) -> None:
        """Keep these bytes under a name, whatever was there. Raises TierFull, too."""
        self._put(name, [data], "overwrite")

    def _put(
        self, name: str, parts: Sequence[Buffer], mode: Literal["create", "overwrite"]
    ) -> bool:
        whole, path = list(parts), self._prefix + name
        try:
            self._call(lambda store: obstore.put(store, path, whole, mode=mode))
        except AlreadyExistsError:
            return False
        except FileNotFoundError:
            raise self._no_bucket() from None
        return True

    def read(self, name: str, start: int, into: Sequence[memoryview]) -> int | None:
        path, asked = self._prefix + name, {"range": (start, start + sum(map(len, into)))}

        def get(store: Any) -> int:
            try:
                found = obstore.get(store, path, options=asked)
            except GenericError as error:
                if "range" not in str(error).lower() or obstore.head(store, path)["size"] > start:
                    raise
                return 0  # a range behind its end
            # Of a file it is far faster at once.
            whole = isinstance(store, LocalStore)
            return _fill([found.bytes()] if whole else found.stream(PIECE_BYTES), into)

        try:
            return self._call(get)
        except FileNotFoundError:
            return None

    def delete(self, names: Sequence[str]) -> None:
        paths = [self._prefix + name for name in names]
        try:
            if paths:  # none is no request, which would count as answered
                self._call(partial(obstore.delete, paths=paths))
        except FileNotFoundError:  # where that is an error, it ends the others' deletes
            for path in paths:
                with suppress(FileNotFoundError):
                    self._call(partial(obstore.delete, paths=path))

    def list(self, refused: Callable[[TierRefused], None]) -> Iterator[Sequence[Listed]]:
        """Marks are left out: a read makes none of them younger here, and each has a few bytes."""
        try:
            for some in self._pages(""):
                yield [each for each in some if key_of(each.name) and not is_mark(each.name)]
        except TierRefused as error:
            refused(error)

    def names(self, folder: str) -> Sequence[str]:
        """The names of what lies in a folder, without that."""
        return [each.name.removeprefix(f"{folder}/") for p in self._pages(folder) for each in p]

    def _pages(self, folder: str) -> Iterator[Sequence[Listed]]:
        """What a folder has, a request for each piece. Where the server fails for the moment it
        goes on behind the last that came."""
        whole = (self._prefix + folder).rstrip("/") or None
        stream, last = None, None

        def page(store: Any) -> Sequence[Any]:
            nonlocal stream
            if stream is None:
                if last is not None and isinstance(store, LocalStore):
                    raise OSError("a folder can't be listed from its midst on")  # has no order
                stream = obstore.list(store, whole, offset=last, chunk_size=LISTED_AT_ONCE)
            try:
                found: Sequence[Any] = next(stream, ())
            except BaseError:
                stream = None  # it ends with its first error
                raise
            return found

        try:
            while found := self._call(page):
                last = found[-1]["path"]
                yield [
                    Listed(
                        each["path"].removeprefix(self._prefix),
                        each["size"],
                        each["last_modified"].timestamp(),
                    )
                    for each in found
                ]
        except FileNotFoundError:
            raise self._no_bucket() from None

    def _no_bucket(self) -> TierUnavailable:
        return TierUnavailable(f"{self._place}: the bucket is not there")

    def describe(self) -> str:
        return self._place

    def close(self) -> None:
        """obstore's store goes with its last user."""

    def _call(self, call: Callable[[Any], T]) -> T:
        """Call it with the store; again where that may help. Raises FileNotFoundError and
        AlreadyExistsError as obstore does, else TierUnavailable."""
        try:
            return self._tried(call)
        except (FileNotFoundError, AlreadyExistsError):
            raise
        except (BaseError, OSError, ValueError) as error:
            refused = TierRefused if _is_refused(error) else TierUnavailable
            kind = TierFull if _is_full(error) else refused
            raise kind(f"{self._place}: {reason(error)}") from None

    def _tried(self, call: Callable[[Any], T]) -> T:
        began, tries = time.monotonic(), 0
        while True:
            store = self._store
            try:
                result = call(store)
            except (GenericError, PermissionDeniedError, UnauthenticatedError) as error:
                if _is_refused(error):
                    if tries or not self._renewed(store):
                        raise
                else:
                    is_late = time.monotonic() > began + self._timeout or not time_left()
                    is_vain = is_late or _is_full(error)
                    if tries >= RETRIES or is_vain or not self._budget.spend():
                        raise
                    time.sleep(FIRST_PAUSE * 2**tries * random.uniform(0.5, 1.5))
            else:
                self._budget.earn()
                return result
            tries += 1

    def _renewed(self, store: Any) -> bool:
        """Make the store anew: files of secrets may hold others. Whether there is another now."""
        with self._renewing:
            if self._store is not store:
                return True
            if time.monotonic() < self._renew_at:
                return False
            self._renew_at = time.monotonic() + RENEW_SECONDS
            try:
                self._store = self._make()
            except TierUnusable:  # a file is being replaced
                return False
            return True


def _is_refused(error: Exception) -> bool:
    """Whether the credentials may not do it."""
    kinds = PermissionDeniedError, UnauthenticatedError, PermissionError
    return isinstance(error, kinds) or _REFUSED.search(str(error)) is not None


def _is_full(error: Exception) -> bool:
    """Whether the server has no room."""
    return _FULL.search(str(error)) is not None


def reason(error: Exception) -> str:
    """What an error says, in a few words: the server's status and code, where it answered."""
    text = str(error)
    kind, status, code = type(error).__name__, _STATUS.search(text), _CODE.search(text)
    if status or code:
        said = [str(found[found.lastindex or 0]).strip() for found in (status, code) if found]
        return f"{kind}: {', '.join(said)}"
    return f"{kind}: {text.partition(chr(10))[0][:200]}" if text else kind


def _fill(pieces: Iterable[Buffer], into: Sequence[memoryview]) -> int:
    """Fill these views, one after the other, with pieces as they come, as long as somebody waits
    for them; how many bytes there were."""
    done, left = 0, list(into)
    for piece in pieces:
        data = memoryview(piece)
        done += len(data)
        while data and left:
            part, data = data[: len(left[0])], data[len(left[0]) :]
            copy(left[0][: len(part)], part)
            left = after(left, len(part))
        if not time_left():
            break
    return done
