"""Our tiers under vLLM's own OffloadingConnector, which dies of a load that fails."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engine.vllm.tiny_vllm import GEMMA, Run, documents, hosted
from tests.engine.vllm.vllm_chains import IN_PROCESS, ONE_BY_ONE, disk
from tests.support.clock import wait_for
from tiers.connector.hosted.hosted_tier import HostedTier
from tiers.connector.hosted.shared_slots import attach_region, create_region, stamp
from tiers.contract.messages import WorkerHandshake
from tiers.contract.weight_reports import Weights
from tiers.cpu.spec import CpuSpec

pytestmark = pytest.mark.vllm

CPU = {"type": "cpu", "capacity": "64MiB"}
ALL = [[18 * 32]] * 4
"""Tokens of each prompt that were cached."""
NONE = [[0]] * 4


def test_host_memory_serves_what_the_engine_evicted(
    run_vllm: Callable[..., Run],
) -> None:
    """In two worker processes, whose memory the scheduler's process shares."""
    two = {"tensor_parallel_size": 2, "env": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}}
    run = run_vllm(ONE_BY_ONE * 2, kv_transfer_config=hosted(CPU), **two)
    assert run.tokens[:4] == run.tokens[4:]
    assert run.cached == NONE + ALL


@pytest.mark.faults
@pytest.mark.fault
def test_disk_serves_a_restarted_engine_and_damage_is_a_miss(
    run_vllm: Callable[..., Run], answers: list[list[list[int]]], tmp_path: Path
) -> None:
    """Staging has room for 48 blocks: each prompt of 18 pushes out another's."""
    here = hosted(disk(tmp_path / "disk"))
    first = run_vllm(ONE_BY_ONE * 2, kv_transfer_config=here, **IN_PROCESS)
    assert first.tokens == answers * 2
    assert first.cached == NONE + ALL

    again = run_vllm(ONE_BY_ONE, kv_transfer_config=here, **IN_PROCESS)
    assert again.tokens == answers
    assert again.cached == ALL

    for slab in (tmp_path / "disk").glob("**/slab-*"):
        with slab.open("r+b") as file:
            for position in range(5096, slab.stat().st_size, 500_000):
                file.seek(position)
                file.write(b"wrong KV")
    damaged = run_vllm(ONE_BY_ONE, kv_transfer_config=here, **IN_PROCESS)
    assert damaged.tokens == answers
    assert 0 < sum(tokens for (tokens,) in damaged.cached) < 4 * 18 * 32


@pytest.mark.faults
@pytest.mark.fault
def test_redis_serves_another_engine_and_a_dead_one_is_a_miss(
    run_vllm: Callable[..., Run], answers: list[list[list[int]]], server: Any
) -> None:
    here = hosted(CPU, {"type": "redis", "url": server.url, "timeout": "500ms"})
    run_vllm(ONE_BY_ONE, kv_transfer_config=here, **IN_PROCESS)
    again = run_vllm(ONE_BY_ONE, kv_transfer_config=here, **IN_PROCESS)
    assert (again.tokens, again.cached) == (answers, ALL)
    server.kill()
    alone = run_vllm(ONE_BY_ONE * 2, kv_transfer_config=here, **IN_PROCESS)
    assert (alone.tokens, alone.cached) == (answers * 2, NONE + ALL)
    assert "tier redis is configured, not reached yet" in alone.log


@pytest.mark.faults
def test_a_model_with_windows_has_a_block_of_each_group(
    run_vllm: Callable[..., Run], tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Each group's blocks are copied apart; a restarted engine finds what its windows need."""
    prompts = [[(prompt, 8)] for prompt in documents(2, 600)]
    options: dict[str, Any] = {
        "model": str(tiny_model(GEMMA)),
        "max_model_len": 704,
        "num_gpu_blocks_override": 80,
        **IN_PROCESS,
    }
    plain = run_vllm(prompts, **options)
    here = hosted(CPU, disk(tmp_path / "disk"))
    first = run_vllm(prompts, kv_transfer_config=here, **options)
    again = run_vllm(prompts, kv_transfer_config=here, **options)
    assert first.tokens == again.tokens == plain.tokens
    assert (first.cached, again.cached) == ([[0]] * 2, [[18 * 32]] * 2)


def test_events_are_what_vllm_publishes(tmp_path: Path) -> None:
    """Of blocks that came to host memory and to the store, and that went for others."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import (
        OffloadingEventsTracker,
    )
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
    from vllm.v1.kv_offload.base import OffloadingKVEventsConfig, ReqContext, make_offload_key

    from tiers.engine.vllm_hosted_manager import HostedManager

    handshake = WorkerHandshake(0, b"rank-0----------", 4096)
    worker = create_region("engine", handshake, 2, pin=False, folder=tmp_path)
    region = attach_region("engine", 0, tmp_path)
    tier = HostedTier([region], CpuSpec(capacity=1).residency, events=True)
    manager = HostedManager(tier, None)
    hashes = [bytes([number]) * 32 for number in range(3)]
    for number, block in enumerate(hashes):
        context = ReqContext(f"request-{number}")
        keys = [make_offload_key(block, 0)]
        spec = manager.prepare_store(keys, context).store_spec
        worker.end(spec.slots, [stamp(key) for key in spec.keys])
        manager.complete_store(set(keys), context)
    tracker = OffloadingEventsTracker(OffloadingKVEventsConfig(True, False))
    told = [
        (type(one).__name__, one.medium, one.block_hashes[0])
        for one in tracker.take_events(manager.take_events())
    ]
    first, second, third = map(maybe_convert_block_hash, hashes)
    assert told == [
        ("BlockStored", "CPU", first),
        ("BlockStored", "CPU", second),
        ("BlockRemoved", "CPU", first),
        ("BlockStored", "CPU", third),
    ]
    manager.shutdown()
    worker.close()


@pytest.mark.parametrize("use", ["stored", "loaded", "touched"])
def test_a_prefix_of_several_groups_is_evicted_from_its_tail(tmp_path: Path, use: str) -> None:
    """vLLM names all blocks of a group, and then of the next: the second group's went first, and
    none of the prefix was of use."""
    from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key

    from tiers.engine.vllm_hosted_manager import HostedManager

    if not hasattr(ReqContext, "get_offload_key_position"):
        pytest.skip("vLLM 0.32 and later say where blocks are")
    worker = create_region(
        "engine", WorkerHandshake(0, b"rank-0----------", 4096), 16, pin=False, folder=tmp_path
    )
    tier = HostedTier([attach_region("engine", 0, tmp_path)], CpuSpec(capacity=1).residency)
    manager = HostedManager(tier, None)

    def prompt(name: str, first: int, count: int) -> tuple[list[Any], Any]:
        context = ReqContext(name)
        hashes = [bytes([number]) * 32 for number in range(first, first + count)]
        keys = [make_offload_key(block, group) for group in range(2) for block in hashes]
        for place, key in enumerate(keys):
            context.set_offload_key_position(key, place % count * 32 + 32)
        return keys, context

    def store(name: str, first: int, count: int) -> None:
        keys, context = prompt(name, first, count)
        output = manager.prepare_store(keys, context)
        assert output.keys_to_store == keys == [key[:36] for key in output.store_spec.keys]
        worker.end(output.store_spec.slots, [stamp(key) for key in output.store_spec.keys])
        manager.complete_store(set(keys), context)
        manager.on_request_finished(context)

    store("one", 0, 8)
    keys, context = prompt("again", 0, 8)
    if use == "loaded":
        assert all(manager.lookup(key, context) == LookupResult.HIT for key in keys)
        spec = manager.prepare_load(keys, context)
        assert spec.slots == tier.pool.find_all(keys)
        worker.end(spec.slots)
        manager.complete_load(set(keys), context)
    elif use == "touched":
        manager.touch(keys, context)
    manager.on_request_finished(context)
    store("other", 8, 4)
    keys, context = prompt("last", 0, 8)
    hits = [manager.lookup(key, context) == LookupResult.HIT for key in keys]
    assert hits == [*([True] * 4), *([False] * 4)] * 2
    manager.shutdown()
    worker.close()


@pytest.mark.parametrize(
    ("chain", "prompt_only"), [({}, True), ({"store": "all"}, False), ({"store": "prompt"}, True)]
)
def test_the_chain_decides_whether_answers_are_stored(
    chain: dict[str, Any], prompt_only: bool
) -> None:
    """Where it says so; else it is as vLLM's connector has it."""
    from tiers.engine.vllm_offloading import KVTiersOffloadingSpec

    assert KVTiersOffloadingSpec(config_of(hosted(CPU, **chain))).offload_prompt_only is prompt_only


def config_of(transfer: dict[str, Any]) -> Any:
    """As vLLM gives it to a spec."""
    return SimpleNamespace(
        extra_config=transfer["kv_connector_extra_config"],
        enable_kv_cache_events=True,
        groups=(),
        cache=SimpleNamespace(tokens_per_hash=32, blocks_per_chunk=1),
    )


class Engine(SimpleNamespace):
    """A configuration of vLLM, as far as it is asked about."""

    use_v2_model_runner = False


def engine_of(**model: Any) -> Engine:
    """That of a model."""
    facts: dict[str, Any] = {"model": "org/model", "multimodal_config": None}
    facts |= {"has_inner_state": False, "is_hybrid": False}
    return Engine(
        model_config=SimpleNamespace(**(facts | model)),
        lora_config=None,
        weight_transfer_config=None,
    )


@pytest.mark.parametrize("says", ["has_inner_state", "is_hybrid"])
def test_early_loads_and_runner_v2_are_refused_for_models_with_states(
    monkeypatch: pytest.MonkeyPatch, says: str
) -> None:
    """vLLM would read states before they are there. Qwen3.5 with images says `is_hybrid` alone."""
    from tiers.engine import vllm_offloading

    def facts(budget: int, **model: Any) -> Any:
        monkeypatch.setattr(vllm_offloading, "get_current_vllm_config", lambda: engine_of(**model))
        transfer = hosted(CPU)
        transfer["kv_connector_extra_config"]["sync_load_budget_bytes"] = budget
        return vllm_offloading.KVTiersOffloadingSpec(config_of(transfer))._facts([])

    monkeypatch.setattr(vllm_offloading, "config_facts", lambda *_: {})
    with pytest.raises(ValueError, match=r"org/model has recurrent layers.*Leave that key out"):
        facts(1 << 20, **{says: True})
    assert facts(0, **{says: True}) and facts(1 << 20)
    monkeypatch.setattr(Engine, "use_v2_model_runner", True)
    with pytest.raises(ValueError, match=r"recurrent layers of org/model: .* Model Runner V2"):
        facts(0, **{says: True})
    assert facts(1 << 20)


class HangingCopier:
    """Copies to paged KV when it is allowed to."""

    payload_bytes = 4096

    def __init__(self) -> None:
        self.begun: list[list[int]] = []
        self.may_end = threading.Event()

    def fence(self) -> None:
        """Nothing is queued."""

    def scatter(self, rows: Any, slots: list[int], blocks: list[int], after: object) -> None:
        self.begun.append(blocks)
        assert blocks == [0] or self.may_end.wait(60)

    def close(self) -> None:
        """Nothing is open."""


def test_expedited_loads_do_not_wait_for_others(tmp_path: Path) -> None:
    """The engine's step waits for them, while more loads than are copied at once are under way."""
    from vllm.v1.kv_offload.base import GPULoadStoreSpec

    from tiers.engine.vllm_hosted_worker import COPIERS, HostedWorker, SlotsSpec

    copier: Any = HangingCopier()
    handshake = WorkerHandshake(0, b"", copier.payload_bytes)
    worker = HostedWorker(create_region("engine", handshake, 9, False, folder=tmp_path), [copier])

    def load(block: int, expedited: bool) -> None:
        paged = GPULoadStoreSpec([block], group_sizes=[1], block_indices=[0])
        worker.submit_load(block, SlotsSpec([block], []), paged, expedited=expedited)

    for block in range(1, 2 * COPIERS + 1):
        load(block, expedited=False)
    wait_for(lambda: len(copier.begun) == COPIERS)
    load(0, expedited=True)
    worker.wait({0})
    assert [result.job_id for result in worker.get_finished()] == [0]
    copier.may_end.set()
    worker.wait(set(range(1, 2 * COPIERS + 1)))
    worker.shutdown()


def test_a_page_is_as_long_as_its_layers_say_and_not_its_tensor(tmp_path: Path) -> None:
    """States in pages that are padded to the length of attention's: the rest is another's."""
    import torch
    from vllm.v1.kv_offload.base import (
        CanonicalKVCacheRef,
        CanonicalKVCaches,
        CanonicalKVCacheTensor,
        GPULoadStoreSpec,
    )

    from tiers.engine.vllm_hosted_worker import HostedWorker, SlotsSpec
    from tiers.engine.vllm_offloading import copiers_of

    tensor = torch.arange(4, dtype=torch.int8).repeat_interleave(4096).reshape(4, 4096).clone()
    refs = [[CanonicalKVCacheRef(0, 4096)], [CanonicalKVCacheRef(0, 2560)]]
    copiers = copiers_of(CanonicalKVCaches([CanonicalKVCacheTensor(tensor, 4096)], refs))
    assert [copier.payload_bytes for copier in copiers] == [4096, 2560]

    handshake = WorkerHandshake(0, b"", 4096)
    worker = HostedWorker(create_region("engine", handshake, 2, False, folder=tmp_path), copiers)

    def paged(*blocks: int) -> Any:
        return GPULoadStoreSpec(list(blocks), group_sizes=[1, 1], block_indices=[0, 0])

    slots = SlotsSpec([0, 1], [b"attention", b"state"])
    worker.submit_store(0, paged(1, 2), slots)
    worker.wait({0})
    worker.submit_load(1, slots, paged(0, 3))
    worker.wait({1})
    assert all(result.success for result in worker.get_finished())
    assert tensor[0].tolist() == [1] * 4096
    assert tensor[3].tolist() == [2] * 2560 + [3] * 1536
    worker.shutdown()


def test_a_store_is_refused_whose_engine_takes_new_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its facts name those that it starts with, and nothing says when it has others."""
    from tiers.engine import vllm_offloading

    engine = engine_of()
    engine.weight_transfer_config = SimpleNamespace(backend="nccl")
    monkeypatch.setattr(vllm_offloading, "get_current_vllm_config", lambda: engine)
    monkeypatch.setattr(vllm_offloading, "config_facts", lambda *_: {})
    alone = vllm_offloading.KVTiersOffloadingSpec(config_of(hosted(CPU)))
    assert alone._facts([])
    spec = vllm_offloading.KVTiersOffloadingSpec(config_of(hosted(CPU, disk(tmp_path))))
    with pytest.raises(ValueError, match="weight_transfer_config"):
        spec._facts([])


def test_a_block_that_other_weights_computed_is_not_held(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import torch
    from vllm.v1.kv_offload.base import GPULoadStoreSpec

    from tiers.connector.hosted.shared_slots import stamp
    from tiers.engine.vllm_hosted_worker import HostedWorker, SlotsSpec
    from tiers.gpu.copier import open_copier

    class Shown(Weights):
        weights = b"old"

        def look(self, part: int) -> Any:
            looked, shown = Weights(), self.weights
            vars(looked)["seen"] = lambda: shown
            return looked

    copier = open_copier({"layer": torch.zeros(4, 4096, dtype=torch.int8)}, 4)
    handshake = WorkerHandshake(0, b"", 4096)
    region = create_region("engine", handshake, 4, False, folder=tmp_path)
    shown = Shown()
    worker = HostedWorker(region, [copier], shown)

    def store(slot: int, generation: bytes = b"") -> bool:
        paged = GPULoadStoreSpec([1], group_sizes=[1], block_indices=[0])
        worker.submit_store(slot, paged, SlotsSpec([slot], [stamp(b"key")], generation))
        worker.wait({slot})
        assert [result.success for result in worker.get_finished()] == [True], "vLLM asserts it"
        return region.holds(slot, stamp(b"key"))

    assert store(0) and not region.has_ended(b"")
    shown.weights = b"new"
    assert not store(1) and region.has_ended(b"")
    assert store(2, b"next") and not region.has_ended(b"next")
    assert not store(3), "an order from before the reset"

    def load(slot: int) -> None:
        paged = GPULoadStoreSpec([1], group_sizes=[1], block_indices=[0])
        worker.submit_load(slot, SlotsSpec([slot], [], b"next"), paged)
        worker.wait({slot})
        assert [result.success for result in worker.get_finished()] == [True], "vLLM asserts it"

    load(2)
    assert not region.has_ended(b"next") and not caplog.records
    shown.weights = b"newer"
    load(2)
    assert region.has_ended(b"next"), "where nothing is stored a load tells"
    assert "is served KV of the old ones" in caplog.text
    worker.shutdown()
