"""What is a LoRA adapter known by? The weights that a worker's engine has loaded."""

from __future__ import annotations

import hashlib
import json
import logging
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash

from tiers.concurrency.executors import IoExecutor
from tiers.concurrency.repeated_log import LoggedOnce
from tiers.contract.marks import (
    MARK_BYTES,
    AdapterReports,
    LoadedAdapter,
    LoadedAdapters,
    RequestMark,
    RequestMarks,
)
from tiers.engine.digesting import feed
from tiers.engine.identity.digests import SETTLED_SECONDS, Stamp, stamp_of
from tiers.engine.identity.weights import WEIGHTS, WITHOUT_EFFECT, links

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.02
"""How far apart two changes of a file are at least, for their times to differ, on a file system
whose times are finer than seconds."""
MOST_NAMES = 1 << 16
"""Adapters that are distinguished; KV of further ones is not cached."""
_UNCACHED = "is not cached until the engine is started again"
_CHANGED = (
    "was loaded again with other weights, and the engine's own prefix cache does not "
    "distinguish them (load changed weights under another name, from another path)"
)
NameOf = Callable[[Any], bytes]
"""What stands for an adapter in the engine's block hashes, of a request of the engine's to load."""
PATIENCE = 0.2
"""Seconds that a request waits at most for a look at its adapter's files."""
FRESH = 1.0
"""Seconds for which such a look is good."""
LOOKERS = 4
"""Threads that look, so that a folder that hangs does not keep others from being looked at."""


def folder_stamp(path: str) -> bytes:
    """Return 16 bytes that change with an adapter's files and with the links on the way to them;
    none if it is no local folder, or can't be read."""
    return _digest(_stamps(path))


def settled_stamp(path: str) -> bytes:
    """Return a stamp of an adapter's folder from which it differs after any later change; none if
    there can't be one. Waits for a tick of the file system's clock if the files are that new."""
    stamps = _stamps(path)
    newest = max((stamp.ctime_ns for _, stamp in stamps), default=0)
    tick = TICK_SECONDS if newest % 1_000_000_000 else SETTLED_SECONDS
    age = time.time() - newest / 1e9
    if 0 <= age < TICK_SECONDS == tick:
        time.sleep(tick - age)
        return _digest(stamps)
    return _digest(stamps) if age >= tick else b""


def _stamps(path: str) -> list[tuple[str, Stamp]]:
    """Return the stamps of an adapter's files, and of the links on the way to them, by name."""
    folder = Path(path).expanduser().absolute()
    try:
        files = sorted(p for p in folder.iterdir() if p.suffix in (*WEIGHTS, ".json"))
        decide = [p for p in files if p.name not in WITHOUT_EFFECT]
        # A link that leads to itself is found here, before links are followed.
        stamps = [(p.name, stamp_of(p.stat())) for p in decide]
        way = [*links(folder), *(link for p in decide if p.is_symlink() for link in links(p))]
        return stamps + [(str(p), stamp_of(p.lstat())) for p in way]
    except OSError:
        return []


def _digest(stamps: list[tuple[str, Stamp]]) -> bytes:
    return hashlib.blake2b(json.dumps(stamps).encode(), digest_size=16).digest() if stamps else b""


def name_of(adapter: Any, has_path: bool = True) -> bytes:
    """Return what stands for a LoRA adapter in the engine's block hashes. `has_path`: they contain
    its path."""
    text = f"{adapter.lora_name}\0{adapter.lora_path if has_path else ''}"
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


class SeenAdapters(LoadedAdapters):
    """Digests the weights of each adapter when the engine has loaded them.

    Block hashes contain an adapter's name, and its path perhaps. Once other weights came under one
    name, the engine's own prefix cache may hold KV of either, and nothing tells which. So nothing
    of requests with that name is stored from then on.

    Used by the worker's thread, which loads adapters and runs the steps.
    """

    def __init__(self, name_of: NameOf = name_of) -> None:
        self._name_of = name_of
        self._loaded: dict[bytes, LoadedAdapter] = {}
        self._new: set[bytes] = set()
        self._weights: weakref.WeakKeyDictionary[Any, LoadedAdapter] = weakref.WeakKeyDictionary()
        """Of all weights in the engine's memory, by what holds them."""
        self._log = LoggedOnce(logger)

    def before(self, adapter: Any) -> bytes:
        """Return the stamp of the files that the engine is about to read."""
        return settled_stamp(str(adapter.lora_path))

    def after(self, adapter: Any, weights: Any, stamp: bytes = b"") -> None:
        """Note which weights an engine uses for an `adapter` from now on. `stamp`: that of before
        it loaded them, if it did; nothing may have changed since."""
        name, number = self._name_of(adapter), adapter.lora_int_id
        found = self._weights.get(weights)
        if found is None:
            same = bool(stamp) and folder_stamp(str(adapter.lora_path)) == stamp
            found = LoadedAdapter(number, weights_digest(weights), stamp if same else b"")
            self._weights[weights] = found
            self._replace(name, found)
        before = self._loaded.get(name)
        if before is None and len(self._loaded) >= MOST_NAMES:
            self._log.warn(f"too many LoRA adapters are used: the KV of further ones {_UNCACHED}")
            return
        now = found._replace(number=number)
        if before is not None and before.content != found.content:
            now = now._replace(content=b"")
        if not now.content:
            why = _CHANGED if found.content else "is in a form that kvtiers does not know"
            self._log.warn(f"LoRA adapter {adapter.lora_name!r} {why}: its KV {_UNCACHED}")
        if now != before:
            self._loaded[name] = now
            self._new.add(name)

    def _replace(self, name: bytes, by: LoadedAdapter) -> None:
        """Trust no other name of a number whose weights are other ones now: requests that were
        asked for under it may run with these, and a step makes sure of one name of each number."""
        for other, one in self._loaded.items():
            if other != name and one.number == by.number and one.content not in (b"", by.content):
                self._loaded[other] = one._replace(content=b"")
                self._new.add(other)

    def report(self) -> dict[bytes, LoadedAdapter]:
        new, self._new = self._new, set()
        return {name: self._loaded[name] for name in new}

    def may_store(self, adapter: bytes) -> bool:
        loaded = self._loaded.get(adapter)
        return loaded is not None and bool(loaded.content)


def weights_digest(weights: Any) -> bytes:
    """Digest all tensors and values of an adapter's weights but its number; none if some are of a
    kind that does not show its content."""
    digest = xxhash.xxh3_128()
    try:
        values = {name: value for name, value in vars(weights).items() if name != "id"}
        tensors = [*feed(digest, _plain(values))]
    except (TypeError, ValueError, RuntimeError):
        return b""
    return digest.digest() if tensors else b""


def _plain(value: Any) -> Any:
    """Return a mapping's objects as mappings of what they have."""
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, torch.Tensor) or not hasattr(value, "__dict__"):
        return value
    return {"": type(value).__name__, **vars(value)}


class _AdapterLook(NamedTuple):
    """A look at an adapter's files, begun at this time."""

    began: float
    stamp: Future[bytes]


class MarksOfRequests(RequestMarks):
    """Makes the marks of an engine's requests. Used by the scheduler's thread.

    The mark of an adapter is of the weights that all workers have loaded, as they report. Its
    blocks are stored as long as those stay the same, which workers see. An engine may load an
    adapter anew for each request, from files that have changed. So blocks are loaded only if a
    thread of ours finds, after the request has come, that the files are still those that were read.
    """

    def __init__(
        self,
        ranks: int,
        name_of: NameOf = name_of,
        now: Callable[[], float] = time.monotonic,
        mistakes_salts: bool = False,
    ) -> None:
        """`ranks`: how many workers there are. `now`: seconds, never going back. `mistakes_salts`:
        a cache salt that is an adapter's name has the adapter's block hashes, in a first block."""
        self._ranks = ranks
        self._mistakes_salts = mistakes_salts
        self._is_salted = False
        self._name_of = name_of
        self._now = now
        self._reported: dict[bytes, dict[int, LoadedAdapter]] = {}
        self._marks: dict[str, tuple[Any, RequestMark]] = {}
        self._came: dict[str, float] = {}
        self._looks: dict[str, _AdapterLook] = {}
        self._lookers = IoExecutor(LOOKERS, "adapters")
        self._log = LoggedOnce(logger)

    def of(self, request: Any) -> RequestMark:
        known = self._marks.get(request.request_id)
        if known is None:
            adapter = getattr(request, "lora_request", None)
            is_mistaken = self._mistakes_salts and bool(getattr(request, "cache_salt", None))
            if is_mistaken and not self._is_salted:
                self._begin_salts()
            mark = RequestMark(_mask_steps(request, b""), shared=not is_mistaken)
            if adapter is not None:
                mark = RequestMark(shared=False, adapter=self._name_of(adapter), may_load=False)
                self._update(request, mark)
            known = self._marks[request.request_id] = request, mark
        return known[1]

    def ready(self, request: Any) -> bool:
        adapter = getattr(request, "lora_request", None)
        if adapter is None:
            return True
        mark = self.of(request)
        if not mark.shared:
            return True
        came = self._came.setdefault(request.request_id, self._now())
        look = self._look(str(adapter.lora_path), came)
        # Once: the answer may come meanwhile, to a look of before the request came too.
        is_done = look.stamp.done() and look.began >= came
        mark.may_load = is_done and self._is_as_read(request, mark, look.stamp.result())
        return is_done or self._is_late(adapter, look)

    def _begin_salts(self) -> None:
        self._is_salted = True
        self._log.warn(
            "a request with a cache_salt came: before 0.31 vLLM may take its first block for one "
            "of the LoRA adapter of that name. KV of such requests, and of those with an adapter, "
            "is not cached"
        )
        for _, mark in self._marks.values():
            mark.shared &= not mark.adapter

    def forget(self, request_id: str) -> None:
        self._marks.pop(request_id, None)
        self._came.pop(request_id, None)

    # -- what workers have loaded ------------------------------------------------------------

    def take_reports(self, reports: AdapterReports) -> None:
        new: set[bytes] = set()
        for rank, loaded in reports.items():
            for name, one in loaded.items():
                self._reported.setdefault(name, {})[rank] = one
                new.add(name)
        for request, mark in self._marks.values() if new else ():
            if mark.adapter in new:
                self._update(request, mark)

    def _of_ranks(self, request: Any, mark: RequestMark) -> list[LoadedAdapter]:
        """Return what workers have loaded for the request, of those that have reported it."""
        reported = self._reported.get(mark.adapter, {})
        number = request.lora_request.lora_int_id
        return [one for _, one in sorted(reported.items()) if one.number == number]

    def _update(self, request: Any, mark: RequestMark) -> None:
        """Give a request with an adapter its mark, or take it away for good: the keys that were
        made of it may stand for other weights now."""
        of_ranks = self._of_ranks(request, mark)
        is_known = len(of_ranks) == self._ranks and all(one.content for one in of_ranks)
        if self._is_salted or not is_known:
            mark.shared = False
        elif not self._stamp(of_ranks):
            mark.shared = False
            self._log.warn(
                f"nobody can tell whether LoRA adapter {request.lora_request.lora_name!r} would be "
                "the same if it were loaded again, so its KV is not cached: load it from a local "
                "folder, two seconds after that has changed"
            )
        elif not mark.steps:
            contents = [one.content for one in of_ranks]
            whole = hashlib.blake2b(b"".join(contents), digest_size=MARK_BYTES).digest()
            mark.steps = [(0, whole), *_mask_steps(request, whole)]
            mark.content = b"".join(dict.fromkeys(contents))
            mark.shared = True

    # -- its files ---------------------------------------------------------------------------

    def _stamp(self, of_ranks: list[LoadedAdapter]) -> bytes:
        """Return the stamp of the files that all workers have read; none if there is no such."""
        stamps = {one.stamp for one in of_ranks}
        return stamps.pop() if len(stamps) == 1 else b""

    def _look(self, path: str, came: float) -> _AdapterLook:
        """Return a look at an adapter's files, begun after a request `came` and good by now, or
        the one in flight."""
        look, now = self._looks.get(path), self._now()
        if look is None or (look.stamp.done() and look.began < max(came, now - FRESH)):
            look = self._looks[path] = _AdapterLook(now, self._lookers.submit(folder_stamp, path))
        return look

    def _is_as_read(self, request: Any, mark: RequestMark, found: bytes) -> bool:
        is_same = found == self._stamp(self._of_ranks(request, mark))
        if not is_same:
            self._log.warn(
                f"the files of LoRA adapter {request.lora_request.lora_name!r} have changed since "
                "the engine read them, so its KV is not loaded: load changed weights from another "
                "path"
            )
        return is_same

    def _is_late(self, adapter: Any, look: _AdapterLook) -> bool:
        """Return whether nobody waits any more for a look."""
        is_late = self._now() - look.began > PATIENCE
        if is_late:
            self._log.warn(
                f"the folder of LoRA adapter {adapter.lora_name!r}, {adapter.lora_path}, does not "
                "answer: its KV is not loaded until it does"
            )
        return is_late


def _mask_steps(request: Any, whole: bytes) -> list[tuple[int, bytes]]:
    """Return the marks of a prompt that mixes tokens and embeddings, as `MediaMark.steps`, after
    the mark `whole` of its beginning.

    Block hashes contain both, with a token of 0 in the place of each embedding. They do not contain
    which of the two the model is given at a place.
    """
    steps: list[tuple[int, bytes]] = []
    place = 0
    mask = getattr(request, "prompt_is_token_ids", None)
    for is_token, run in groupby((*mask, True) if mask else ()):  # its answer is tokens
        whole += f"{place} {bool(is_token)}".encode()
        whole = hashlib.blake2b(whole, digest_size=MARK_BYTES).digest()
        steps.append((place, whole))
        place += len(list(run))
    return steps
