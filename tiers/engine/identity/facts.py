"""What keeps two engines' blocks apart? All that KV depends on, read from the configuration."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import logging
import os
import platform
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tiers.concurrency.executors import start_thread
from tiers.engine.identity.config_fields import FIELDS, PARTS, VARIABLES

logger = logging.getLogger(__name__)

SOURCES = "sources"
"""What names from where else than its own files a model loads weights: no fact itself, since the
same may lie elsewhere."""
_VOLATILE = ("_name_or_path", "transformers_version")
_WITHOUT_KV = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")
"""Ways to draft that keep no KV, so that blocks are the same with and without."""
_KERNELS = ("use_aiter", "use_flashinfer")  # of rotary embeddings: others where an engine compiles
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


def config_facts(vllm_config: Any, engine_version: str) -> dict[str, str]:
    """Return every fact of the configuration, except weights, layout and rank. A field that this
    kvtiers does not know is one, too, unless it has its default."""
    configs = [*_configs("VllmConfig", vllm_config)]
    drafts = getattr(vllm_config, "speculative_config", None)
    if getattr(drafts, "method", None) in _WITHOUT_KV:
        configs = [(name, config) for name, config in configs if config is not drafts]
    facts = {
        "engine": engine_version,
        "config": config_digest(vllm_config.model_config.hf_config),
        **{
            f"{name}.{field}": text_of(getattr(config, field))
            for name, config in configs
            for field in FIELDS[name].keyed
            if hasattr(config, field)
        },
    }
    if getattr(drafts, "model", None) == getattr(vllm_config.model_config, "model", None):
        # Its drafter is a part of the model, whose weights stand for it wherever it lies.
        facts.pop("SpeculativeConfig.model", None)
    unknown = {key: value for one in configs for key, value in _unknown(*one)}
    if unknown:
        logger.info(
            "kvtiers does not know %s: blocks are shared only with engines of the same values",
            ", ".join(unknown),
        )
    return {**facts, **unknown}


def _configs(name: str, config: Any) -> Iterator[tuple[str, Any]]:
    """Yield a configuration, and those that it contains, by their classes."""
    yield name, config
    for field, part in PARTS.get(name, {}).items():
        if (inner := getattr(config, field, None)) is not None:
            yield from _configs(part, inner)


def _unknown(name: str, config: Any) -> Iterator[tuple[str, str]]:
    """Yield the fields that the table does not have: the engine is newer, or modified."""
    for field in dataclasses.fields(config) if dataclasses.is_dataclass(config) else ():
        # A known one may refuse to be shown: a model's configuration whose layers differ.
        if field.name not in FIELDS[name].known:
            value = text_of(getattr(config, field.name, None))
            if value != _default(field):
                yield f"{name}.{field.name}", value


def _default(field: dataclasses.Field[Any]) -> str:
    """Return a field's default as text; without one, a text that no setting has."""
    if field.default_factory is not dataclasses.MISSING:
        return text_of(field.default_factory())
    # Some defaults are wrapped, together with a validator.
    return text_of(getattr(field.default, "default", field.default))


def text_of(value: object) -> str:
    """Return text that is equal for equal settings, in every process; that of an object without a
    `repr` of its own contains its address, and equals no other."""
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return text_of({f.name: getattr(value, f.name) for f in dataclasses.fields(value)})
    if isinstance(value, Mapping):
        return json.dumps(sorted((text_of(k), text_of(v)) for k, v in value.items()))
    if isinstance(value, set | frozenset):
        return json.dumps(sorted(map(text_of, value)))
    if isinstance(value, list | tuple):
        return json.dumps([text_of(one) for one in value])
    return str(value)


def config_digest(hf_config: Any) -> str:
    """Digest a model's architecture and its overrides."""
    fields = {k: v for k, v in hf_config.to_dict().items() if k not in _VOLATILE}
    text = json.dumps(fields, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def layer_facts(vllm_config: Any, worker: Any) -> Mapping[str, str]:
    """Return the facts of a worker's layers, its model as it was made, and its environment."""
    config = vllm_config.model_config
    made = unseen_facts(config) if worker is None else made_facts(worker.get_model())
    return {**attention_facts(vllm_config), **made, **generation_facts(config), **variable_facts()}


def attention_facts(vllm_config: Any) -> dict[str, str]:
    """Return how this device's kernels pack the bytes of a block, beyond shapes and strides. Before
    the engine registers its paged KV, a CPU layer does not know its instruction set."""
    layers = vllm_config.compilation_config.static_forward_context
    by_kind: dict[str, list[str]] = {}
    for name, layer in layers.items():
        if hasattr(layer, "get_attn_backend"):
            by_kind.setdefault(json.dumps(_attention(layer)), []).append(name)
    kinds = sorted((kind, sorted(names)) for kind, names in by_kind.items())
    return {"attention": json.dumps(kinds), "device": _device(vllm_config, list(layers.values()))}


def _attention(layer: Any) -> list[str]:
    backend = layer.get_attn_backend()
    return [
        type(layer).__name__,
        f"{backend.__module__}.{backend.__qualname__}",
        type(getattr(layer, "impl", None)).__name__,
        str(getattr(layer, "isa", "")),
        str(getattr(layer, "kv_cache_dtype", "")),
        *_states(layer),
    ]


def _states(layer: Any) -> Iterator[str]:
    """Yield how the states of a recurrent layer lie in its pages. The engine registers those as
    plain bytes, and VLLM_SSM_CONV_STATE_LAYOUT, which vLLM may set itself, turns a state around
    without changing how many there are."""
    if hasattr(layer, "get_state_shape"):
        yield text_of([list(shape) for shape in layer.get_state_shape()])
        yield text_of(list(layer.get_state_dtype()))


def _device(vllm_config: Any, layers: list[Any]) -> str:
    kind = str(vllm_config.device_config.device_type)
    if kind == "cuda":
        return f"{kind} {torch.cuda.get_device_capability()} {torch.version.hip or ''}"
    if kind != "cpu":
        return f"{kind} {platform.machine()}"
    # AMX is a fact of its own only if some layer does not show which instructions it uses.
    is_shown = all(hasattr(one, "isa") for one in layers if hasattr(one, "get_attn_backend"))
    amx = "" if is_shown else torch.cpu._is_amx_tile_supported()
    return f"{kind} {platform.machine()} {torch.backends.cpu.get_cpu_capability()} {amx}"


def made_facts(model: Any) -> dict[str, str]:
    """Return what a model that was made says of itself: the configurations that its modules hold,
    how each kind of rotary embedding was made and, where there are such, whose other code it is,
    how its experts quantise what they are given, and from where else it loads weights."""
    modules = [*model.modules()]
    held = (getattr(module, "config", None) for module in modules)
    configs = {id(one): one for one in held if hasattr(one, "to_dict")}
    rotary = {text_of(_simple(one)) for one in modules if "Rotary" in type(one).__name__}
    made = {config_digest(one) for one in configs.values()}
    found = {"made": made, "rotary": rotary}
    some = {"code": _other_code(modules), "experts": _experts(modules), SOURCES: _sources(model)}
    found |= {name: texts for name, texts in some.items() if texts}
    return {name: json.dumps(sorted(texts)) for name, texts in found.items()}


def _other_code(modules: Iterable[Any]) -> set[str]:
    """Return the packages that the classes of modules are of, but vLLM and PyTorch, each with its
    version; of one without, the files with their digests."""
    found = set[str]()
    for name in {type(one).__module__ for one in modules}:
        package = name.partition(".")[0]
        if package in ("vllm", "torch"):
            continue
        version = getattr(sys.modules.get(package), "__version__", "")
        file = getattr(sys.modules.get(name), "__file__", None)
        if not version and file is not None:  # its package may be named after where it lies
            version = hashlib.blake2b(Path(file).read_bytes(), digest_size=16).hexdigest()
            package = name.rpartition(".")[2]
        found.add(f"{package} {version}")
    return found


def _experts(modules: Iterable[Any]) -> set[str]:
    """Return how experts quantise: vLLM chooses that by how they are shared out, too. Those of
    DeepGEMM change their weights for it."""
    found = set[str]()
    for method in (getattr(one, "quant_method", None) for one in modules):
        quantised = getattr(method, "moe_quant_config", None)
        if quantised is not None and quantised.quant_dtype is not None:
            kernel = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
            is_deep = "DeepGemm" in type(kernel).__name__
            found.add(text_of([quantised.quant_dtype, quantised.block_shape, is_deep]))
    return found


def _sources(model: Any) -> set[str]:
    """Return from where a model loads more weights: the name or path, the revision, and a folder in
    there."""
    more = getattr(model, "secondary_weights", ())
    return {json.dumps([one.model_or_path, one.revision, one.subfolder]) for one in more}


def unseen_facts(model_config: Any) -> dict[str, str]:
    """Return what stands for those of a model that can't be seen."""
    return {"made": f"not seen, for requests of {model_config.max_model_len} tokens"}


def generation_facts(model_config: Any) -> dict[str, str]:
    """Return what the generation config says of more than sampling."""
    read = getattr(model_config, "try_get_generation_config", dict)
    generation: Mapping[str, Any] = {
        **read(),
        **(getattr(model_config, "override_generation_config", None) or {}),
    }
    decides = {key: value for key, value in generation.items() if key not in SAMPLING_KEYS}
    return {"generation": text_of(decides)} if decides else {}


def variable_facts() -> dict[str, str]:
    """Return the variables that are set, and decide what vLLM computes without a setting's word."""
    return {name: value for name, value in os.environ.items() if name.startswith(VARIABLES)}


def _simple(module: Any) -> dict[str, Any]:
    values = {k: v for k, v in vars(module).items() if isinstance(v, bool | int | float | str)}
    return {"": type(module).__name__, **{k: v for k, v in values.items() if k not in _KERNELS}}


class BackgroundFacts:
    """Finds the facts of a worker: quickly those of its layers, in the background the others. The
    first `known` calls `at_once`, then `slowly`, with those, on a daemon thread, for which no
    ending process waits. `otherwise`: the facts if either fails; they must be no other engine's."""

    def __init__(
        self,
        at_once: Callable[[], Mapping[str, str]],
        slowly: Callable[[Mapping[str, str]], Mapping[str, str]],
        otherwise: Mapping[str, str],
    ) -> None:
        self._at_once = at_once
        self._slowly = slowly
        self._found = otherwise
        self._early: Mapping[str, str] | None = None
        self._done = threading.Event()

    def known(self, seconds: float = 0.0) -> Mapping[str, str] | None:
        """Return all facts; None if they are unknown after `seconds`. Called by one thread."""
        if self._early is None:
            self._early = self._begin()
        if not self._done.wait(seconds):
            return None
        early = {name: fact for name, fact in self._early.items() if name != SOURCES}
        return {**early, **self._found}

    def _begin(self) -> Mapping[str, str]:
        try:
            early = dict(self._at_once())
            start_thread(partial(self._find, early), "facts")
        # Layers may come from any model, platform or plugin, so their errors can't be listed. This
        # thread is starting the engine: without this, a cache's fact would keep it from serving.
        except Exception:
            logger.exception(
                "the engine's layers can't be identified: no other process finds what it stores, "
                "nor does this one after a restart"
            )
            self._done.set()
            return {}
        return early

    def _find(self, early: Mapping[str, str]) -> None:
        try:
            self._found = dict(self._slowly(early))
        finally:
            self._done.set()
