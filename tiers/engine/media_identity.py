"""By what an engine knows images, audio and video, read from its configuration."""

from __future__ import annotations

from typing import Any

from tiers.connector.contract.media import MediaMarks, NoMedia
from tiers.engine.content_marks import ContentMarks

LEAST_NAMES = 1 << 16
LEAST_TOKENS = 4
"""Of one medium; models that take images make more of them."""


def takes_media(vllm_config: Any) -> bool:
    """Whether a model's prompts have more than tokens."""
    return getattr(vllm_config.model_config, "multimodal_config", None) is not None


def names_are_counted(vllm_config: Any) -> bool:
    """Whether the engine names media by a counter, which begins anew in every process, where a
    client gives no names."""
    config = vllm_config.model_config.multimodal_config
    return not vllm_config.cache_config.enable_prefix_caching and not config.mm_processor_cache_gb


def media_marks(vllm_config: Any, kv_tokens: int, trust_client_ids: bool) -> MediaMarks:
    """Marks for an engine whose paged KV has room for so many tokens."""
    if not takes_media(vllm_config):
        return NoMedia()
    counted = names_are_counted(vllm_config)
    room = max(LEAST_NAMES, kv_tokens // LEAST_TOKENS)
    return ContentMarks(trust_client_ids and not counted, room, counted)


def refuse_unmarked_media(vllm_config: Any, trust_client_ids: bool) -> None:
    """Raise ValueError for a model whose media must be told apart by more than the engine's names,
    where keys have no marks."""
    if not takes_media(vllm_config):
        return
    if names_are_counted(vllm_config):
        raise ValueError(
            "without prefix caching and with mm_processor_cache_gb at 0 vLLM names images by a "
            "counter, and its OffloadingConnector tells no others apart: set "
            "--enable-prefix-caching or a processor cache, or use KVTiersConnector"
        )
    if not trust_client_ids:
        raise ValueError(
            "vLLM's OffloadingConnector knows images by names that clients may give them. Use "
            "KVTiersConnector; or, if no client would give two images one name, set "
            "trust_client_ids: true in the chain"
        )
