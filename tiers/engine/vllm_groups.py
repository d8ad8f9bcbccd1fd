"""A model's KV cache groups: which of vLLM's can be served, and how their blocks are hashed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm import __version__ as vllm_version
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.v1.core import kv_cache_utils

from tiers.contract.engine_info import KVGroup
from tiers.engine.versions import NEWEST, release_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

REPORTS_FAILED_REQUESTS = hasattr(base, "KVConnectorTransferResults")
"""Whether this vLLM accepts failed loads of models with several groups: 0.30 and later do.

Others must manage all layers as one group, which is their default."""
_IS_OLD = (release_of(vllm_version) or NEWEST) < (0, 32)
WHY_OLD = "that is only known to work with vLLM 0.32 and later" if _IS_OLD else ""
"""Why neither recurrent states, windows of latent attention nor blocks that ranks share out can be
served; empty: they may."""

_FULL = ("FullAttentionSpec", "MLAAttentionSpec")
_WINDOW = ("SlidingWindowSpec",) if _IS_OLD else ("SlidingWindowSpec", "SlidingWindowMLASpec")
_STATE = ("MambaSpec",)
"""By name, since older engines do not have all of them. Derived classes are not served: they may
keep their blocks in another way."""


def kv_groups(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
) -> list[tuple[KVGroup, list[str]]]:
    """Return the KV cache groups and their layers. Raises ValueError for what can't be served."""
    refuse_settings(vllm_config)
    refuse_mistaken_states(vllm_config, kv_cache_config)
    groups = known_groups(vllm_config, kv_cache_config)
    sharing = _sharing(vllm_config)
    if sharing > 1 and any(group.window for group, _ in groups):
        raise ValueError(
            f"kvtiers serves decode_context_parallel_size {sharing} with full attention alone. Set "
            "it to 1, or start vLLM without kvtiers."
        )
    if any(group.is_state for group, _ in groups):
        _refuse_states(vllm_config, groups)
    plain = len(groups) == 1 and groups[0][0].window is None
    if not plain and not REPORTS_FAILED_REQUESTS:
        raise ValueError(
            "kvtiers can't serve a model with sliding windows on this vLLM, which does not accept "
            "failed loads of it. Start vLLM with --disable-hybrid-kv-cache-manager, or use vLLM "
            "0.30 or later."
        )
    return groups


def known_groups(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
) -> list[tuple[KVGroup, list[str]]]:
    """Return the KV cache groups and their layers, whether kvtiers serves them or not. Raises
    ValueError for a group of an unknown kind."""
    return [
        (_group(i, group, _sharing(vllm_config)), sorted(group.layer_names))
        for i, group in enumerate(kv_cache_config.kv_cache_groups)
    ]


def _sharing(vllm_config: VllmConfig) -> int:
    """How many ranks share the tokens of a block."""
    return getattr(vllm_config.parallel_config, "decode_context_parallel_size", 1)


def refuse_settings(vllm_config: VllmConfig) -> None:
    """Raise ValueError for what the engine's settings alone show that it can't be served."""
    refuse_model(vllm_config)
    kind = vllm_config.device_config.device_type
    if kind not in ("cpu", "cuda"):  # as AMD's are called, too
        raise ValueError(
            f"kvtiers does not copy KV on a device of kind {kind}. Let vLLM's OffloadingConnector "
            "keep its blocks in the tiers, or start vLLM without kvtiers."
        )
    parallel = vllm_config.parallel_config
    for axis, why in (("decode", WHY_OLD), ("prefill", "it was never run so")):
        name = f"{axis}_context_parallel_size"
        if why and (size := getattr(parallel, name, 1)) > 1:
            raise ValueError(
                f"kvtiers does not serve {name} {size}: {why}. Set it to 1, or start vLLM without "
                "kvtiers."
            )
    # Ranks before the last would never store: when it speculates, the V1 runner tells a rank to
    # save after the drafter has run, which is the last rank's part.
    is_v2 = getattr(vllm_config, "use_v2_model_runner", False)
    if _speculates_in_a_pipeline(vllm_config) and not is_v2:
        raise ValueError(
            "kvtiers does not serve speculative decoding with pipeline parallelism on vLLM's V1 "
            "model runner, which lets the last rank alone store. Leave one of the two out."
        )
    if getattr(vllm_config, "is_mm_encoder_only", False):
        raise ValueError("an engine that only encodes images has no KV: start it without kvtiers.")
    if getattr(parallel, "enable_fault_tolerance", False):
        raise ValueError(
            "with --enable-fault-tolerance vLLM goes on after a step that failed, and finds blocks "
            "that were never computed in its own prefix cache. Leave it out, or start vLLM without "
            "kvtiers."
        )
    if getattr(parallel, "enable_elastic_ep", False) and parallel.all2all_backend != "nixl_ep":
        raise ValueError(
            "with --enable-elastic-ep vLLM captures graphs again while it serves, which copies of "
            "other threads break. Set --all2all-backend nixl_ep, or start vLLM without kvtiers."
        )
    launcher = getattr(parallel, "distributed_executor_backend", None)
    if launcher == "external_launcher" and parallel.world_size > 1:
        raise ValueError(
            "kvtiers does not serve several ranks of external_launcher, each of which has a "
            "scheduler of its own. Let vLLM start them, or start vLLM without kvtiers."
        )


def _speculates_in_a_pipeline(vllm_config: VllmConfig) -> bool:
    has_drafts = getattr(vllm_config, "speculative_config", None) is not None
    return has_drafts and getattr(vllm_config.parallel_config, "pipeline_parallel_size", 1) > 1


def _refuse_states(vllm_config: VllmConfig, groups: list[tuple[KVGroup, list[str]]]) -> None:
    """Raise ValueError where the states of recurrent layers can't be served."""
    why = WHY_OLD
    if not why and len({group.tokens for group, _ in groups}) > 1:
        why = "their blocks have another size than those of attention"
    if not why and _speculates_in_a_pipeline(vllm_config):
        # They learn how many drafts were taken when the block was stored already.
        why = "with drafts, ranks before a pipeline's last keep states where they belong too late"
    if why:
        names = next(layers for group, layers in groups if group.is_state)
        raise ValueError(
            f"kvtiers can't serve this model's recurrent layers ({', '.join(names[:3])}, ...): "
            f"{why}."
        )


def refuse_mistaken_states(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raise ValueError where vLLM itself mistakes states. A step of Mamba 2 may begin within a
    block and go on past the block's end: vLLM 0.32 and 0.33 then keep the state that the step began
    with as the state at that end."""
    unit = getattr(vllm_config.cache_config, "prefix_match_unit", None)
    for spec in (spec for group in kv_cache_config.kv_cache_groups for spec in _specs(group)):
        if unit and unit < spec.block_size and getattr(spec, "num_prefill_checkpoint_blocks", 0):
            raise ValueError(
                f"with prefix_match_unit {unit} vLLM mistakes states of this model, and answers "
                "wrongly by itself. Leave --prefix-match-unit out."
            )


def overwrites_early(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> bool:
    """Return whether a step overwrites blocks before it calls `handle_preemptions`: Model Runner V2
    moves states of recurrent layers before, and zeroes their pages and those of mixed precision."""
    is_v2 = bool(getattr(vllm_config, "use_v2_model_runner", False))
    return is_v2 and bool(getattr(kv_cache_config, "needs_kv_cache_zeroing", False))


def refuse_model(vllm_config: VllmConfig) -> None:
    """Raise ValueError for a model whose prefixes vLLM itself can't reuse, or have loaded."""
    model = vllm_config.model_config
    for config in (getattr(vllm_config, "aux_output_config", None), model):
        if getattr(config, "enable_return_routed_experts", False):
            raise ValueError(
                "with --enable-return-routed-experts vLLM ends where a prefix is loaded, or "
                "returns experts of other tokens: it keeps them beside its own cache alone. Leave "
                "it out, or start vLLM without kvtiers."
            )
    supported = getattr(model, "is_prefix_caching_supported", True)
    if not supported or getattr(model, "is_diffusion", False):
        raise ValueError(
            f"the KV of {model.model} can't be reused: its answers need every token of a prompt "
            "computed, its KV depends on later tokens, or it has no attention. Start vLLM without "
            "kvtiers."
        )
    _refuse_mistaken_prefixes(vllm_config)
    _refuse_whole_prompts(vllm_config)


def _refuse_mistaken_prefixes(vllm_config: VllmConfig) -> None:
    """Raise ValueError where vLLM answers wrongly behind a prefix that it finds. Over TurboQuant's
    and UltraQuant's KV it computes a step as if no prompt had a prefix, once the longest part that
    it computes of one is as long as the longest prompt. It learns where the tokens behind a pruned
    video are from the encoder, which a prefix with that video does not run. And of loops with one
    cache (0.33) all but the last see other KV of a step's own tokens than of those before."""
    dtype, model = str(vllm_config.cache_config.cache_dtype), vllm_config.model_config
    media, what = model.multimodal_config, ""
    if dtype.startswith(("turboquant", "ultraquant")):
        what = f"--kv-cache-dtype {dtype}"
    elif media is not None and model.uses_mrope and media.is_multimodal_pruning_enabled():
        what = f"--video-pruning-rate for {model.model}"
    elif getattr(model.hf_config, "recurrent_kv_cache_mode", "") == "last_loop":
        what = f"recurrent_kv_cache_mode last_loop of {model.model}"
    if what:
        raise ValueError(
            f"with {what} vLLM mistakes prefixes, and answers wrongly by itself. Leave it out, or "
            "start vLLM without kvtiers."
        )


def _refuse_whole_prompts(vllm_config: VllmConfig) -> None:
    """Raise ValueError for latent attention on a processor without AMX: vLLM's kernel for a prompt
    looks at nothing before it there, so that what follows loaded blocks would be computed wrongly.
    vLLM turns chunked prefill and its own prefix cache off for that, but no connector."""
    latent = getattr(vllm_config.model_config, "use_mla", False)
    if not latent or vllm_config.device_config.device_type != "cpu":
        return
    if not vllm_config.scheduler_config.enable_chunked_prefill:
        raise ValueError(
            f"kvtiers can't serve {vllm_config.model_config.model} here: without chunked prefill, "
            "which on the CPU needs AMX, vLLM's latent attention computes each prompt as a whole "
            "and does not look at what was loaded. Use a processor with AMX and leave "
            "--no-enable-chunked-prefill out, or start vLLM without kvtiers."
        )


def _specs(group: Any) -> Any:
    """How each layer of a group keeps its KV, in turn."""
    return getattr(group.kv_cache_spec, "kv_cache_specs", {0: group.kv_cache_spec}).values()


def _group(index: int, group: Any, sharing: int) -> KVGroup:
    """`sharing`: ranks that each keep a part of a block's tokens, in a paged block of their own."""
    spec = group.kv_cache_spec
    kinds = [*map(_kind, _specs(group))]
    odd = sorted({kind for kind in kinds if isinstance(kind, str)})
    served = {kind for kind in kinds if not isinstance(kind, str)}
    if not getattr(group, "enable_kv_transfer", True):
        odd.append("layers that vLLM itself excludes from transfers")
    if odd or len(served) != 1:
        raise ValueError(
            "kvtiers serves full attention, sliding windows and recurrent states. KV cache group "
            f"{index} of this model has {', '.join(odd) or 'layers of several kinds'} "
            f"(layers {', '.join(group.layer_names[:3])}, ...): start vLLM without kvtiers."
        )
    tokens = spec.block_size
    if sharing > 1:
        tokens = kv_cache_utils.resolve_dcp_kv_block_size(spec, sharing)
    return served.pop()._replace(tokens=tokens)


def _kind(spec: Any) -> KVGroup | str:
    """Return how a layer's KV is kept, and of a layer that can't be served the name of its kind.
    Raises ValueError for states that can be served, with other settings."""
    name = type(spec).__name__
    if getattr(spec, "non_causal", False):
        return f"non-causal {name}"
    # Of DeepSeek V4 a state stands for some tokens of a block, all of them before the block's end.
    per_state = 1 if name in _STATE else getattr(spec, "tokens_per_state", 1)
    if not isinstance(per_state, int) or not getattr(spec, "prefix_cacheable", True):
        return f"pooled or uncacheable {name}"
    if name in _FULL:
        return KVGroup(spec.block_size)
    if name in _WINDOW:
        window = spec.sliding_window + getattr(spec, "extra_retained_tokens", 0)
        return KVGroup(spec.block_size, int(window))
    if name in _STATE:
        if spec.mamba_cache_mode != "align":
            raise ValueError(
                "kvtiers serves recurrent states of mamba_cache_mode align, not "
                f"{spec.mamba_cache_mode}. Start vLLM with --enable-prefix-caching, and without "
                "--mamba-cache-mode."
            )
        return KVGroup(spec.block_size, spec.block_size, is_state=True)
    return name


def goes_on_right(vllm_config: VllmConfig, has_states: bool) -> bool:
    """Return whether a request that goes on after its answer has KV of the tokens that its hashes
    say. vLLM drops an answer's last token then: before 0.32 not from the hashes and, before 0.33
    without asynchronous scheduling, not the KV of drafts behind it. And a step in flight, or
    drafts, have taken a state of recurrent layers further."""
    release = release_of(vllm_version) or NEWEST
    drafts = vllm_config.speculative_config is not None
    is_async = vllm_config.scheduler_config.async_scheduling
    if has_states and (is_async or drafts):
        return False
    return release >= (0, 33) or (release >= (0, 32) and (is_async or not drafts))


def drops_last(vllm_config: VllmConfig) -> bool:
    """Return whether vLLM recomputes the last block of each cached prefix, as it does when it
    speculates with a drafter of certain kinds (EAGLE, MTP)."""
    speculative = vllm_config.speculative_config
    if speculative is None:
        return False
    # Older engines have no setting against it.
    drops = getattr(speculative, "use_eagle_block_drop", speculative.use_eagle)
    return bool(drops())


def block_sizes(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> tuple[int, int]:
    """Return the tokens of a block of the scheduler, and per entry of `Request.block_hashes`."""
    block, each_hash = kv_cache_utils.resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    return block, each_hash
