"""All that makes KV interchangeable between engines, read from an engine's configuration."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import logging
import platform
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from tiers.engine.identity.config_fields import FIELDS, PARTS

logger = logging.getLogger(__name__)

_VOLATILE = ("_name_or_path", "transformers_version")
_MISSING = object()


def config_facts(vllm_config: Any, engine_version: str) -> dict[str, str]:
    """Name every fact that the configuration tells, but for weights, layout and rank.

    Two engines share blocks only where all of them agree, so that a changed model, dtype or
    engine version starts with an empty cache and never meets KV of another. A field that this
    kvtiers does not know is a fact as well, unless it has its default.
    """
    model = vllm_config.model_config
    facts = {
        "engine": engine_version,
        "config": config_digest(model.hf_config),
        "long_rope": _long_rope(model),
        **dict(_keyed("VllmConfig", vllm_config)),
    }
    unknown = dict(_unknown("VllmConfig", vllm_config))
    if unknown:
        logger.info(
            "kvtiers does not know %s: blocks are shared only with engines that have them alike",
            ", ".join(unknown),
        )
    return {**facts, **unknown}


def _keyed(name: str, config: Any) -> Iterator[tuple[str, str]]:
    for field in FIELDS[name].keyed:
        value = getattr(config, field, _MISSING)
        if value is not _MISSING:
            yield f"{name}.{field}", text_of(value)
    for part, inner in _parts(name, config):
        yield from _keyed(part, inner)


def _unknown(name: str, config: Any) -> Iterator[tuple[str, str]]:
    """Fields that the table does not have, of an engine that is newer, or not quite itself."""
    for field in dataclasses.fields(config) if dataclasses.is_dataclass(config) else ():
        value = text_of(getattr(config, field.name, None))
        if field.name not in FIELDS[name].known and value != _default(field):
            yield f"{name}.{field.name}", value
    for part, inner in _parts(name, config):
        yield from _unknown(part, inner)


def _parts(name: str, config: Any) -> Iterator[tuple[str, Any]]:
    for field, part in PARTS.get(name, {}).items():
        inner = getattr(config, field, None)
        if inner is not None:
            yield part, inner


def _default(field: dataclasses.Field[Any]) -> str | None:
    """A field's default as text; None: it has none."""
    if field.default is not dataclasses.MISSING:
        # Some are made of what a validator takes.
        default = getattr(field.default, "default", field.default)
        return text_of(default)
    if field.default_factory is not dataclasses.MISSING:
        return text_of(field.default_factory())
    return None


def text_of(value: object) -> str:
    """Text that is equal for equal settings, in every process. That of an object which does not
    say what it is has its address in it, and is equal to none."""
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
    """Digest of a model's architecture and its overrides."""
    fields = {k: v for k, v in hf_config.to_dict().items() if k not in _VOLATILE}
    text = json.dumps(fields, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _long_rope(model: Any) -> str:
    """Which of two sets of rotary factors a model of that kind (Phi-3) takes: vLLM chooses by the
    longest request it is started for. "" for other models."""
    text = model.hf_text_config
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    name = "original_max_position_embeddings"
    original = rope.get(name) or getattr(text, name, None)
    return str(model.max_model_len > int(original)) if original else ""


def attention_facts(vllm_config: Any) -> dict[str, str]:
    """How the bytes of a block are packed, beyond shapes and strides, on this device.

    A kernel for one instruction set lays KV out in its own way inside a tensor of the same shape.
    Asked once the engine has made its layers and what builds their metadata, which is when it
    registers its paged KV: only then does a layer of the CPU know its instruction set.
    """
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
    ]


def _device(vllm_config: Any, layers: list[Any]) -> str:
    kind = str(vllm_config.device_config.device_type)
    if kind == "cuda":
        return f"{kind} {torch.cuda.get_device_capability()} {torch.version.hip or ''}"
    if kind != "cpu":
        return f"{kind} {platform.machine()}"
    # Which instructions there are is a fact of its own only where no layer tells which it uses.
    told = [layer for layer in layers if hasattr(layer, "get_attn_backend")]
    amx = "" if all(hasattr(layer, "isa") for layer in told) else torch.cpu._is_amx_tile_supported()
    return f"{kind} {platform.machine()} {torch.backends.cpu.get_cpu_capability()} {amx}"
