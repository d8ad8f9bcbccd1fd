"""KVTiersConnector against vLLM's base class, and vLLM's connectors as its children."""

from __future__ import annotations

import inspect
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client import Counter, Gauge, Histogram

pytestmark = pytest.mark.vllm

LEFT_TO_THE_BASE = {"role": "what vLLM passed to the constructor, kept by the base"}
"""Public members that we neither implement nor forward, and why that is right."""

EXAMPLE = {"kv_connector": "ExampleConnector"}
NIXL = {"kv_connector": "NixlConnector"}
OURS = {
    "kv_connector": "KVTiersConnector",
    "kv_connector_module_path": "tiers.engine.vllm",
    "kv_connector_extra_config": {"chain": {"version": 1, "tiers": []}},
}


def config_of(*connectors: dict[str, Any], **transfer: Any) -> Any:
    from vllm.config import KVTransferConfig

    return SimpleNamespace(
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        kv_transfer_config=KVTransferConfig(
            kv_connector="KVTiersConnector",
            kv_role="kv_both",
            engine_id="parent",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"connectors": list(connectors)},
            **transfer,
        ),
    )


def test_of_two_chains_one_reports_what_a_request_had_cached() -> None:
    """vLLM's MultiConnector ends the engine where two connectors set one parameter."""
    from tiers.engine.vllm import SchedulerHalf

    class Asked:
        kv_transfer_params: Any = None

    first, second = (object.__new__(SchedulerHalf) for _ in range(2))
    first._reports_cached = second._reports_cached = True
    request: Any = Asked()
    entry = {"cached_tokens": {"cpu": 8}}
    assert first.entry_of_response(request, {}) == {}
    assert first.entry_of_response(request, {"cpu": 8}) == entry
    assert second.entry_of_response(request, {"cpu": 8}) == {}
    other: Any = Asked()
    assert second.entry_of_response(other, {"cpu": 8}) == entry


def members(base: type) -> dict[str, Any]:
    return {n: getattr(base, n) for n in dir(base) if not n.startswith("_") and n != "register"}


def test_every_member_of_the_base_class_is_ours() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

    from tiers.engine.vllm import HALVES

    theirs = members(KVConnectorBase_V1) | members(SupportsHMA)
    ours = {
        name
        for half in HALVES.values()
        for cls in half.__mro__
        if cls.__module__.startswith("tiers.")
        for name in vars(cls)
    }
    missing = theirs.keys() - ours - LEFT_TO_THE_BASE.keys()
    assert not missing, f"neither implemented nor knowingly left to the base: {sorted(missing)}"
    assert LEFT_TO_THE_BASE.keys() <= theirs.keys() - ours, "the list names what is not left"


def test_every_member_takes_what_vllm_passes() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    from tiers.engine.vllm import HALVES, _another_roles

    for name, theirs in members(KVConnectorBase_V1).items():
        for half in HALVES.values() if callable(theirs) else ():
            ours = getattr(half, name)
            if ours is not _another_roles:
                parameters = inspect.signature(theirs).parameters
                assert list(inspect.signature(ours).parameters) == list(parameters), name


def test_the_role_picks_a_class_without_a_member_of_the_other_role() -> None:
    """A worker with the scheduler's members lacks what they work on, and fails when it ends."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorRole,
    )

    from tiers.contract.connector import Connector, SchedulerConnector, WorkerConnector
    from tiers.engine.vllm import HALVES, KVTiersConnector, _another_roles

    for half, other in zip(HALVES.values(), (WorkerConnector, SchedulerConnector), strict=True):
        assert issubclass(half, KVTiersConnector) and not issubclass(half, other)
        named = {n for n in {*dir(other)} - {*dir(Connector)} if not n.startswith("_")}
        alive = [getattr(half, n) for n in named & {*dir(half)}]
        theirs = [getattr(KVConnectorBase_V1, n, None) for n in named]
        assert [m for m in alive if m is not _another_roles and m not in theirs] == []
        assert not inspect.isabstract(half)
        assert half.__name__ == "KVTiersConnector", "vLLM's MultiConnector keys stats by it"
    mine: Any = type("Mine", (KVTiersConnector,), {})
    with pytest.raises(TypeError, match="abstract class Mine"):
        mine(None, KVConnectorRole.WORKER, None)


def test_every_member_that_acts_reaches_the_children() -> None:
    """What the contract declares with a default, the chain's halves hand on to each child."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    from tiers.connector.multi.multi_scheduler import MultiScheduler
    from tiers.connector.multi.multi_worker import MultiWorker
    from tiers.contract.connector import SchedulerConnector, WorkerConnector

    by_class = {
        name
        for name, member in members(KVConnectorBase_V1).items()
        if inspect.ismethod(member)  # class methods: vLLM calls them without an object
    }
    needed = members(KVConnectorBase_V1).keys() - by_class - LEFT_TO_THE_BASE.keys()
    assert needed <= {*dir(SchedulerConnector), *dir(WorkerConnector)}
    fan_outs = {*MultiScheduler.__mro__, *MultiWorker.__mro__}
    ours = [cls for cls in fan_outs if cls.__module__.startswith("tiers.connector.multi.")]
    forwarded = {name for cls in ours for name in vars(cls)}
    assert needed - forwarded == {"has_connector_metadata", "get_finished"}


def test_each_half_has_the_members_that_vllm_calls_in_its_process() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    from tiers.contract.connector import SchedulerConnector, WorkerConnector

    source = inspect.getsource(KVConnectorBase_V1)
    _, on_workers, in_scheduler = re.split(r"# (?:Worker|Scheduler)-side methods", source)
    for half, listed in ((WorkerConnector, on_workers), (SchedulerConnector, in_scheduler)):
        called = set(re.findall(r"    def ([a-z]\w+)\(\s*self", listed))
        assert len(called) > 10
        assert called <= {*dir(half)}


def test_children_are_configured_as_their_entries_say() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector

    from tiers.engine.vllm_children import child_configs

    own = {**EXAMPLE, "engine_id": "own", "kv_role": "kv_producer", "name": "archive"}
    parent = config_of(EXAMPLE, own, EXAMPLE)
    children = child_configs(parent)
    assert [child.name for child in children] == [
        "ExampleConnector",
        "archive",
        "ExampleConnector-2",
    ]
    assert all(child.cls is ExampleConnector for child in children)
    transfers = [child.vllm_config.kv_transfer_config for child in children]
    assert [t.engine_id for t in transfers] == ["parent", "own", "parent"]
    assert [t.kv_role for t in transfers] == ["kv_both", "kv_producer", "kv_both"]
    assert {t.kv_load_failure_policy for t in transfers} == {"recompute"}
    assert parent.kv_transfer_config.kv_connector == "KVTiersConnector", "the parent's is its own"


def test_a_list_of_connectors_may_say_which_of_them_serves() -> None:
    from tiers.engine.vllm import configured_chain
    from tiers.engine.vllm_children import load_policy

    def config(**extra: Any) -> Any:
        made = config_of(EXAMPLE, OURS)
        made.kv_transfer_config.kv_connector_extra_config.update(extra)
        return made

    one, two = (SimpleNamespace(kv_cache_groups=[None] * groups) for groups in (1, 2))
    assert configured_chain(config(load_policy="longest")) is None
    assert load_policy(config(), two) == "first"
    assert load_policy(config(load_policy="longest"), two) == "longest"
    assert load_policy(config(load_policy="stitched"), one) == "stitched"
    with pytest.raises(ValueError, match="2 KV cache groups"):
        load_policy(config(load_policy="stitched"), two)
    for wrong in ("fastest", ["first"], None):
        with pytest.raises(ValueError, match="first, longest or stitched"):
            load_policy(config(load_policy=wrong), one)
    with pytest.raises(ValueError, match="loads"):
        configured_chain(config(loads="longest"))


def test_two_children_of_one_name_are_refused() -> None:
    from tiers.engine.vllm_children import child_configs

    with pytest.raises(ValueError, match=r"connectors\[1\].name: connectors\[0\] has this name"):
        child_configs(config_of({**EXAMPLE, "name": "x"}, {**EXAMPLE, "name": "x"}))


def test_shared_out_tokens_beside_nixl_are_refused() -> None:
    """vLLM lays them out so that NIXL moves them only where it finds NIXL: not in our list."""
    from tiers.engine.vllm_children import child_configs

    nixl = {"kv_connector": "NixlConnector"}
    config = config_of(nixl, EXAMPLE)
    config.parallel_config.decode_context_parallel_size = 2
    with pytest.raises(ValueError, match=r"size 2 lays tokens out otherwise.*MultiConnector"):
        child_configs(config)
    config.kv_transfer_config.kv_connector_extra_config["connectors"].remove(nixl)
    assert len(child_configs(config)) == 1


def test_layouts_must_agree_and_a_conflict_names_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector

    from tiers.engine.vllm import KVTiersConnector

    def asks(vllm_config: Any) -> Any:
        return vllm_config.kv_transfer_config.kv_connector_extra_config.get("layout")

    monkeypatch.setattr(ExampleConnector, "get_required_kvcache_layout", staticmethod(asks))

    def child(layout: str | None) -> dict[str, Any]:
        return {**EXAMPLE, "kv_connector_extra_config": {"layout": layout}}

    required = KVTiersConnector.get_required_kvcache_layout
    assert required(config_of(child(None))) is None
    assert required(config_of(child(None), child("HND"), child("HND"))) == "HND"
    with pytest.raises(ValueError, match="ExampleConnector: HND, ExampleConnector-2: NHD"):
        required(config_of(child("HND"), child("NHD")))


def test_one_child_that_works_layer_by_layer_needs_piecewise_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector

    from tiers.engine.vllm import KVTiersConnector

    monkeypatch.setattr(
        ExampleConnector,
        "requires_piecewise_for_cudagraph",
        staticmethod(lambda extra: extra.get("layers", False)),
    )
    requires = KVTiersConnector.requires_piecewise_for_cudagraph
    layers = {**EXAMPLE, "kv_connector_extra_config": {"layers": True}}
    assert not requires({"chain": "/chain.yaml"})
    assert not requires({"connectors": [EXAMPLE]})
    assert requires({"connectors": [EXAMPLE, layers]})


def test_an_engine_sleeps_if_every_child_bears_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is asked with its own configuration."""
    from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector

    from tiers.engine.vllm import KVTiersConnector

    def bears(transfer: Any) -> bool:
        assert transfer.engine_id == "parent" and transfer.kv_role == "kv_both"
        return bool(transfer.kv_connector_extra_config.get("pages", True))

    monkeypatch.setattr(ExampleConnector, "supports_sleep_mode", staticmethod(bears), raising=False)
    pinned = {**EXAMPLE, "name": "rdma", "kv_connector_extra_config": {"pages": False}}
    supports = KVTiersConnector.supports_sleep_mode
    for children, expected in (((EXAMPLE, EXAMPLE), True), ((EXAMPLE, pinned), False)):
        assert supports(config_of(*children).kv_transfer_config) is expected
    chain = config_of().kv_transfer_config
    chain.kv_connector_extra_config = {"chain": "/chain.yaml"}
    assert supports(chain)


def nixl_stats(duration: float) -> Any:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlKVConnectorStats

    stats = NixlKVConnectorStats()
    stats.data["transfer_duration"].append(duration)
    stats.data["post_duration"].append(0.1)
    stats.data["bytes_transferred"].append(1 << 20)
    stats.data["num_descriptors"].append(4)
    return stats


def counted(**names: Any) -> Any:
    """What an interval counted: two tiers of ours and children of one class."""
    from tiers.contract.stats import TierStats
    from tiers.engine.vllm_stats import MultiKVConnectorStats

    whole = MultiKVConnectorStats()
    inner = MultiKVConnectorStats({"cpu": {"hits": 2.0, "loaded_tokens": 20.0}})
    whole.add("ours", inner, None)
    whole.add(
        "also-ours", MultiKVConnectorStats({"cpu": {"hits": 3.0, "loaded_tokens": 30.0}}), None
    )
    whole.add("tiers", TierStats({"disk": {"hits": 1.0, "loaded_tokens": 10.0}}), None)
    for name in ("left", "right"):
        whole.add(name, nixl_stats(1.0), {"kv_connector": "NixlConnector"})
    return whole


def test_stats_cross_processes_and_names_keep_them_apart() -> None:
    from tiers.engine.vllm import KVTiersConnector

    whole = counted()
    rebuilt = KVTiersConnector.build_kv_connector_stats(whole.to_dict())
    assert rebuilt.to_dict() == whole.to_dict()
    assert type(rebuilt["left"]) is type(whole["left"])
    more = rebuilt.aggregate(counted())
    assert more["ours/cpu"] == {"hits": 4.0, "loaded_tokens": 40.0}
    assert more["also-ours/cpu"] == {"hits": 6.0, "loaded_tokens": 60.0}
    assert more["left"].data["transfer_duration"] == [1.0, 1.0]
    line = more.reduce()
    assert line["kvtiers"].split("; ") == [
        "ours/cpu: 40 tokens loaded",
        "also-ours/cpu: 60 tokens loaded",
        "disk: 20 tokens loaded",
    ]
    assert line["right"]["Num successful transfers"] == 2
    more.reset()
    assert more.is_empty() and not whole.is_empty()


def test_stats_from_live_objects_and_from_vllms_own_form() -> None:
    from tiers.engine.vllm import KVTiersConnector

    build = KVTiersConnector.build_kv_connector_stats
    assert build(None).is_empty() and build({}).is_empty()
    live = nixl_stats(2.0)
    assert build({"NixlConnector": live})["NixlConnector"] is live
    plain = build({"NixlConnector": live.to_dict(), "ExampleConnector": {"data": {"x": [1]}}})
    assert plain["NixlConnector"].data["transfer_duration"] == [2.0]
    assert list(plain.data) == ["NixlConnector"], "a connector without stats is left out"
    with pytest.raises(ValueError, match="UnknownConnector"):
        build({"UnknownConnector": {"data": {"x": [1]}}})


def inner_maker(entry: dict[str, Any]) -> dict[str, Any]:
    return {"kv_connector": entry["kv_connector"], "kv_connector_module_path": None}


def vllms_own(tiers: dict[str, Any]) -> Any:
    """What vLLM's MultiConnector makes of the stats of one of ours."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector

    from tiers.engine.vllm_stats import MultiKVConnectorStats

    return multi_connector.MultiKVConnectorStats({"KVTiersConnector": MultiKVConnectorStats(tiers)})


def test_metrics_are_registered_once_whatever_the_children() -> None:
    from prometheus_client import CollectorRegistry

    from tiers.engine.vllm import KVTiersConnector

    registry = CollectorRegistry()

    def typed(cls: type) -> Any:
        return lambda **kwargs: cls(registry=registry, **kwargs)

    inner = {
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {
            "connectors": [{"kv_role": "kv_both", **child} for child in (OURS, NIXL)]
        },
    }
    children: list[dict[str, Any]] = [
        {**NIXL, "name": "left"},
        {**NIXL, "name": "right"},
        OURS,
        OURS,
        EXAMPLE,
        inner,
    ]
    metrics = KVTiersConnector.build_prom_metrics(
        config_of(*children),
        {kind: typed(kind) for kind in (Counter, Gauge, Histogram)},
        ["engine"],
        {0: ["0"]},
    )
    whole = counted()
    whole.add("MultiConnector", vllms_own({"tape": {"hits": 7.0}}), inner_maker(inner))
    metrics.observe(whole.to_dict())
    hits = {
        sample.labels["tier"]: sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name == "vllm:kvtiers_hits_total"
    }
    assert hits == {"ours/cpu": 2.0, "also-ours/cpu": 3.0, "disk": 1.0, "tape": 7.0}
    transfers = [
        sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name == "vllm:nixl_bytes_transferred_count"
    ]
    assert transfers == [2.0], "both children of the class count"


class LetsGo:
    """Of paged KV."""

    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    def let_go(self) -> None:
        self._calls.append("let go")


@pytest.mark.parametrize("has", ["an allocator", "none here", "no library", "one of another"])
def test_whoever_takes_the_paged_kv_away_says_so_before(
    has: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import device_allocator

    from tiers.engine.vllm_watch import before_sleeps

    calls: list[str] = []
    owned = {name: partial(calls.append, name) for name in ("sleep", "discard", "wake_up")}
    allocator, worker = SimpleNamespace(**owned), SimpleNamespace(sleep=owned["sleep"])

    def instance() -> Any:
        if has in ("none here", "no library"):
            raise RuntimeError if has == "none here" else AssertionError
        return allocator

    monkeypatch.setattr(device_allocator, "get_mem_allocator_instance", instance, raising=False)
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(enable_sleep_mode=has != "one of another")
    )
    connector = LetsGo(calls)
    for _ in range(2000):  # engines of this process that have ended
        before_sleeps(config, None, LetsGo(calls).let_go)
    before_sleeps(config, worker, connector.let_go)
    worker.sleep()
    assert calls == ["let go", "sleep"]
    calls.clear()
    allocator.sleep()
    allocator.discard()
    allocator.wake_up()
    told = ["let go"] if has == "an allocator" else []
    assert calls == [*told, "sleep", *told, "discard", "wake_up"]
    del connector
    calls.clear()
    worker.sleep()
    allocator.sleep()
    assert calls == ["sleep"] * 2, "its engine has ended"


@pytest.mark.parametrize("asleep", [[], [False], [True, False]])
def test_memory_that_sleeps_is_not_read(
    asleep: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import device_allocator

    from tiers.engine.vllm_hosting import weights_of_worker

    pages = {at: SimpleNamespace(is_asleep=one) for at, one in enumerate(asleep)}
    allocator = SimpleNamespace(pointer_to_data=pages)
    place = "get_mem_allocator_instance"
    monkeypatch.setattr(device_allocator, place, lambda: allocator, raising=False)
    config = SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=True))
    seen = SimpleNamespace(parts=1, look=lambda part: SimpleNamespace(seen=lambda: b"seen"))
    worker = SimpleNamespace(vllm_config=config, kvtiers_weights=seen)
    assert weights_of_worker(worker) == (None if any(asleep) else [b"seen"])
    config.model_config.enable_sleep_mode = False
    assert weights_of_worker(worker) == [b"seen"]


@pytest.mark.parametrize("binds", ["bind_kv_cache_manager", "bind_gpu_block_pool"])
@pytest.mark.parametrize("on_reset", ["forget", "keep"])
def test_a_reset_of_the_engines_own_cache_is_one_of_the_tiers(binds: str, on_reset: str) -> None:
    """Also one that fails because blocks are in use: whoever asks for it has changed the weights,
    and the engine tells no router of it. vLLM before 0.30 hands over its pool alone."""
    from vllm.distributed.kv_events import AllBlocksCleared
    from vllm.v1.core.block_pool import BlockPool

    from spec.chain import EventsSpec
    from tiers.engine.vllm import SchedulerHalf
    from tiers.engine.vllm_events import AsVllm

    resets: list[str] = []
    connector: Any = object.__new__(SchedulerHalf)
    connector.children, connector._hears_resets = (), on_reset == "forget"
    connector.reset_cache, connector._room = partial(resets.append, "reset"), SimpleNamespace()
    emptied: list[str] = []
    connector._requests = SimpleNamespace(cache_emptied=partial(emptied.append, "emptied"))
    connector._as_vllm = AsVllm(EventsSpec(), [])

    pool = BlockPool(8, True, 16)
    cache = (
        pool
        if binds == "bind_gpu_block_pool"
        else SimpleNamespace(reset_prefix_cache=pool.reset_prefix_cache, block_pool=pool)
    )
    getattr(connector, binds)(cache)
    in_use = pool.get_new_blocks(2)
    assert cache.reset_prefix_cache() is False, "vLLM's own answer"
    assert len(resets) == (on_reset == "forget")
    assert list(connector._as_vllm(())) == [AllBlocksCleared()] * len(resets)
    assert not emptied, "it has what it had"
    pool.free_blocks(in_use)
    assert cache.reset_prefix_cache() is True
    assert len(emptied) == 1
    assert list(connector._as_vllm(())) == [], "the engine's own event says so"


def test_listeners_hear_once_that_weights_changed() -> None:
    """As of a reset, of which the engine tells: what it has is of other weights."""
    from vllm.distributed.kv_events import AllBlocksCleared

    from spec.chain import EventsSpec
    from tiers.connector.multi.multi_scheduler import MultiScheduler, MultiSettings
    from tiers.connector.policy.request_table import RequestTable
    from tiers.engine.vllm import SchedulerHalf
    from tiers.engine.vllm_events import AsVllm, GroupKind

    connector = object.__new__(SchedulerHalf)
    MultiScheduler.__init__(connector, [], MultiSettings(RequestTable.of_connectors(4)))
    connector._as_vllm = AsVllm(EventsSpec(), [GroupKind("full_attention")])
    assert list(connector.take_events()) == []
    connector.weights_changed()
    (event,) = connector.take_events()
    assert isinstance(event, AllBlocksCleared)
    assert list(connector.take_events()) == []


def test_an_adapter_of_a_package_that_replaces_vllms_classes_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its requests may lack what newer ones of vLLM have; the step that loads it goes on."""
    from tiers.engine import vllm_watch
    from tiers.engine.adapter_marks import SeenAdapters

    config, adapters = SimpleNamespace(), dict[int, Any]()
    request = SimpleNamespace(lora_name="sql", lora_path=str(tmp_path), lora_int_id=7)
    weights = type("Weights", (), {})()
    weights.loras = {"q": torch.ones(2)}
    manager = SimpleNamespace(
        lora_config=config,
        list_adapters=adapters.keys,
        _adapter_manager=SimpleNamespace(get_adapter=adapters.get),
    )

    def add_adapter(manager: Any, request: Any) -> bool:
        adapters[request.lora_int_id] = weights
        return True

    seen = SeenAdapters(vllm_watch.name_of)
    monkeypatch.setitem(vllm_watch._seen, id(config), (config, seen))
    assert vllm_watch._seeing(add_adapter)(manager, request) is True
    (loaded,) = seen.report().values()
    assert loaded.number == 7 and loaded.content


def test_blocks_that_another_connector_loads_look_computed() -> None:
    """To vLLM's connectors, which then load the others; the engine's own stay as they are."""
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    from tiers.engine.vllm_children import as_computed

    cached = KVCacheBlock(7)
    cached.set_block_hash(b"found")
    blocks = KVCacheBlocks(([cached, *map(KVCacheBlock, range(3))],))
    seen = as_computed(blocks, 3)
    assert seen.get_unhashed_block_ids_all_groups() == [[2]]
    assert seen.get_block_ids() == blocks.get_block_ids() == ([7, 0, 1, 2],)
    assert blocks.get_unhashed_block_ids_all_groups() == [[0, 1, 2]]


def test_connectors_that_can_load_behind_others_are_known() -> None:
    from tiers.engine.vllm_children import child_configs, following

    listed = child_configs(config_of(EXAMPLE, OURS, {"kv_connector": "ExampleConnector"}))
    assert following(listed) == {1}
    listed[0].cls.loads_behind_others = True
    try:
        assert following(listed) == {0, 1, 2}
    finally:
        del listed[0].cls.loads_behind_others
