"""MarksOfRequests: what a request's KV owes to its LoRA adapter's weights, and to which of its
prompt's positions are tokens."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from itertools import groupby
from typing import Any, NamedTuple

from tiers.concurrency.executors import io_executor
from tiers.contract.adapters import (
    AdapterReports,
    LoadedAdapter,
    RequestMark,
    RequestMarks,
)
from tiers.contract.media import MARK_BYTES
from tiers.engine.identity.adapter_files import folder_stamp
from tiers.engine.loaded_adapters import NameOf, name_of

logger = logging.getLogger(__name__)

PATIENCE = 0.2
"""Seconds that a request waits at most for a look at its adapter's files."""
FRESH = 1.0
"""Seconds for which such a look is good."""
LOOKERS = 4
"""Threads that look, so that a folder that hangs does not keep others from being looked at."""


class _Look(NamedTuple):
    """A look at an adapter's files, begun at this time."""

    began: float
    stamp: Future[bytes]


class MarksOfRequests(RequestMarks):
    """Makes the marks of an engine's requests. Used by the scheduler's thread.

    The mark of an adapter is of the weights that all workers say they have loaded. Its blocks are
    stored as long as those stay the same, which workers see. An engine may load an adapter anew
    for each request, from files that have changed. So blocks are loaded only if the files are
    still those that were read, as a thread of ours finds after the request has come. Who looks
    late, or has no files to look at, has nothing to load.
    """

    def __init__(
        self, ranks: int, name_of: NameOf = name_of, now: Callable[[], float] = time.monotonic
    ) -> None:
        """`ranks`: how many workers there are. `now`: seconds, never going back."""
        self._ranks = ranks
        self._name_of = name_of
        self._now = now
        self._told: dict[bytes, dict[int, LoadedAdapter]] = {}
        self._marks: dict[str, tuple[Any, RequestMark]] = {}
        self._came: dict[str, float] = {}
        self._looks: dict[str, _Look] = {}
        self._lookers = io_executor(LOOKERS, "adapters")
        self._said: set[str] = set()

    def of(self, request: Any) -> RequestMark:
        known = self._marks.get(request.request_id)
        if known is None:
            adapter = getattr(request, "lora_request", None)
            mark = RequestMark(_mask_steps(request, b""))
            if adapter is not None:
                mark = RequestMark(shared=False, adapter=self._name_of(adapter), may_load=False)
            known = self._marks[request.request_id] = request, mark
            self._update(*known)
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
        mark.may_load = look.stamp.done() and self._is_as_read(request, mark, look.stamp.result())
        return look.stamp.done() or self._is_late(adapter, look)

    def forget(self, request_id: str) -> None:
        self._marks.pop(request_id, None)
        self._came.pop(request_id, None)

    # -- what workers have loaded ------------------------------------------------------------

    def heard(self, reports: AdapterReports) -> None:
        new: set[bytes] = set()
        for rank, loaded in reports.items():
            for name, one in loaded.items():
                self._told.setdefault(name, {})[rank] = one
                new.add(name)
        for request, mark in self._marks.values() if new else ():
            if mark.adapter in new:
                self._update(request, mark)

    def _of_ranks(self, request: Any, mark: RequestMark) -> list[LoadedAdapter]:
        """Return what the workers have loaded for the request, those that have said so."""
        told = self._told.get(mark.adapter, {})
        number = request.lora_request.lora_int_id
        return [told[rank] for rank in sorted(told) if told[rank].number == number]

    def _is_told(self, request: Any, mark: RequestMark) -> bool:
        return len(self._of_ranks(request, mark)) == self._ranks

    def _update(self, request: Any, mark: RequestMark) -> None:
        """Give a request with an adapter its mark, or take it away for good: the keys that were
        made of it may stand for other weights now."""
        if not mark.adapter:
            return
        of_ranks = self._of_ranks(request, mark)
        if not self._is_told(request, mark) or not all(one.content for one in of_ranks):
            mark.shared = False
        elif not self._stamp(of_ranks):
            mark.shared = False
            self._say(
                f"nobody can tell whether LoRA adapter {request.lora_request.lora_name!r} would be "
                "the same if it were loaded again, so its KV is not cached: load it from a local "
                "folder, two seconds after that has changed"
            )
        elif not mark.steps:
            contents = b"".join(one.content for one in of_ranks)
            whole = hashlib.blake2b(contents, digest_size=MARK_BYTES).digest()
            mark.steps = [(0, whole), *_mask_steps(request, whole)]
            mark.shared = True

    # -- its files ---------------------------------------------------------------------------

    def _stamp(self, of_ranks: list[LoadedAdapter]) -> bytes:
        """Return the stamp of the files that all workers have read; none if there is no such."""
        stamps = {one.stamp for one in of_ranks}
        return stamps.pop() if len(stamps) == 1 else b""

    def _look(self, path: str, came: float) -> _Look:
        """Return a look at an adapter's files, begun after a request `came` and good by now, or
        the one that is under way."""
        look, now = self._looks.get(path), self._now()
        if look is None or (look.stamp.done() and look.began < max(came, now - FRESH)):
            look = self._looks[path] = _Look(now, self._lookers.submit(folder_stamp, path))
        return look

    def _is_as_read(self, request: Any, mark: RequestMark, found: bytes) -> bool:
        is_same = found == self._stamp(self._of_ranks(request, mark))
        if not is_same:
            self._say(
                f"the files of LoRA adapter {request.lora_request.lora_name!r} have changed since "
                "the engine read them, so its KV is not loaded: load changed weights from another "
                "path"
            )
        return is_same

    def _is_late(self, adapter: Any, look: _Look) -> bool:
        """Return whether nobody waits any more for a look."""
        is_late = self._now() - look.began > PATIENCE
        if is_late:
            self._say(
                f"the folder of LoRA adapter {adapter.lora_name!r}, {adapter.lora_path}, does not "
                "answer: its KV is not loaded until it does"
            )
        return is_late

    def _say(self, what: str) -> None:
        """Log each warning once."""
        if what not in self._said:
            self._said.add(what)
            logger.warning("%s", what)


def _mask_steps(request: Any, whole: bytes) -> list[tuple[int, bytes]]:
    """Return the marks of a prompt that mixes tokens and embeddings, as `MediaMark.steps`, after
    the mark `whole` of its beginning.

    Block hashes contain both, with a token of 0 in the place of each embedding, and nothing of
    which of them the model is given.
    """
    steps: list[tuple[int, bytes]] = []
    place = 0
    mask = getattr(request, "prompt_is_token_ids", None)
    for is_token, run in groupby((*mask, True) if mask else ()):  # its answer is tokens
        said = whole + f"{place} {bool(is_token)}".encode()
        whole = hashlib.blake2b(said, digest_size=MARK_BYTES).digest()
        steps.append((place, whole))
        place += len(list(run))
    return steps
