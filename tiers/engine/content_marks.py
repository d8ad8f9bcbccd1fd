"""ContentMarks: images, audio and video are identified by their content, not by their names."""

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
from tiers.connector.contract.media import MARK_BYTES, MediaMark, MediaMarks
from tiers.errors import KVTiersError

logger = logging.getLogger(__name__)

_COUNTED = (
    "the engine names images by a counter, so their KV is never found again: enable prefix "
    "caching, or set mm_processor_cache_gb above 0"
)
_UNSEEN = (
    "the content of images does not reach the scheduler's process: their KV is not shared with "
    "other engines, nor found after a restart. Set mm_processor_cache_type: lru; or, if no client "
    "gives one uuid to two images, trust_client_ids: true in the chain"
)
_SEVERAL = (
    "two images with different contents had one name, and the engine's own caches rely on names: "
    "KV of requests with that name is not stored. Clients should give each image its own uuid, or "
    "none"
)


class ContentMarks(MediaMarks):
    """Makes the marks of requests with media, from digests of what the model is given.

    The engine's block hashes contain a medium's name: a digest of its content, what the client
    called it, or a counter. Nothing says which, so the content is digested here, on a background
    thread. A medium whose content does not reach this process is identified by its name, for this
    process only.

    The engine's own caches rely on names. Once one name had two contents, they may hold KV of
    either under it, so nothing of requests with that name is stored from then on.

    Used by the scheduler's thread.
    """

    def __init__(self, trust_names: bool, room: int, counted: bool = False) -> None:
        """`trust_names`: rely on names, and digest nothing. `room`: how many names to remember: as
        many as the engine's caches can hold. `counted`: the engine makes names by a counter."""
        self._trust_names = trust_names
        self._room = room
        self._counted = counted
        self._here = secrets.token_bytes(MARK_BYTES)
        self._contents: OrderedDict[str, bytes | None] = OrderedDict()
        """The content of each name, in order of use; None: it had several."""
        self._marks: dict[str, MediaMark] = {}
        self._names: dict[str, set[str]] = {}
        self._digesting: dict[str, Future[list[bytes | None]]] = {}
        self._items: dict[int, tuple[weakref.ref[Any], bytes | None]] = {}
        self._thread = io_executor(1, "digest")
        self._said: set[str] = set()

    def expect(self, request: Any) -> None:
        """Begin to digest the media of a request that are not digested yet."""
        items = [medium.data for medium in self._unmarked(request)]
        if items and request.request_id not in self._digesting:
            self._digesting[request.request_id] = self._thread.submit(
                lambda: [self._digest_once(item) for item in items]
            )

    def ready(self, request: Any) -> bool:
        """Return whether all media of a request are digested; begin to digest them."""
        self.expect(request)
        future = self._digesting.get(request.request_id)
        return future is None or future.done()

    def of(self, request: Any) -> MediaMark:
        """Return a request's mark, which grows if media are added while it runs. Waits for the
        digests; call it once `ready`."""
        while self._unmarked(request):
            self.expect(request)
            self._mark(request, self._digesting.pop(request.request_id).result())
        return self._marks.get(request.request_id, MediaMark())

    def _unmarked(self, request: Any) -> Sequence[Any]:
        """Return the media that the request's mark does not stand for yet."""
        if self._trust_names:
            return ()
        marked = self._marks.get(request.request_id, MediaMark())
        return (getattr(request, "mm_features", None) or ())[len(marked.steps) :]

    def _mark(self, request: Any, contents: list[bytes | None]) -> None:
        mark = self._marks.setdefault(request.request_id, MediaMark())
        names = self._names.setdefault(request.request_id, set())
        whole = mark.steps[-1][1] if mark.steps else b""
        # Media may have been added since their digests were begun.
        for medium, content in zip(self._unmarked(request), contents, strict=False):
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
        """Drop the marks of a request. What its names stood for is kept."""
        self._marks.pop(request_id, None)
        self._names.pop(request_id, None)
        digesting = self._digesting.pop(request_id, None)
        if digesting is not None:
            digesting.cancel()  # others wait for theirs behind it

    def _digest_once(self, item: Any) -> bytes | None:
        """Digest an item once for as long as it lives: the engine keeps those that come again."""
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
        """Return what `name` stands for, None if for several contents. A name without a known
        `content` stands for itself, in this process."""
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
        """Log each warning once."""
        if what not in self._said:
            self._said.add(what)
            logger.warning(what)


def content_digest(item: Any) -> bytes | None:
    """Digest all tensors and values that a model is given of one medium; None if some are not in
    this process, or if there are no tensors."""
    digest = hashlib.sha256()
    try:
        tensors = feed(digest, {name: element.data for name, element in item.items()})
    except (Unknown, AttributeError, TypeError, ValueError, RuntimeError):
        # The item is of another shape, or has tensors without plain bytes.
        return None
    return digest.digest()[:MARK_BYTES] if tensors else None


class Unknown(KVTiersError):
    """A value that does not show the content, such as the address where it is kept."""


def feed(digest: Any, value: Any) -> int:
    """Feed a value to `digest`, other bytes for any other value; return how many tensors it has."""
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            raise Unknown
        digest.update(f"tensor {value.dtype} {tuple(value.shape)};".encode())
        flat = value.detach().contiguous().flatten()
        digest.update(flat.view(torch.uint8).numpy().data)
        return 1
    if isinstance(value, dict):
        digest.update(f"dict {len(value)};".encode())
        return sum(feed(digest, [key, value[key]]) for key in sorted(value))
    if isinstance(value, list | tuple):
        digest.update(f"list {len(value)};".encode())
        return sum(feed(digest, one) for one in value)
    if value is None or isinstance(value, bool | int | float | str):
        text = repr(value).encode()
        digest.update(f"{type(value).__name__} {len(text)};".encode() + text)
        return 0
    raise Unknown


def _place(medium: Any) -> bytes:
    """Describe which tokens a medium fills. Block hashes show where they begin."""
    place = medium.mm_position
    chosen = getattr(place, "is_embed", None)
    return repr(
        (medium.modality, place.length, None if chosen is None else chosen.tolist())
    ).encode()


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=MARK_BYTES).digest()
