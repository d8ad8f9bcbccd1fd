"""Facts of a model as it was made: what it says of itself after the engine has changed its
configuration, of which no field of the engine's own tells.

Some models decide how they compute while they are made, by the longest request or by the generation
config, and note it in a copy of their configuration.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from tiers.engine.identity.facts import config_digest, text_of

_SAMPLING = (
    "_from_model_config assistant_confidence_threshold assistant_early_exit "
    "assistant_ensemble_weight assistant_lookbehind bad_words_ids begin_suppress_tokens "
    "bos_token_id cache_config cache_implementation compile_config constraints "
    "continuous_batching_config decoder_start_token_id disable_compile diversity_penalty do_sample "
    "dola_layers early_stopping encoder_no_repeat_ngram_size encoder_repetition_penalty "
    "eos_token_id epsilon_cutoff eta_cutoff exponential_decay_length_penalty force_words_ids "
    "forced_bos_token_id forced_eos_token_id guidance_scale is_assistant length_penalty low_memory "
    "max_cache_len max_length max_matching_ngram_size max_new_tokens max_time min_length "
    "min_new_tokens min_p no_repeat_ngram_size num_assistant_tokens num_assistant_tokens_schedule "
    "num_beam_groups num_beams num_return_sequences output_attentions output_hidden_states "
    "output_logits output_scores pad_token_id penalty_alpha prefill_chunk_size "
    "prompt_lookup_num_tokens remove_invalid_values renormalize_logits repetition_penalty "
    "return_dict_in_generate sequence_bias speculation_type stop_strings suppress_tokens "
    "target_lookbehind temperature token_healing top_h top_k top_p transformers_version typical_p "
    "use_cache use_mtp watermarking_config"
)
SAMPLING_KEYS = frozenset(_SAMPLING.split())
"""Keys of a generation config that decide which tokens come next, or how many. Any other is a
fact."""


def made_facts(model: Any) -> dict[str, str]:
    """Return what a model that was made says of itself: the configurations that its modules hold,
    and how each kind of rotary embedding was made."""
    configs = {id(one): one for one in _configs(model)}
    rotary = {text_of(_simple(one)) for one in model.modules() if "Rotary" in type(one).__name__}
    return {
        "made": json.dumps(sorted({config_digest(one) for one in configs.values()})),
        "rotary": json.dumps(sorted(rotary)),
    }


def unseen_facts(model_config: Any) -> dict[str, str]:
    """Return what stands for those of a model that can't be seen."""
    return {"made": f"not seen, for requests of {model_config.max_model_len} tokens"}


def generation_facts(model_config: Any) -> dict[str, str]:
    """Return what the generation config says of more than sampling."""
    read = getattr(model_config, "try_get_generation_config", dict)
    said: Mapping[str, Any] = {
        **read(),
        **(getattr(model_config, "override_generation_config", None) or {}),
    }
    decides = {key: value for key, value in said.items() if key not in SAMPLING_KEYS}
    return {"generation": text_of(decides)} if decides else {}


def _configs(model: Any) -> Iterator[Any]:
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "to_dict"):
            yield config


def _simple(module: Any) -> dict[str, Any]:
    values = {k: v for k, v in vars(module).items() if isinstance(v, bool | int | float | str)}
    return {"": type(module).__name__, **values}
