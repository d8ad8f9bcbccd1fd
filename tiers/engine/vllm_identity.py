"""The facts of a vLLM engine: what its configuration tells, its layers, and its weights."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiers.engine.identity.digests import Digests, FileChanged
from tiers.engine.identity.facts import attention_facts
from tiers.engine.identity.late import LateFacts
from tiers.engine.identity.weights import NoIdentity, identity, source

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

_alone: dict[tuple[int, str], str] = {}
"""What makes KV this process's own, by process, since a fork has its parent's, and by engine."""


def late_facts(vllm_config: VllmConfig, salt: str) -> LateFacts:
    """Facts of a worker that are there once its layers are, and those of its weights later.

    Weights without an identity are shared by nobody, but for engines whose operator has named
    them by the chain's `salt`.
    """
    key = os.getpid(), str(vllm_config.instance_id)
    alone = _alone.setdefault(key, f"alone: {secrets.token_hex(16)}")
    return LateFacts(
        partial(attention_facts, vllm_config),
        partial(_weights, vllm_config, salt, alone),
        {"weights": alone},
    )


def _weights(vllm_config: Any, salt: str, alone: str) -> Mapping[str, str]:
    began, since = time.monotonic(), _process_began()
    digests = Digests(cache_folder(os.environ))
    model, load = vllm_config.model_config, vllm_config.load_config
    hub = _hub_folder(load)
    facts = _draft_weights(vllm_config, hub, digests, since)
    try:
        facts["weights"] = identity(source(model, load, hub, since), digests.of, since)
    except NoIdentity as error:
        if salt:
            where = getattr(model, "model_weights", "") or model.model
            return {**facts, "weights": f"as the salt says: {where} {model.revision}"}
        logger.warning(
            "the model's weights %s, so nothing tells them from others: what this engine stores "
            "is found by no other process, nor after a restart. To share it, name the weights by "
            "`salt` in the chain, and change that name with them.",
            error,
        )
        return {**facts, "weights": alone}
    except (OSError, FileChanged) as error:
        logger.warning(
            "the model's weights can't be identified (%s): what this engine stores is found by no "
            "other process, nor after a restart. An engine that is started now shares again, once "
            "the files can be read and stay as they are.",
            error,
        )
        return {**facts, "weights": alone}
    logger.info("the model's weights were identified in %.1f s", time.monotonic() - began)
    return facts


def _draft_weights(
    vllm_config: Any, hub: Path | None, digests: Digests, since: float
) -> dict[str, str]:
    """Those of a draft model. Its KV is in the same blocks; that of others would be a bad draft,
    never a wrong token, so weights without an identity do no harm."""
    speculative = vllm_config.speculative_config
    draft = getattr(speculative, "draft_model_config", None)
    if draft is None or draft.model == vllm_config.model_config.model:
        return {}
    try:
        found = source(draft, vllm_config.load_config, hub, since)
        return {"draft": identity(found, digests.of, since)}
    except (NoIdentity, OSError, FileChanged) as error:
        logger.info("the draft model's weights %s", error)
        return {}


def cache_folder(environment: Mapping[str, str]) -> Path | None:
    """Where digests of weights are kept; None for a user without a home."""
    base = environment.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return Path(base) / "kvtiers" / "weights"
    try:
        return Path.home() / ".cache" / "kvtiers" / "weights"
    except RuntimeError:
        return None


def _hub_folder(load: Any) -> Path | None:
    """Where the engine keeps what it loads from the model hub."""
    if load.download_dir:
        return Path(load.download_dir)
    try:
        from huggingface_hub.constants import HF_HUB_CACHE
    except ImportError:
        return None
    return Path(HF_HUB_CACHE)


def _process_began() -> float:
    """When this process was started, in seconds of the clock of files; it loads weights later."""
    with open("/proc/self/stat") as file:
        # Behind the program's name, which may hold anything, in parentheses.
        ticks = int(file.read().rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age
