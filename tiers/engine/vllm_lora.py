"""How a vLLM worker loads LoRA adapters, and how kvtiers sees it."""

from __future__ import annotations

from functools import partial, wraps
from typing import TYPE_CHECKING, Any

from vllm import __version__ as vllm_version
from vllm.logger import init_logger

from tiers.contract.adapters import NO_ADAPTERS, LoadedAdapters, RequestMarks
from tiers.engine import loaded_adapters
from tiers.engine.loaded_adapters import SeenAdapters
from tiers.engine.request_marks import MarksOfRequests
from tiers.engine.versions import NEWEST, release_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)

HASHES_HAVE_PATHS = (release_of(vllm_version) or NEWEST) >= (0, 31)
"""Whether block hashes contain an adapter's path beside its name."""
name_of = partial(loaded_adapters.name_of, has_path=HASHES_HAVE_PATHS)

_seen: dict[int, tuple[Any, SeenAdapters]] = {}
"""By the identity of an engine's configuration of adapters, which is in the first place. All
engines of a process load adapters by the same class."""


def request_marks(vllm_config: VllmConfig) -> RequestMarks:
    """Return the marks of an engine's requests, for its scheduler."""
    return MarksOfRequests(vllm_config.parallel_config.world_size, name_of)


def seen_adapters(vllm_config: VllmConfig) -> LoadedAdapters:
    """Return the adapters that an engine loads on this worker from now on.

    vLLM tells connectors nothing of them, so the one method by which it loads an adapter and makes
    sure of it in every step is wrapped.
    """
    config = vllm_config.lora_config
    if config is None:
        return NO_ADAPTERS
    seen = SeenAdapters(name_of)
    try:
        from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager as Manager

        if not getattr(Manager.add_adapter, "is_seen", False):
            Manager.add_adapter = _seeing(Manager.add_adapter)
    except (ImportError, AttributeError) as error:
        logger.warning("no LoRA adapter's KV is cached: what is loaded can't be seen: %s", error)
        return NO_ADAPTERS
    _seen[id(config)] = config, seen
    return seen


def _seeing(add_adapter: Any) -> Any:
    @wraps(add_adapter)
    def adding(manager: Any, lora_request: Any) -> Any:
        config, seen = _seen.get(id(manager.lora_config), (None, None))
        if seen is None or config is not manager.lora_config:
            return add_adapter(manager, lora_request)
        number = lora_request.lora_int_id
        reads = lora_request.load_inplace or number not in manager.list_adapters()
        stamp = seen.before(lora_request) if reads else b""
        answer = add_adapter(manager, lora_request)
        seen.after(lora_request, manager._adapter_manager.get_adapter(number), stamp)
        return answer

    adding.is_seen = True  # type: ignore[attr-defined]
    return adding
