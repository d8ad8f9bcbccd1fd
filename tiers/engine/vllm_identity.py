"""The late facts of a vLLM engine: those of its layers and of its weights."""

from __future__ import annotations

import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tiers.contract.engine_info import ALONE
from tiers.engine.identity.digests import Digests, FileChanged
from tiers.engine.identity.facts import SOURCES, BackgroundFacts, layer_facts
from tiers.engine.identity.weights import NoIdentity, Source, format_of, identity, source, within
from tiers.engine.plugin import BOOTED
from tiers.engine.vllm_watch import this_worker

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

_alone: dict[tuple[int, str], str] = {}
"""A random fact for engines that share with nobody, by process and engine. By process, since a fork
inherits its parent's."""


def late_facts(
    vllm_config: VllmConfig, salt: str, layers: Callable[[], Mapping[str, str]] | None = None
) -> BackgroundFacts:
    """Return the facts of a worker's layers, and later those of its weights. KV of weights without
    an identity is not shared, unless the operator has named them by the chain's `salt`. `layers`
    returns the facts of the layers where the caller is no worker."""
    key = os.getpid(), str(vllm_config.instance_id)
    alone = _alone.setdefault(key, ALONE + secrets.token_hex(16))
    return BackgroundFacts(
        layers or partial(layer_facts, vllm_config, this_worker()),
        partial(_weights, vllm_config, salt, alone),
        {"weights": alone},
    )


def _weights(
    vllm_config: Any, salt: str, alone: str, layers: Mapping[str, str]
) -> Mapping[str, str]:
    """Return the fact of an engine's weights; `layers`: those of its layers."""
    began, since = time.monotonic(), _process_began()
    digests = Digests(cache_folder(os.environ))
    model, load = vllm_config.model_config, vllm_config.load_config
    scales = getattr(model.multimodal_config, "mm_encoder_fp8_scale_path", None)
    try:
        if os.environ.get("VLLM_ELASTIC_EP_SCALE_UP_LAUNCH", "0") != "0":
            raise NoIdentity("came from ranks that ran before this one, by elastic EP")
        sources = [source(model, load, _hub_folder(load), since)]
        # These loaders read none of the other sources that a model names.
        reads_more = not format_of(load).startswith(("sharded_state", "runai_streamer"))
        more = layers.get(SOURCES, "[]") if reads_more else "[]"
        for name, revision, folder in map(json.loads, json.loads(more)):
            other = SimpleNamespace(model=name, revision=revision, seed=model.seed)
            whole = source(other, load, _hub_folder(load), since)
            sources.append(whole if folder is None else within(whole, folder))
        if scales is not None:  # of the images' encoder; a calibration writes such a file
            sources.append(Source(files=(Path(scales),)))
        found = " ".join(identity(one, digests.of, since) for one in sources)
    except NoIdentity as error:
        if salt:
            where = getattr(model, "model_weights", "") or model.model
            return {"weights": f"as the salt says: {where} {model.revision}"}
        why = f"{error}, so they can't be distinguished from others"
        remedy = "name the weights by `salt` in the chain, and change that name when they change"
    except (OSError, FileChanged) as error:
        why = f"can't be identified ({error})"
        remedy = "start the engine again when the files can be read and no longer change"
    else:
        logger.info("the model's weights were identified in %.1f s", time.monotonic() - began)
        return {"weights": found}
    logger.warning(
        "the model's weights %s: no other process finds what this engine stores, nor does this one "
        "after a restart. To share it, %s.",
        why,
        remedy,
    )
    return {"weights": alone}


def cache_folder(environment: Mapping[str, str]) -> Path | None:
    """Return the folder for digests of weights; None for a user without a home."""
    base = environment.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return Path(base) / "kvtiers" / "weights"
    try:
        return Path.home() / ".cache" / "kvtiers" / "weights"
    except RuntimeError:
        return None


def _hub_folder(load: Any) -> Path | None:
    """Return the folder for what the engine loads from the model hub; None: another hub's."""
    if os.environ.get("VLLM_USE_MODELSCOPE", "").strip().lower() in ("1", "true"):
        return None
    if load.download_dir:
        return Path(load.download_dir)
    try:
        from huggingface_hub.constants import HF_HUB_CACHE
    except ImportError:
        return None
    return Path(HF_HUB_CACHE)


def _process_began() -> float:
    """Return when this process was started, as files' times; the earlier, if the clock was set."""
    with open("/proc/self/stat") as file:
        # The fields follow the program's name: any text, in parentheses.
        ticks = int(file.read().rpartition(")")[2].split()[19])
    booted = min(BOOTED, time.time() - time.clock_gettime(time.CLOCK_BOOTTIME))
    return booted + ticks / os.sysconf("SC_CLK_TCK")
