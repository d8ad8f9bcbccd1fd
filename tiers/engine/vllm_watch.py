"""A vLLM engine resets its own prefix cache, changes its weights, loads adapters and, before 0.33,
sleeps, and announces none of it to its connectors. kvtiers wraps the objects that do so."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial, wraps
from types import FrameType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from vllm import __version__ as vllm_version
from vllm.logger import init_logger
from vllm.v1.worker.worker_base import WorkerBase

from tiers.contract.marks import NO_ADAPTERS, LoadedAdapters
from tiers.contract.weight_reports import Weights
from tiers.engine import adapter_marks
from tiers.engine.adapter_marks import MarksOfRequests, SeenAdapters
from tiers.engine.model_weights import ModelWeights, before_calls
from tiers.engine.versions import NEWEST, release_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)

HASHES_HAVE_PATHS = (release_of(vllm_version) or NEWEST) >= (0, 31)
"""Whether block hashes contain an adapter's path beside its name, and tell it from a cache salt."""
name_of = partial(adapter_marks.name_of, has_path=HASHES_HAVE_PATHS)

_seen: dict[int, tuple[Any, SeenAdapters]] = {}
"""By the identity of an engine's configuration of adapters, which is in the first place. All
engines of a process load adapters by the same class."""


def caller(kind: type) -> Any:
    """Return the nearest object of a class that is calling us; None: there is none. vLLM hands a
    connector neither its worker nor its scheduler."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if isinstance(owner := frame.f_locals.get("self"), kind):
            return owner
        frame = frame.f_back
    return None


def waker() -> Callable[[], None]:
    """Return what has the engine that is making its scheduler step although it idles; nothing, of
    one that steps when its caller does, or does not show itself."""
    # Here, since workers need none of it.
    from vllm.v1.engine import EngineCoreRequestType
    from vllm.v1.engine.core import EngineCore

    core = caller(EngineCore)

    def wake() -> None:
        if (requests := getattr(core, "input_queue", None)) is not None:
            requests.put_nowait((EngineCoreRequestType.WAKEUP, None))

    return wake


this_worker = partial(caller, WorkerBase)
"""Returns the worker that is making its connector; None: it can't be seen."""


def require_worker(first: Any, now: Any) -> None:
    """Raise ValueError if `now` another worker than the `first` registers its KV: vLLM has one
    connector in a process, and hands it to each engine that starts there. It would copy the first
    one's KV."""
    if now not in (None, first):
        raise ValueError(
            "this process has another engine, or one whose start failed, and kvtiers copies its "
            "KV: shut that one down before, or start this one in a process of its own; "
            "vllm.distributed.kv_transfer.ensure_kv_transfer_shutdown() ends what a start that "
            "failed has left"
        )


def before_resets(
    cache: Any,
    notify: Callable[[], object],
    answered: Callable[[bool], object] = lambda succeeded: None,
) -> None:
    """Call `notify` before each reset of the engine's prefix cache, whether that succeeds or not,
    and `answered` after it.

    Training loops change weights in place and reset that cache alone, which by default does not
    reach connectors. `cache`: what the engine hands to connectors, its cache manager or, in vLLM
    before 0.30, its block pool; or its scheduler.
    """
    if not before_calls(cache, "reset_prefix_cache", notify, answered):
        logger.warning(
            "this vLLM does not show when it resets its prefix cache: after a change of weights, "
            "reset with reset_connector=True"
        )


def fill_scales(vllm_config: Any) -> None:
    """Have the layers of this worker fill the scales of KV that has one for each token and head.
    vLLM's Triton attention fills all of them in its first step, those of loaded blocks too."""
    for layer in vllm_config.compilation_config.static_forward_context.values():
        attention: Any = getattr(layer, "impl", None)
        if getattr(attention, "_is_per_token_head_quant", False) and layer.kv_cache.numel():
            attention._ensure_scale_caches(layer.kv_cache)


def _sleeps(vllm_config: VllmConfig) -> bool:
    """Return whether an engine may sleep, by vLLM's allocator."""
    model = vllm_config.model_config
    return any(getattr(model, f"enable_{by}", False) for by in ("sleep_mode", "cumem_allocator"))


def before_sleeps(vllm_config: VllmConfig, worker: Any, notify: Callable[[], object]) -> None:
    """Call a method, while its object is there, before the memory of the paged KV goes away: a
    trainer may ask the `worker` or vLLM's allocator for that, past the engine, which waits for
    loads. Only from 0.33 does a worker announce it, and the allocator, which is wrapped once for
    all engines of a process, never does."""
    method: Any = notify
    for owner in filter(None, (worker, _allocator() if _sleeps(vllm_config) else None)):
        if (told := vars(owner).get("kvtiers_told")) is None:
            told = owner.kvtiers_told = WeakKeyDictionary()
            for name in ("sleep", "discard"):
                before_calls(owner, name, partial(_tell, told))
        told[method.__self__] = method.__func__


def _tell(told: WeakKeyDictionary[Any, Callable[[Any], object]]) -> None:
    for one, call in [*told.items()]:
        call(one)


def is_asleep(vllm_config: VllmConfig) -> bool:
    """Return whether memory of this process is unmapped, of which a device reads nothing."""
    pages = getattr(_allocator() if _sleeps(vllm_config) else None, "pointer_to_data", {})
    return any(getattr(page, "is_asleep", False) for page in pages.values())


def _allocator() -> Any:
    """Return what all engines of this process sleep by; None: there is none here."""
    try:
        from vllm.device_allocator import get_mem_allocator_instance

        return get_mem_allocator_instance()
    except (ImportError, AssertionError, RuntimeError):
        return None


def worker_weights() -> Weights:
    if (worker := this_worker()) is not None:
        return ModelWeights(worker)
    logger.warning(
        "kvtiers does not see this engine's weights: after each change of them, reset its prefix "
        "cache before the next request"
    )
    return Weights()


def warn_of_hashes(vllm_config: VllmConfig) -> None:
    """Log if clients can find prompts of equal block hashes, with PYTHONHASHSEED or without."""
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if not algorithm.startswith("sha256"):
        why = "clients can find prompts that are answered from each other's KV"
        logger.warning("%s: set --prefix-caching-hash-algo sha256, not %s", why, algorithm)


def marks_of_requests(vllm_config: VllmConfig) -> MarksOfRequests:
    mistakes_salts = vllm_config.lora_config is not None and not HASHES_HAVE_PATHS
    world_size = vllm_config.parallel_config.world_size
    return MarksOfRequests(world_size, name_of, mistakes_salts=mistakes_salts)


def seen_adapters(vllm_config: VllmConfig) -> LoadedAdapters:
    """Return the adapters that an engine loads on this worker from now on. One method loads them,
    and makes sure of them in every step."""
    config = vllm_config.lora_config
    if config is None:
        return NO_ADAPTERS
    try:
        from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager as Manager

        if not getattr(Manager.add_adapter, "is_seen", False):
            Manager.add_adapter = _seeing(Manager.add_adapter)
    except (ImportError, AttributeError) as error:
        logger.warning("no LoRA adapter's KV is cached: what is loaded can't be seen: %s", error)
        return NO_ADAPTERS
    _seen[id(config)] = config, (seen := SeenAdapters(name_of))
    return seen


def _seeing(add_adapter: Any) -> Any:
    @wraps(add_adapter)
    def adding(manager: Any, lora_request: Any) -> Any:
        config, seen = _seen.get(id(manager.lora_config), (None, None))
        if seen is None or config is not manager.lora_config:
            return add_adapter(manager, lora_request)
        number = lora_request.lora_int_id
        reloads = getattr(lora_request, "load_inplace", False)  # that of unsloth has none
        reads = reloads or number not in manager.list_adapters()
        stamp = seen.before(lora_request) if reads else b""
        answer = add_adapter(manager, lora_request)
        seen.after(lora_request, manager._adapter_manager.get_adapter(number), stamp)
        return answer

    adding.is_seen = True  # type: ignore[attr-defined]
    return adding
