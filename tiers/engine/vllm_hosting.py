"""Whose KV does vLLM's OffloadingConnector hold? HostingEngine identifies it, and sees it change.

All of it is asked in the scheduler's process: of the workers by vLLM's own calls to them.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from vllm import __version__ as vllm_version
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)
from vllm.v1.core.sched.interface import SchedulerInterface
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import RequestStatus

from tiers.block import namespace
from tiers.connector.policy.load_room import LoadRoom
from tiers.connector.worker.namespace_notes import note_of
from tiers.connector.worker.weight_watch import WeightWatch
from tiers.contract.engine_info import MOMENT, EngineInfo
from tiers.contract.protocols import Request
from tiers.contract.weight_reports import WeightOrders, Weights
from tiers.engine.content_marks import refuse_unmarked_media
from tiers.engine.identity.facts import SOURCES, config_facts, layer_facts
from tiers.engine.model_weights import ModelWeights, before_calls
from tiers.engine.vllm_groups import (
    goes_on_right,
    known_groups,
    overwrites_early,
    refuse_mistaken_states,
    refuse_model,
)
from tiers.engine.vllm_identity import late_facts
from tiers.engine.vllm_watch import (
    before_resets,
    before_sleeps,
    caller,
    fill_scales,
    is_asleep,
    require_worker,
    this_worker,
    warn_of_hashes,
)
from tiers.records import NamespaceNote

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.kv_offload.base import OffloadingSpec

logger = logging.getLogger(__name__)

BESIDE = (
    *("KVTiersConnector", "OffloadingConnector"),
    *("NixlConnector", "NixlPullConnector", "NixlPushConnector"),
)
"""Connectors that load beside steps, so that the engine knows what failed before it stores it."""

WAITS = {RequestStatus.WAITING_FOR_REMOTE_KVS, RequestStatus.WAITING, RequestStatus.PREEMPTED}
"""States of a request that loads, or has loaded and not run since: then as before the load."""


SLEEPS = "sleep", "discard", "wake_up"
"""Members of an executor that take memory of workers away, or give it back."""


@dataclass(eq=False)
class _LoadingRequest:
    """A request that vLLM's connector loads, or may load; `next_step`: see `LoadRoom`."""

    request: Request
    next_step: int = 0


class HostingEngine:
    """The engine whose scheduler is making an offloading spec's manager. Used by the scheduler's
    thread."""

    def __init__(self, spec: OffloadingSpec, salt: str, trust_client_ids: bool) -> None:
        """Raises ValueError for an engine whose KV can't be identified."""
        core, scheduler = caller(EngineCore), caller(SchedulerInterface)
        if core is None or scheduler is None:
            raise ValueError("this vLLM does not show its engine: use KVTiersConnector")
        self._is_outdated = False
        self._executor = core.model_executor
        config = core.vllm_config
        refuse_engine(config, scheduler.kv_cache_config, spec.extra_config, trust_client_ids)
        warn_of_hashes(config)
        self._facts = {
            **config_facts(config, vllm_version),
            "salt": salt,
            "host": "vllm-tiering",
            "layout": str(getattr(spec.config, "kv_cache_layout", None)),
            "rows": repr(_row_facts(spec)),
            "groups": repr([(g.tokens_per_block, g.layer_names) for g in spec.config.groups]),
        }
        ask = self._executor.collective_rpc
        ask(prepare_worker)
        self._late = late_facts(config, salt, lambda: facts_of_all(ask(facts_of_worker)))
        self._model = str(config.model_config.model)
        self._ranks = int(getattr(spec.config.parallel, "world_size", 1))
        tokens = math.lcm(*(group.tokens_per_block for group in spec.config.groups))
        self._row_tokens = tokens * spec.blocks_per_chunk
        self._namespace = b""
        if not self.namespace(MOMENT):
            logger.info(
                "the model's weights are being identified, beside the engine's work. Until that is "
                "done, nothing is stored in, or loaded from, a store"
            )
        before_resets(scheduler, self._outdate, partial(self._was_reset, scheduler))
        self._goes_on_right = goes_on_right(config, _has_states(config.model_config))
        self._watch_requests(scheduler)
        self._seen = self._executor.collective_rpc(weights_of_worker)
        self._is_compared, self._is_fresh = True, False
        self._watch_calls(core)
        self._has_failed = False
        for name in ("execute_model", "sample_tokens"):
            self._watch_steps(name)
        self._watch = WeightWatch(self._weights_here(), ranks=1)
        self._watch.begin()
        self._resets = 0
        self._has_looked = False
        self._room = load_room(config, scheduler)
        if self._room.has_windows:
            self._keep_room(caller(OffloadingConnectorScheduler))

    def namespace(self, seconds: float = 0.0) -> bytes:
        """Return the namespace of all blocks; empty if it is unknown after `seconds`."""
        if not self._namespace and (late := self._late.known(seconds)) is not None:
            self._namespace = namespace({**self._facts, **late}, rank=0, world_size=1)
        return self._namespace

    def note(self, payload_bytes: int) -> NamespaceNote:
        """What to note of the namespace, once it is known."""
        facts = {**self._facts, **(self._late.known() or {})}
        return note_of(facts, self._model, self._row_tokens, payload_bytes, ranks=self._ranks)

    @property
    def is_outdated(self) -> bool:
        """Whether what is stored may be of other weights than the engine has. Until vLLM resets its
        connector as well, nothing is to be served or kept. Nor while the weights can't be read: a
        device unmaps what sleeps. Nor ever after a step that failed: later ones, which the engine
        may go on with, compute with KV that it never made."""
        if self._has_failed or self._executor.is_sleeping or not self._is_compared:
            return True
        if not self._has_looked:
            self._has_looked = True
            self._watch.loads(self._tag)
            self._judge()
        return self._is_outdated

    @property
    def serves(self) -> bool:
        """Whether the hosted tiers serve, as far as is known without a look at the weights."""
        return not (self._is_outdated or self._has_failed)

    def looked(self) -> Callable[[], bool]:
        """Look at the weights. What is returned says whether they were unchanged; any thread may
        call it, and waits for the device."""
        return self._watch.loads(self._tag).unchanged

    def end_step(self) -> None:
        """Look again in the next step."""
        self._compare()
        self._is_fresh = False
        self._room.step_begins()
        self._judge()
        self._watch.bind(WeightOrders())
        self._has_looked = False

    def reset(self) -> None:
        """All that was stored is forgotten: what is stored from now on is of the weights of now, or
        of those that it has when it wakes."""
        self._compare()
        if not self._is_compared:
            self._seen = None
        self._is_outdated = False
        self._resets += 1
        self.end_step()
        self._is_fresh = True

    @property
    def _tag(self) -> bytes:
        return b"%d" % self._resets if self._resets else b""

    def _judge(self) -> None:
        report = self._watch.report()
        if report is not None and report.over == self._tag:
            self._outdate()

    def _weights_here(self) -> Weights:
        """The weights of a worker of this process, which code beside the engine may write. Those of
        other processes change by calls of their workers alone, and are not looked at."""
        if self._executor.collective_rpc(lambda worker: os.getpid()) != [os.getpid()]:
            return Weights()
        (weights,) = self._executor.collective_rpc(sampled_weights)
        return cast(Weights, weights)

    def _watch_calls(self, core: Any) -> None:
        """Compare the weights after each call that a client makes to the workers; if it failed, as
        on some of them, after the next step. Those that have slept show others."""

        def begins() -> None:
            self._is_compared = False
            if self._is_fresh:  # nothing was stored since a reset
                self._seen = None

        for owner, name in (core, "collective_rpc"), *((self._executor, one) for one in SLEEPS):
            before_calls(owner, name, begins, lambda _: self._compare())

    def _watch_steps(self, name: str) -> None:
        """Note whether a step fails, at once or when its future ends."""
        call = getattr(self._executor, name)

        def ended(future: Future[Any]) -> None:
            if future.cancelled() or future.exception() is not None:
                self._step_failed()

        def calling(*args: Any, **kwargs: Any) -> Any:
            try:
                answer = call(*args, **kwargs)
            except BaseException:
                self._step_failed()
                raise
            if isinstance(answer, Future):
                answer.add_done_callback(ended)
            return answer

        setattr(self._executor, name, calling)

    def _step_failed(self) -> None:
        self._has_failed = True
        logger.error(
            "a step of this engine failed: the hosted tiers serve and keep nothing from now on, "
            "since what later steps compute may rest on it. Start the engine again"
        )

    def _compare(self) -> None:
        if self._is_compared or self._executor.is_sleeping:
            return
        seen = self._executor.collective_rpc(weights_of_worker)
        if None in seen:  # asleep past the engine: it shows when they wake
            return
        before, self._seen, self._is_compared = self._seen, seen, True
        if before not in (None, self._seen):
            self._outdate()

    def _keep_room(self, connector: Any) -> None:
        """Have requests wait to load while `LoadRoom` is short."""
        look_up, begin = connector.get_num_new_matched_tokens, connector.update_state_after_alloc
        room = self._room
        end = 0  # of what was found for the request that was asked about last

        def looking_up(request: Any, num_computed_tokens: int, *args: Any, **more: Any) -> Any:
            nonlocal end
            found = look_up(request, num_computed_tokens, *args, **more)
            end = num_computed_tokens + (found[0] or 0)
            if not found[0]:
                return found
            for one in [*room.used]:
                if one.request is request or getattr(one.request, "status", None) not in WAITS:
                    room.ends(one)
            return found if room.fits(_LoadingRequest(request), end) else (None, False)

        def beginning(request: Any, blocks: Any, num_external_tokens: int) -> Any:
            if num_external_tokens:
                room.begins(_LoadingRequest(request), end)
            return begin(request, blocks, num_external_tokens)

        connector.get_num_new_matched_tokens = looking_up
        connector.update_state_after_alloc = beginning

    def _was_reset(self, scheduler: Any, succeeded: bool) -> None:
        """An engine whose blocks are in use keeps them, although its connector was reset; and one
        of its requests may have blocks of wrong names again."""
        if not (succeeded and all(map(self._has_right_names, scheduler.requests.values()))):
            self._outdate()

    def _has_right_names(self, request: Any) -> bool:
        """Whether all blocks of a request are of the tokens that their hashes say."""
        return self._goes_on_right or not getattr(request, "resumable", False)

    def _watch_requests(self, scheduler: Any) -> None:
        """Serve and keep nothing once blocks come that have wrong names: others find them."""
        add = scheduler.add_request

        def adding(request: Any) -> Any:
            if not self._has_right_names(request):
                self._outdate()
            return add(request)

        scheduler.add_request = adding

    def _outdate(self) -> None:
        if self._is_outdated:  # as with each part of a request that goes on
            return
        self._is_outdated = True
        logger.info(
            "the engine's prefix cache is reset, its weights have changed, its workers slept, or a "
            "request goes on after its answer, which this vLLM names wrongly: the hosted tiers "
            "serve and keep nothing, but after a reset with reset_connector=True that answers True"
        )


def _has_states(model: Any) -> bool:
    # Of some models with images, such as Qwen3.5, vLLM reports the second alone.
    return bool(model.has_inner_state or model.is_hybrid)


def load_room(config: VllmConfig, scheduler: Any) -> LoadRoom:
    """Return the room for loads of an engine; without bound for a model that we don't know."""
    groups = []
    with suppress(ValueError):
        groups = [group for group, _ in known_groups(config, scheduler.kv_cache_config)]
    info = EngineInfo(
        {},
        block_tokens=1,
        hash_tokens=1,
        num_blocks=0,
        groups=tuple(groups),
        step_tokens=config.scheduler_config.max_num_batched_tokens,
        lookahead_tokens=config.num_lookahead_tokens,
    )
    room = LoadRoom(info)
    # The manager of blocks is made after the connector.
    room.free_blocks = lambda: scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    return room


def prepare_worker(worker: Any) -> None:
    """On a worker: see `fill_scales` and `require_worker`. Raises ValueError if its connector is
    another engine's."""
    worker, connector = _inside(worker), get_kv_transfer_group()
    if connector._vllm_config is not worker.vllm_config:
        require_worker(connector, worker)
    before_calls(connector, "register_kv_caches", lambda: require_worker(worker, this_worker()))
    fill_scales(worker.vllm_config)


def facts_of_worker(worker: Any) -> dict[str, str]:
    """On a worker: return the facts of its layers, and the shapes of its paged KV."""
    worker = _inside(worker)
    caches = getattr(worker.model_runner, "kv_caches", ())
    pages = [(tuple(c.shape), c.stride(), str(c.dtype)) for c in caches if hasattr(c, "stride")]
    return {**layer_facts(worker.vllm_config, worker), "pages": repr(pages)}


def facts_of_all(workers: list[dict[str, str]]) -> dict[str, str]:
    """Return the facts of all workers as one engine's."""
    sources = [of_worker.pop(SOURCES, "[]") for of_worker in workers]
    return {"layers": json.dumps(workers), SOURCES: sources[0]}


def weights_of_worker(worker: Any) -> list[bytes] | None:
    """On a worker: return what differs once its weights have changed, or the memory of its paged
    KV was taken away; None while it has no memory to read."""
    weights = sampled_weights(worker)
    if is_asleep(_inside(worker).vllm_config):
        return None
    return [weights.look(part).seen() for part in range(weights.parts)]


def sampled_weights(worker: Any) -> ModelWeights:
    """On a worker: return the samples of its weights, which are drawn once."""
    worker = _inside(worker)
    if (weights := vars(worker).get("kvtiers_weights")) is None:
        weights = worker.kvtiers_weights = ModelWeights(worker)
        before_sleeps(worker.vllm_config, worker, weights.changed)
    return cast(ModelWeights, weights)


def _inside(worker: Any) -> Any:
    """Return the worker that vLLM may have wrapped."""
    return getattr(worker, "worker", worker)


def _row_facts(spec: OffloadingSpec) -> list[Any]:
    """Return what a row of vLLM's host memory consists of."""
    config, parallel = spec.config, spec.config.parallel
    ranks = [getattr(parallel, f"{axis}_size", 1) for axis in ("tp", "pp", "pcp", "dcp", "world")]
    copies = spec.replicated_layout, getattr(config, "canonical_layout", False)
    return [config.worker_kv_bytes_per_block, spec.blocks_per_chunk, ranks, copies]


def refuse_engine(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    extra_config: Mapping[str, Any],
    trust_client_ids: bool,
) -> None:
    """Raise ValueError for an engine whose KV vLLM's OffloadingConnector mistakes for other KV."""
    refuse_model(vllm_config)
    refuse_mistaken_states(vllm_config, kv_cache_config)
    refuse_unmarked_media(vllm_config, trust_client_ids)
    if vllm_config.lora_config is not None:
        raise ValueError(
            "vLLM's OffloadingConnector does not distinguish two adapters of one name: with LoRA, "
            "use KVTiersConnector"
        )
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    for entry in extra.get("connectors", ()):
        if (name := entry.get("kv_connector")) not in BESIDE:
            raise ValueError(
                f"vLLM's OffloadingConnector keeps what a connector failed to load within a step, "
                f"as {name} may: leave one of the two out, or use KVTiersConnector."
            )
    model = vllm_config.model_config
    if overwrites_early(vllm_config, kv_cache_config):
        raise ValueError(
            f"{model.model} has recurrent layers, or KV of several precisions, and vLLM's Model "
            "Runner V2 may overwrite that while OffloadingConnector still reads it: start vLLM "
            "with VLLM_USE_V2_MODEL_RUNNER=0, or use KVTiersConnector."
        )
    if _has_states(model) and extra_config.get("sync_load_budget_bytes"):
        raise ValueError(
            f"{model.model} has recurrent layers: with sync_load_budget_bytes vLLM reads their "
            "states before it loads them, and answers wrongly. Leave that key out of "
            "kv_connector_extra_config."
        )
