"""How an engine identifies images, audio and video, read from its configuration."""

from __future__ import annotations

from typing import Any

from tiers.contract.media import MediaMarks
from tiers.engine.content_marks import ContentMarks

LEAST_NAMES = 1 << 16
"""Names that are remembered at least."""
LEAST_TOKENS = 4
"""A lower bound of the tokens of one medium; models make more of an image."""


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
    return ContentMarks(trust_client_ids and not counted, room, counted)


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
