"""KV events in vLLM's words, so that a router reads a tier's blocks as it reads the engine's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1 import kv_cache_interface
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from spec.chain import EventsSpec
from tiers.contract.protocols import BlockEvent, Origin

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig


def describe(request: Any, first: int, size: int, blocks: int) -> Origin:
    """Describe a request's blocks as vLLM's own events do: see `Describe`."""
    adapter = request.lora_request
    return Origin(
        request.all_token_ids[first : first + size * blocks],
        adapter.adapter_id if adapter else None,
        adapter.name if adapter else None,
        _extra_keys(request, first, size, blocks),
        getattr(request, "session_id", None),
    )


def _extra_keys(request: Any, first: int, size: int, blocks: int) -> list[Any] | None:
    """What each block's hash depends on beside tokens. Routers must distinguish blocks by it: two
    images have the same tokens."""
    names = ("lora_request", "cache_salt", "mm_features", "prompt_embeds")
    if all(getattr(request, name, None) in (None, "", []) for name in names):
        return None
    found, image = [], 0
    for begin in range(first, first + size * blocks, size):
        keys, image = kv_cache_utils.generate_block_hash_extra_keys(
            request, begin, begin + size, image
        )
        found.append(keys)
    # Since vLLM 0.32 hashes tag what they depend on, and events do not.
    untag = getattr(kv_cache_utils, "to_event_extra_keys", None)
    return found if untag is None else untag(found)


class GroupKind(NamedTuple):
    """A KV cache group's kind of attention and window, as in vLLM's events."""

    name: str
    window: int | None = None


def group_kinds(kv_cache_config: KVCacheConfig) -> list[GroupKind]:
    """The kinds of a model's KV cache groups."""
    kind = kv_cache_interface.get_kv_cache_spec_kind
    window = kv_cache_interface.get_kv_cache_spec_sliding_window
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    return [GroupKind(kind(spec).value, window(spec)) for spec in specs]


class AsVllm:
    """Makes vLLM's events of ours."""

    def __init__(self, settings: EventsSpec, kinds: list[GroupKind]) -> None:
        """`kinds`: of the model's KV cache groups."""
        self._settings = settings
        self._kinds = kinds
        self._is_cleared = False

    def all_cleared(self) -> None:
        """Announce next that nothing is held any more. What the engine itself still has is of other
        weights, and nobody should be sent there for it."""
        self._is_cleared = True

    def __call__(self, events: Iterable[Any]) -> Iterator[Any]:
        """Translate our events, and hand other connectors' on."""
        if self._is_cleared:
            self._is_cleared = False
            yield AllBlocksCleared()
        for event in events:
            yield self._event(event) if isinstance(event, BlockEvent) else event

    def _event(self, event: BlockEvent) -> KVCacheEvent:
        settings, origin = self._settings, event.origin
        fields: dict[str, Any] = {
            "block_hashes": [_hash(one) for one in event.hashes],
            "medium": event.medium,
            "group_idx": event.group,
        }
        if settings.locality:
            fields["locality"] = "LOCAL" if event.is_local else "REMOTE"
        if settings.ownership:
            fields["ownership"] = event.tier
        if not event.stored:
            return _made(BlockRemoved, **fields)
        kind = self._kinds[event.group]
        return _made(
            BlockStored,
            parent_block_hash=None if event.parent is None else _hash(event.parent),
            token_ids=list(origin.tokens),
            block_size=event.block_tokens,
            lora_id=origin.lora_id,
            lora_name=origin.lora_name,
            extra_keys=origin.extra_keys,
            session_id=origin.session,
            kv_cache_spec_kind=kind.name,
            kv_cache_spec_sliding_window=kind.window,
            **fields,
        )


def _hash(block_hash: bytes) -> Any:
    return maybe_convert_block_hash(BlockHash(block_hash))


def _made(kind: type[KVCacheEvent], **fields: Any) -> KVCacheEvent:
    """An event with those of the fields that this vLLM has."""
    return kind(**{name: fields[name] for name in kind.__struct_fields__ if name in fields})
