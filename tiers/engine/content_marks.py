"""Images, audio and video are what their content says, whoever gave them whatever name."""

from __future__ import annotations

import hashlib
import logging
import secrets
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import torch

from tiers.concurrency.executors import io_executor
from tiers.connector.contract.media import MARK_BYTES, MediaMark
from tiers.errors import KVTiersError

logger = logging.getLogger(__name__)

_COUNTED = (
    "the engine names images by a counter, so that their KV is not found again: enable prefix "
    "caching, or set mm_processor_cache_gb above 0"
)
_UNSEEN = (
    "the content of images does not pass through the scheduler's process: their KV is not shared "
    "with other engines, nor found after a restart. Set mm_processor_cache_type: lru; or, if no "
    "client would give two images one uuid, trust_client_ids: true in the chain"
)
_SEVERAL = (
    "two images with different contents had one name, by which the engine's own caches go: KV of "
    "requests with that name is not stored. Let clients give each image a uuid of its own, or none"
)


class ContentMarks:
    """Marks of media, from digests of what the model is given of them.

    The engine's block hashes have a medium's name: a digest of its content, or whatever the client
    called it, or a counter. Nothing tells those apart, so that the content is digested here, on a
    thread of its own. A medium whose content does not pass here is
    known by its name, to this process alone.

    The engine's own caches go by names. Where one name had two contents, KV of either may be in
    them under it, so that from then on nothing of requests with that name is stored.
    """

    def __init__(self, trust_names: bool, room: int, counted: bool = False) -> None:
        """`trust_names`: digest nothing, names are as good. `room`: names that are remembered, as
        many as the engine's caches can hold. `counted`: the engine makes names by a counter."""
        self._trust_names = trust_names
        self._room = room
        self._counted = counted
        self._here = secrets.token_bytes(MARK_BYTES)
        self._contents: OrderedDict[str, bytes | None] = OrderedDict()
        """What each name stands for; None: for several contents."""
        self._marks: dict[str, MediaMark] = {}
        self._names: dict[str, set[str]] = {}
        self._digesting: dict[str, Future[list[bytes | None]]] = {}
        self._items: dict[int, tuple[weakref.ref[Any], bytes | None]] = {}
        self._thread = io_executor(1, "digest")
        self._said: set[str] = set()

    def expect(self, request: Any) -> None:
        """Begin to digest what is not digested yet."""
        if request.request_id not in self._digesting and not self._is_marked(request):
            done = self._marks.get(request.request_id)
            items = [
                medium.data for medium in self._media(request)[len(done.steps) if done else 0 :]
            ]
            self._digesting[request.request_id] = self._thread.submit(self._digest_all, items)

    def ready(self, request: Any) -> bool:
        """Whether all is digested."""
        self.expect(request)
        future = self._digesting.get(request.request_id)
        return future is None or future.done()

    def of(self, request: Any) -> MediaMark:
        """Its mark; it grows if media are added to a request that runs."""
        while not self._is_marked(request):
            self.expect(request)
            self._mark(request, self._digesting.pop(request.request_id).result())
        return self._marks.get(request.request_id) or MediaMark()

    def _is_marked(self, request: Any) -> bool:
        mark = self._marks.get(request.request_id, MediaMark())
        return len(self._media(request)) == len(mark.steps)

    def _mark(self, request: Any, contents: list[bytes | None]) -> None:
        mark = self._marks.setdefault(request.request_id, MediaMark())
        names = self._names.setdefault(request.request_id, set())
        whole = mark.steps[-1][1] if mark.steps else b""
        media = self._media(request)[len(mark.steps) :][: len(contents)]
        for medium, content in zip(media, contents, strict=True):
            if self._counted:
                self._say(_COUNTED)
            names.add(medium.identifier)
            known = self._known(medium.identifier, content)
            if known is None:
                mark.shared = False
                known = secrets.token_bytes(MARK_BYTES)
            whole = _digest(whole + known + _place(medium))
            mark.steps.append((medium.mm_position.offset, whole))

    def forget(self, request_id: str) -> None:
        """Its marks are needed no more; what its names stood for is."""
        self._marks.pop(request_id, None)
        self._names.pop(request_id, None)
        digesting = self._digesting.pop(request_id, None)
        if digesting is not None:
            digesting.cancel()  # others wait for theirs behind it

    def _media(self, request: Any) -> Sequence[Any]:
        return () if self._trust_names else getattr(request, "mm_features", None) or ()

    def _digest_all(self, items: list[Any]) -> list[bytes | None]:
        return [self._digest_once(item) for item in items]

    def _digest_once(self, item: Any) -> bytes | None:
        """The engine keeps the items of media that come again: those are digested already."""
        ref, digest = self._items.get(id(item), (None, None))
        if ref is None or ref() is not item:
            digest = content_digest(item)
            if item is not None:
                here = id(item)
                with suppress(TypeError):  # some kinds of objects can't be watched
                    self._items[here] = (
                        weakref.ref(item, lambda _: self._items.pop(here, None)),
                        digest,
                    )
        return digest

    def _known(self, name: str, content: bytes | None) -> bytes | None:
        """What a name stands for: its content or, if that is unknown, itself in this process; None
        if it stands for several contents."""
        if content is None:
            content = _digest(self._here + name.encode())
            self._say(_UNSEEN)
        first = self._contents.setdefault(name, content)
        self._contents.move_to_end(name)
        if len(self._contents) > self._room:
            self._contents.popitem(last=False)
        if first == content:
            return content
        self._contents[name] = None
        for request_id, names in self._names.items():
            if name in names:
                self._marks[request_id].shared = False
        self._say(_SEVERAL)
        return None

    def _say(self, what: str) -> None:
        """Once for each kind of trouble."""
        if what not in self._said:
            self._said.add(what)
            logger.warning(what)


def content_digest(item: Any) -> bytes | None:
    """Digest all tensors and numbers that a model is given of one medium; None if they are not
    all here, or none is."""
    digest = hashlib.sha256()
    try:
        tensors = _feed(digest, {name: element.data for name, element in item.items()})
    except (_Unknown, AttributeError, TypeError, ValueError, RuntimeError):
        # Kinds of tensors without plain bytes are none that engines send between processes.
        return None
    return digest.digest()[:MARK_BYTES] if tensors else None


class _Unknown(KVTiersError):
    """A value that says nothing of the content, such as where it is kept."""


def _feed(digest: Any, value: Any) -> int:
    """Digest a value, so that no two have the same bytes; how many tensors it has."""
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            raise _Unknown
        digest.update(f"tensor {value.dtype} {tuple(value.shape)};".encode())
        flat = value.detach().contiguous().flatten()
        digest.update(flat.view(torch.uint8).numpy().data)
        return 1
    if isinstance(value, dict):
        digest.update(f"dict {len(value)};".encode())
        return sum(_feed(digest, [key, value[key]]) for key in sorted(value))
    if isinstance(value, list | tuple):
        digest.update(f"list {len(value)};".encode())
        return sum(_feed(digest, one) for one in value)
    if value is None or isinstance(value, bool | int | float | str):
        text = repr(value).encode()
        digest.update(f"{type(value).__name__} {len(text)};".encode() + text)
        return 0
    raise _Unknown


def _place(medium: Any) -> bytes:
    """Which of its tokens a medium takes; where they begin is in the block hashes."""
    place = medium.mm_position
    chosen = getattr(place, "is_embed", None)
    return repr(
        (medium.modality, place.length, None if chosen is None else chosen.tolist())
    ).encode()


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=MARK_BYTES).digest()
