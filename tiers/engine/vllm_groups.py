"""A model's KV cache groups: which of vLLM's can be served, and how their blocks are hashed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.v1.core import kv_cache_utils

from tiers.connector.contract.engine import KVGroup

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_FULL = ("FullAttentionSpec", "MLAAttentionSpec")
_WINDOW = ("SlidingWindowSpec",)
"""By name, since older engines lack some. Derived classes are not served: they may keep their
blocks in another way."""

REPORTS_FAILED_REQUESTS = hasattr(base, "KVConnectorTransferResults")
"""Whether this vLLM accepts failed loads of models with several groups: 0.30 and later do.

Others must manage all layers as one group, which is their default."""


def kv_groups(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
) -> list[tuple[KVGroup, list[str]]]:
    """Return the KV cache groups and their layers. Raises ValueError for what can't be served."""
    refuse_model(vllm_config.model_config)
    if getattr(kv_cache_config, "needs_kv_cache_zeroing", False):
        raise ValueError(
            "kvtiers does not serve KV of mixed precision: vLLM zeroes its blocks while they may "
            "still be read for storing. Start vLLM with one kv_cache_dtype for all layers."
        )
    parallel = vllm_config.parallel_config
    for axis in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, axis, 1) > 1:
            raise ValueError(
                f"kvtiers does not serve context parallelism: {axis} is {getattr(parallel, axis)}. "
                "Set it to 1, or start vLLM without kvtiers."
            )
    groups = [
        (_group(i, group), sorted(group.layer_names))
        for i, group in enumerate(kv_cache_config.kv_cache_groups)
    ]
    plain = len(groups) == 1 and groups[0][0].window is None
    if not plain and not REPORTS_FAILED_REQUESTS:
        raise ValueError(
            "this vLLM does not accept failed loads of a model with sliding windows. Start it "
            "with --disable-hybrid-kv-cache-manager, or use vLLM 0.30 or later."
        )
    return groups


def refuse_model(model: Any) -> None:
    """Raise ValueError for a model whose prefixes vLLM itself can't reuse."""
    supported = getattr(model, "is_prefix_caching_supported", True)
    if not supported or getattr(model, "is_diffusion", False):
        raise ValueError(
            f"the KV of {model.model} can't be reused: its answers need every token of a prompt "
            "computed, or its KV depends on later tokens. Start vLLM without kvtiers."
        )


def _group(index: int, group: Any) -> KVGroup:
    spec = group.kv_cache_spec
    kinds = [_kind(one) for one in getattr(spec, "kv_cache_specs", {0: spec}).values()]
    odd = sorted({kind for kind in kinds if isinstance(kind, str)})
    windows = {kind for kind in kinds if not isinstance(kind, str)}
    if not getattr(group, "enable_kv_transfer", True):
        odd.append("layers that vLLM itself excludes from transfers")
    if odd or len(windows) != 1:
        raise ValueError(
            f"kvtiers serves full attention and sliding windows. KV cache group {index} of this "
            f"model has {', '.join(odd) or 'windows of several sizes'} "
            f"(layers {', '.join(group.layer_names[:3])}, ...): start vLLM without kvtiers."
        )
    return KVGroup(spec.block_size, windows.pop())


def _kind(spec: Any) -> int | str | None:
    """Return a layer's window in tokens, None for full attention, and of a layer that can't be
    served the name of its kind."""
    name = type(spec).__name__
    if getattr(spec, "non_causal", False):
        return f"non-causal {name}"
    if getattr(spec, "tokens_per_state", 1) != 1 or not getattr(spec, "prefix_cacheable", True):
        return f"compressed or uncacheable {name}"
    if name in _FULL:
        return None
    if name in _WINDOW:
        return int(spec.sliding_window + getattr(spec, "extra_retained_tokens", 0))
    return name


def drops_last(vllm_config: VllmConfig) -> bool:
    """Return whether vLLM recomputes the last block of each cached prefix, as it does when it
    speculates with a drafter of certain kinds (EAGLE, MTP)."""
    speculative = vllm_config.speculative_config
    if speculative is None:
        return False
    # Older engines have no setting against it.
    drops = getattr(speculative, "use_eagle_block_drop", speculative.use_eagle)
    return bool(drops())


def hash_tokens(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """Return the tokens per entry of `Request.block_hashes`."""
    resolve = getattr(kv_cache_utils, "resolve_kv_cache_block_sizes", None)
    if resolve is None:
        return int(kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size)
    return int(resolve(kv_cache_config, vllm_config)[1])
