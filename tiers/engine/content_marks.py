"""What is an image known by? Its content, as audio and video are, and not its name."""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from itertools import chain, pairwise
from typing import Any, NamedTuple

from tiers.concurrency.repeated_log import LoggedOnce
from tiers.contract.marks import MARK_BYTES, MediaMark, MediaMarks
from tiers.engine.adapter_marks import name_of
from tiers.engine.digesting import Digester

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
_ELSEWHERE = (
    "other nodes encode this engine's images, and are asked for them by name: their KV is not "
    "shared with other engines, nor found after a restart. If no client gives one uuid to two "
    "images, set trust_client_ids: true in the chain"
)
_MIXED = (
    "a video and its sound are in one place, where the engine's own caches go by the video's name: "
    "KV of requests with both is not stored"
)
_LATE = (
    "media of request %s were not digested in time: it is computed without tiers, and "
    "nothing of it is stored (logged once)"
)
LEAST_NAMES = 1 << 16
"""Names that are remembered at least."""
LEAST_TOKENS = 4
"""A lower bound of the tokens of one medium; models make more of an image."""


class _Asked(NamedTuple):
    """A medium of a request, and the digest of its content."""

    medium: Any
    item: Any
    content: Future[bytes | None]
    adapter: bytes
    """That it is encoded with; empty: none."""


class ContentMarks(MediaMarks):
    """Makes the marks of requests with media, from digests of what the model is given.

    The engine's block hashes contain a medium's name: a digest of its content, what the client
    called it, or a counter. Nothing says which, so the content is digested here, on background
    threads. A medium whose content does not reach this process is identified by its name, for this
    process only.

    The engine's own caches rely on names. Once one name had two contents, they may hold KV of
    either under it, so nothing of requests with that name is stored from then on. The same holds
    for the names of a request whose digests were not waited for: while it runs, and afterwards if
    they are not known then; and for a request with a video and its sound, which are in one place.

    Used by the scheduler's thread.
    """

    def __init__(
        self,
        trust_names: bool,
        room: int,
        counted: bool = False,
        elsewhere: bool = False,
        sees_all: bool = False,
        by_adapter: bool = False,
    ) -> None:
        """`trust_names`: rely on names, and digest nothing. `room`: how many names to remember: as
        many as the engine's caches can hold. `counted`: the engine makes names by a counter.
        `elsewhere`: other nodes encode media, whom it asks by name. `sees_all`: each token of a
        medium attends to all of it. `by_adapter`: what encodes it has adapters, too, which names
        tell apart by their own names alone."""
        self._trust_names = trust_names
        self._room = room
        self._counted = counted
        self._elsewhere = elsewhere
        self._sees_all = sees_all
        self._by_adapter = by_adapter
        self._here = secrets.token_bytes(MARK_BYTES)
        self._contents: OrderedDict[bytes, bytes | None] = OrderedDict()
        """The content of each name, by its digest, in order of use; None: it had several."""
        self._marks: dict[str, MediaMark] = {}
        self._names: dict[str, set[str]] = {}
        self._digesting: dict[str, list[_Asked]] = {}
        self._given_up: dict[str, list[_Asked]] = {}
        self._digester = Digester()
        self._log = LoggedOnce(logger)

    def expect(self, request: Any) -> None:
        """Begin to digest the media of a request that are not digested yet."""
        media = self._unmarked(request)
        if media and request.request_id not in self._digesting:
            adapter = self._adapter(request)
            self._digesting[request.request_id] = [
                _Asked(medium, medium.data, self._digester.ask(medium.data), adapter)
                for medium in media
            ]

    def ready(self, request: Any) -> bool:
        """Return whether all media of a request are digested; begin to digest them."""
        self.expect(request)
        return all(one.content.done() for one in self._digesting.get(request.request_id, ()))

    def give_up(self, request: Any, *, late: bool = True) -> bool:
        """Wait for the digests of a request no more: its mark is nobody else's, and nothing of it
        is stored. `late`: because they take too long."""
        media = self._unmarked(request)
        if not media:
            return False
        if late:
            self._log.warn(_LATE, request.request_id)
        asked = self._digesting.pop(request.request_id, [])
        adapter = self._adapter(request)
        unasked = [_Asked(medium, None, Future(), adapter) for medium in media[len(asked) :]]
        mark = self._marks.setdefault(request.request_id, MediaMark())
        mark.steps.append((media[0].mm_position.offset, secrets.token_bytes(MARK_BYTES)))
        mark.shared = False
        self._given_up[request.request_id] = asked + unasked
        return True

    def of(self, request: Any) -> MediaMark:
        """Return a request's mark, which grows if media are added while it runs. Waits for the
        digests; call it once `ready`."""
        mark = self._marks.setdefault(request.request_id, MediaMark())
        if self._trust_names and (media := getattr(request, "mm_features", None)):
            self._names.setdefault(request.request_id, set()).update(m.identifier for m in media)
            mark.shared &= self._is_sound(request) and not self._adapter(request)
        while self._unmarked(request):
            self.expect(request)
            asked = self._digesting[request.request_id]
            self._mark(request, [one.content.result() for one in asked])
            self._drop(self._digesting.pop(request.request_id))
        return mark

    def _unmarked(self, request: Any) -> Sequence[Any]:
        """Return the media that the request's mark does not stand for yet."""
        if self._trust_names or request.request_id in self._given_up:
            return ()
        marked = self._marks.get(request.request_id, MediaMark())
        return (getattr(request, "mm_features", None) or ())[len(marked.steps) :]

    def _mark(self, request: Any, contents: list[bytes | None]) -> None:
        mark = self._marks.setdefault(request.request_id, MediaMark())
        names = self._names.setdefault(request.request_id, set())
        whole = mark.steps[-1][1] if mark.steps else self._here * self._elsewhere
        mark.shared &= self._is_sound(request)
        adapter = self._adapter(request)
        # Media may have been added since their digests were begun.
        for medium, content in zip(self._unmarked(request), contents, strict=False):
            if self._counted:
                self._log.warn(_COUNTED)
            if self._elsewhere:
                self._log.warn(_ELSEWHERE)
            names.add(medium.identifier)
            known = self._known(medium.identifier, content, adapter)
            if known is None:
                mark.shared = False
                known = secrets.token_bytes(MARK_BYTES)
            whole = _digest(whole + known + _place(medium))
            mark.steps.append((medium.mm_position.offset, whole))

    def _adapter(self, request: Any) -> bytes:
        """Return the adapter that a request's media are encoded with; empty: none."""
        adapter = getattr(request, "lora_request", None) if self._by_adapter else None
        return b"" if adapter is None else name_of(adapter)

    def _is_sound(self, request: Any) -> bool:
        """Return whether no medium begins within another, of which block hashes would have one, and
        none is in doubt."""
        media = getattr(request, "mm_features", None) or ()
        places = [medium.mm_position for medium in media]
        apart = all(one.offset + one.length <= next.offset for one, next in pairwise(places))
        if not apart:
            self._log.warn(_MIXED)
        keys = (_digest(one.identifier) for one in media)
        return apart and all(self._contents.get(key, b"") is not None for key in keys)

    def doubt(self, request: Any) -> None:
        for medium in request.mm_features:
            self._doubt(medium.identifier)

    def _doubt(self, name: str) -> None:
        """Store nothing of requests with this name, which run or come."""
        self._keep(_digest(name), None)
        for request_id, names in self._names.items():
            if name in names:
                self._marks[request_id].shared = False

    def cut(self, request: Any, tokens: int) -> int:
        """Return `tokens`, or the first token of a medium of which `tokens` has a part alone."""
        media = (getattr(request, "mm_features", None) or ()) if self._sees_all else ()
        for place in (medium.mm_position for medium in reversed(media)):
            if place.offset < tokens:  # none before it reaches further
                return int(place.offset) if tokens < place.offset + place.length else tokens
        return tokens

    def all_or_nothing(self, request: Any) -> bool:
        return self._sees_all and bool(getattr(request, "mm_features", None))

    def forget(self, request_id: str) -> None:
        """Drop the marks of a request. What its names stood for is kept."""
        self._marks.pop(request_id, None)
        self._names.pop(request_id, None)
        for one in (given_up := self._given_up.pop(request_id, [])):
            name = one.medium.identifier
            if one.content.done():
                self._known(name, one.content.result(), one.adapter)
            else:  # the engine's caches may have it under this name for as long as it runs
                self._doubt(name)
        self._drop(given_up)
        self._drop(self._digesting.pop(request_id, []))

    def _drop(self, asked: Sequence[_Asked]) -> None:
        for one in asked:
            self._digester.drop(one.item, one.content)

    def _known(self, name: str, content: bytes | None, adapter: bytes = b"") -> bytes | None:
        """Return what `name` stands for, None if for several contents. A name without a known
        `content` stands for itself, in this process. `adapter`: what it is encoded with."""
        key = _digest(name)
        if content is None:
            content = _digest(self._here + key)
            self._log.warn(_UNSEEN)
        content = _digest(content + adapter) if adapter else content
        first = self._contents.get(key, content)
        self._keep(key, first)
        if first is None:
            return None
        if first == content:
            given_up = chain.from_iterable(self._given_up.values())
            return None if any(one.medium.identifier == name for one in given_up) else content
        self._doubt(name)
        self._log.warn(_SEVERAL)
        return None

    def _keep(self, key: bytes, content: bytes | None) -> None:
        self._contents[key] = content
        self._contents.move_to_end(key)
        if len(self._contents) > self._room:
            self._contents.popitem(last=False)


def _place(medium: Any) -> bytes:
    """Describe which tokens a medium fills. Block hashes show where they begin."""
    place = medium.mm_position
    chosen = getattr(place, "is_embed", None)
    filled = None if chosen is None else chosen.tolist()
    return repr((medium.modality, place.length, filled)).encode()


def _digest(data: bytes | str) -> bytes:
    """Of bytes, or of a name, since clients may choose that, and how long it is."""
    data = data if isinstance(data, bytes) else data.encode(errors="surrogatepass")
    return hashlib.blake2b(data, digest_size=MARK_BYTES).digest()


def takes_media(vllm_config: Any) -> bool:
    """Return whether the model's prompts may contain images, audio or video."""
    return getattr(vllm_config.model_config, "multimodal_config", None) is not None


def names_are_counted(vllm_config: Any) -> bool:
    """Return whether the engine numbers the media that clients don't name, anew in every process,
    so that equal names mean different media."""
    config = vllm_config.model_config.multimodal_config
    return not vllm_config.cache_config.enable_prefix_caching and not config.mm_processor_cache_gb


def media_marks(vllm_config: Any, kv_tokens: int, trust_client_ids: bool) -> MediaMarks:
    """Make the marks for an engine whose paged KV has room for `kv_tokens` tokens."""
    if not takes_media(vllm_config):
        return MediaMarks()
    counted = names_are_counted(vllm_config)
    room = max(LEAST_NAMES, kv_tokens // LEAST_TOKENS)
    encoders = vllm_config.ec_transfer_config
    elsewhere = encoders is not None and encoders.is_ec_consumer
    sees_all = vllm_config.model_config.is_mm_prefix_lm
    towers = bool(getattr(vllm_config.lora_config, "enable_tower_connector_lora", False))
    trust = trust_client_ids and not counted
    return ContentMarks(trust, room, counted, elsewhere, sees_all, towers)


def refuse_unmarked_media(vllm_config: Any, trust_client_ids: bool) -> None:
    """Raise ValueError for prompts that the engine's block hashes alone don't distinguish."""
    if getattr(vllm_config.model_config, "enable_prompt_embeds", False):
        raise ValueError(
            "vLLM's OffloadingConnector does not distinguish a prompt of embeddings from one that "
            "has tokens in the places of some: use KVTiersConnector, or leave out "
            "--enable-prompt-embeds"
        )
    if not takes_media(vllm_config):
        return
    if names_are_counted(vllm_config):
        raise ValueError(
            "without prefix caching and with mm_processor_cache_gb at 0 vLLM names images by a "
            "counter, and its OffloadingConnector distinguishes them by nothing else: set "
            "--enable-prefix-caching or a processor cache, or use KVTiersConnector"
        )
    if not trust_client_ids:
        raise ValueError(
            "vLLM's OffloadingConnector identifies images by names that clients may choose. Use "
            "KVTiersConnector; or, if no client gives one name to two images, set "
            "trust_client_ids: true in the chain"
        )
    model, may_have = vllm_config.model_config, vllm_config.model_config.multimodal_config
    has_sound = "omni" in str(model.hf_config.model_type) and all(
        map(may_have.get_limit_per_prompt, ("video", "audio"))
    )
    if (model.is_mm_prefix_lm or has_sound) and not may_have.language_model_only:
        raise ValueError(
            f"vLLM's OffloadingConnector keeps what {model.model} computes of a part of an image "
            "alone, or of a video with another's sound: use KVTiersConnector, or set "
            "--language-model-only; against sound --limit-mm-per-prompt audio 0 is enough"
        )
