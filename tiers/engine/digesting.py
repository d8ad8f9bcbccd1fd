"""Digester: digests media on a few threads, those that are done soonest first."""

from __future__ import annotations

import hashlib
import heapq
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from typing import Any

import torch

from tiers.concurrency.executors import IoExecutor
from tiers.contract.marks import MARK_BYTES

THREADS = 4
"""Media digested at once: 0.4 to 2 GB/s each, by the processor."""

PIECE = 32 << 20
"""Bytes that are digested before a thread looks for media that are done sooner."""

_SIZES = (
    "image_grid_thw video_grid_thw image_sizes video_image_sizes timestamps audio_num_tokens "
    "audio_feature_lengths second_per_grid_ts"
)
SIZES = frozenset(_SIZES.split())
"""What sizes the tokens of a medium: all that an engine is given of one whose KV another node is to
send. It tells no two of a size apart."""


class _Job:
    """A medium to digest, for `wanted` requests; `left`: bytes to go."""

    def __init__(self, item: Any) -> None:
        self.item = item
        self.answer: Future[bytes | None] = Future()
        self.wanted = 0
        self.left = _bytes_of(item)
        self.digest: bytes | None = None
        self.steps = self._steps(item)

    def _steps(self, item: Any) -> Iterator[int]:
        """Digest an item piece by piece, into `digest`; yields the bytes of each piece."""
        digest, has_tensors = hashlib.sha256(), False
        try:
            values = {name: element.data for name, element in item.items()}
            for fed in feed(digest, values):
                has_tensors = any(values[name] is not None for name in values.keys() - SIZES)
                yield fed
        except (AttributeError, TypeError, ValueError, RuntimeError):
            # The item is of another shape, or has tensors without plain bytes.
            has_tensors = False
        self.digest = digest.digest()[:MARK_BYTES] if has_tensors else None


class Digester:
    """Digests of what models are given of media, each made once while the engine keeps it.

    `ask`, `drop` and `known` are for the scheduler's thread, which waits for a lock that is never
    held while bytes are digested.
    """

    def __init__(self) -> None:
        self._threads = IoExecutor(THREADS, "digest")
        # Without it a thread could end a job while another request is counted as wanting it.
        self._lock = threading.Lock()
        self._jobs: dict[int, _Job] = {}
        self._waiting: list[tuple[int, int, _Job]] = []
        """A heap of jobs by the bytes that they have left, and by age."""
        self._age = count()
        self._known: dict[int, tuple[weakref.ref[Any], bytes | None]] = {}

    def ask(self, item: Any) -> Future[bytes | None]:
        """Digest an item; give it and the answer to `drop` once nobody waits for that."""
        with self._lock:
            ref, digest = self._known.get(id(item), (None, None))
            if item is None or (ref is not None and ref() is item):
                answer: Future[bytes | None] = Future()
                answer.set_result(digest)
                return answer
            job = self._jobs.get(id(item))
            if is_new := job is None:
                job = self._jobs[id(item)] = _Job(item)
                self._wait(job)
            job.wanted += 1
        if is_new:
            self._threads.submit(self._work)
        return job.answer

    def drop(self, item: Any, answer: Future[bytes | None]) -> None:
        """Who asked for an item wants that answer no more: a digest that nobody wants ends."""
        with self._lock:
            job = self._jobs.get(id(item))
            if job is not None and job.answer is answer:  # not one that others asked for since
                job.wanted -= 1
                if not job.wanted:
                    del self._jobs[id(item)]
                    job.item, job.steps = None, iter(())  # it may wait here for long yet

    def _wait(self, job: _Job) -> None:
        heapq.heappush(self._waiting, (job.left, next(self._age), job))

    # -- its threads -------------------------------------------------------------------------

    def _work(self) -> None:
        """Digest the medium that is done soonest, until another is."""
        job = self._next()
        if job is None:
            return
        for digested in job.steps:
            with self._lock:
                job.left -= digested
                if not job.wanted:
                    return
                if self._waiting and self._waiting[0][0] < job.left:
                    self._wait(job)
                    self._threads.submit(self._work)
                    return
        self._finish(job)

    def _next(self) -> _Job | None:
        with self._lock:
            while self._waiting:
                _, _, job = heapq.heappop(self._waiting)
                if job.wanted:
                    return job
        return None

    def _finish(self, job: _Job) -> None:
        """Note a digest, then answer: who has the answer and asks again finds it noted."""
        with self._lock:
            item, here = job.item, id(job.item)
            if item is None:
                return
            del self._jobs[here]
            with suppress(TypeError):  # some kinds of objects can't be watched
                ref = weakref.ref(item, lambda _: self._known.pop(here, None))
                self._known[here] = ref, job.digest
        job.answer.set_result(job.digest)


def feed(digest: Any, value: Any) -> Iterator[int]:
    """Feed a value to `digest`, other bytes for any other value; yields the bytes of each piece of
    a tensor's content, one at least of each tensor. Raises TypeError for a value that does not show
    its content, such as the address where that is kept."""
    for piece in _pieces(value):
        digest.update(piece)
        if isinstance(piece, memoryview):
            yield len(piece)


def _pieces(value: Any) -> Iterator[bytes | memoryview]:
    """What stands for a value; views are of the content of tensors, which takes time to digest."""
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            raise TypeError("the tensor is on a device")
        yield f"tensor {value.dtype} {tuple(value.shape)};".encode()
        flat = value.detach().contiguous().flatten().view(torch.uint8).numpy().data
        for start in range(0, len(flat) or 1, PIECE):
            yield flat[start : start + PIECE]
    elif isinstance(value, dict):
        yield f"dict {len(value)};".encode()
        for key in sorted(value):
            yield from _pieces([key, value[key]])
    elif isinstance(value, list | tuple):
        yield f"list {len(value)};".encode()
        for one in value:
            yield from _pieces(one)
    elif value is None or isinstance(value, bool | int | float | str):
        text = repr(value).encode()
        yield f"{type(value).__name__} {len(text)};".encode() + text
    else:
        raise TypeError(f"what a {type(value).__name__} contains is not known")


def _bytes_of(value: Any) -> int:
    """About how many bytes there are to digest of an item or a value."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, list | tuple):
        return sum(map(_bytes_of, value))
    try:
        return sum(_bytes_of(getattr(one, "data", one)) for one in value.values())
    except (AttributeError, TypeError):
        return 0
