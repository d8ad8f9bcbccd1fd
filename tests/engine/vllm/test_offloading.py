"""Our tiers under vLLM's own OffloadingConnector, which dies of a load that fails."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spec.load import load_chain
from tests.engine.vllm.tiny_vllm import (
    BLOCK_TOKENS,
    GEMMA,
    Run,
    documents,
    hosted,
    under_own_spec,
)
from tests.engine.vllm.vllm_chains import IN_PROCESS, ONE_BY_ONE, disk
from tiers.connector.worker.weight_watch import WeightWatch
from tiers.contract.weight_reports import Weights
from tiers.data.inspection import inspect_tier
from tiers.disk.records import DiskRecords

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
    """Staging has room for 48 blocks: each prompt of 18 pushes out another's, once it is stored."""
    here = hosted(disk(tmp_path / "disk") | {"store_process": "always"})
    first = run_vllm(ONE_BY_ONE * 2, kv_transfer_config=here, settled=True, **IN_PROCESS)
    assert first.tokens == answers * 2
    assert first.cached == NONE + ALL

    again = run_vllm(ONE_BY_ONE, kv_transfer_config=here, **IN_PROCESS)
    assert again.tokens == answers
    assert again.cached == ALL

    records = DiskRecords(tmp_path / "disk")
    (group,) = inspect_tier(records, is_encrypted=False).groups
    records.close()
    assert group.note is not None and group.note.model.startswith("/"), "its path"
    assert (group.standing, group.note.block_tokens) == ("usable", BLOCK_TOKENS)

    overwrite(tmp_path / "disk")
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
    from vllm.v1.kv_offload.config import OffloadingConfig

    model: Any = SimpleNamespace(max_model_len=64)
    return OffloadingConfig(
        groups=(),
        worker_kv_bytes_per_block=4096,
        enable_kv_cache_events=True,
        extra_config=transfer["kv_connector_extra_config"],
        engine_id="engine",
        model=model,
        cache=SimpleNamespace(tokens_per_hash=32, blocks_per_chunk=1),
        parallel=SimpleNamespace(world_size=1),
    )


class Engine(SimpleNamespace):
    """A configuration of vLLM, as far as it is asked about."""

    use_v2_model_runner = False


PLAIN, ZEROED = (
    SimpleNamespace(needs_kv_cache_zeroing=zeroes, kv_cache_groups=[]) for zeroes in (False, True)
)
"""KV cache configurations, of which vLLM zeroes the pages of one before it uses them."""


def engine_of(**model: Any) -> Engine:
    """That of a model."""
    facts: dict[str, Any] = {"model": "org/model", "multimodal_config": None}
    facts |= {"has_inner_state": False, "is_hybrid": False, "hf_config": None}
    return Engine(
        model_config=SimpleNamespace(**(facts | model)),
        cache_config=SimpleNamespace(prefix_match_unit=None, cache_dtype="auto"),
        lora_config=None,
        weight_transfer_config=None,
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config={}),
    )


@pytest.mark.parametrize("says", ["has_inner_state", "is_hybrid"])
def test_early_loads_are_refused_for_models_with_states(says: str) -> None:
    """vLLM would read states before they are there. Qwen3.5 with images says `is_hybrid` alone."""
    from tiers.engine.vllm_hosting import refuse_engine

    early = {"sync_load_budget_bytes": 1 << 20}
    states = engine_of(**{says: True})
    with pytest.raises(ValueError, match=r"org/model has recurrent layers.*Leave that key out"):
        refuse_engine(states, ZEROED, early, False)
    refuse_engine(states, ZEROED, {}, False)
    refuse_engine(engine_of(), PLAIN, early, False)


def test_what_runner_v2_overwrites_early_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of states, and of KV of several precisions."""
    from tiers.engine.vllm_hosting import refuse_engine

    monkeypatch.setattr(Engine, "use_v2_model_runner", True)
    with pytest.raises(ValueError, match=r"org/model has recurrent layers, or KV.* Runner V2"):
        refuse_engine(engine_of(), ZEROED, {}, False)
    refuse_engine(engine_of(), PLAIN, {}, False)


def test_adapters_are_refused() -> None:
    from tiers.engine.vllm_hosting import refuse_engine

    lora = engine_of()
    lora.lora_config = SimpleNamespace()
    with pytest.raises(ValueError, match="with LoRA, use KVTiersConnector"):
        refuse_engine(lora, PLAIN, {}, False)


def test_connectors_that_load_within_a_step_are_refused_beside_it() -> None:
    """vLLM reports a block that failed so after the step, when its own connector has stored it."""
    from tiers.engine.vllm_hosting import refuse_engine

    listed = engine_of()
    names = ["NixlPullConnector", "OffloadingConnector", "ExampleConnector"]
    entries = [{"kv_connector": name} for name in names]
    listed.kv_transfer_config.kv_connector_extra_config["connectors"] = entries
    with pytest.raises(ValueError, match="as ExampleConnector may: leave one"):
        refuse_engine(listed, PLAIN, {}, False)
    del entries[2]
    refuse_engine(listed, PLAIN, {}, False)


@pytest.mark.parametrize("weights", [[b"old"], [b"new"]])
@pytest.mark.parametrize("call", ["fails", "comes while they sleep"])
def test_weights_are_compared_after_each_call_or_when_they_can_be_read(
    call: str, weights: list[bytes]
) -> None:
    """A call may fail on one rank and change another's; what sleeps has no memory to read."""
    from tiers.engine.vllm_hosting import HostingEngine

    def ask(method: Any) -> list[bytes]:
        assert not workers.is_sleeping, "a device's memory is unmapped"
        return weights

    def client(method: str) -> None:
        if call == "fails":
            raise RuntimeError("on one of two ranks")

    workers = SimpleNamespace(collective_rpc=ask, is_sleeping=call != "fails")
    engine: Any = object.__new__(HostingEngine)
    core = SimpleNamespace(collective_rpc=client)
    engine._executor, engine._seen, engine._is_compared = workers, [b"old"], True
    engine._is_outdated = engine._has_looked = engine._has_failed = engine._is_fresh = False
    engine._resets, engine._watch = 0, WeightWatch(Weights(), ranks=1)
    engine._room = SimpleNamespace(step_begins=lambda: None)
    engine._watch_calls(core)
    assert engine.is_outdated == workers.is_sleeping
    with suppress(RuntimeError):
        core.collective_rpc("reload_weights")
    assert engine.is_outdated, "it is not known yet"
    workers.is_sleeping = False
    assert engine.is_outdated
    engine.end_step()
    assert engine.is_outdated == (weights == [b"new"])


@pytest.mark.parametrize("after", ["a reset", "a step", "the start"])
@pytest.mark.parametrize("who", ["the engine", "a client", "a client, and they sleep on"])
def test_workers_that_sleep_are_outdated_but_after_a_reset(who: str, after: str) -> None:
    """Their count of sleeps shows in their weights. What sleeps has no memory to read."""
    from tiers.engine.vllm_hosting import HostingEngine

    shown: list[list[bytes] | None] = [[b"old"]]

    def sleep(*_: Any) -> None:
        executor.is_sleeping = who == "the engine"
        shown[0] = None if "sleep on" in who else [b"slept"]

    def wake_up() -> None:
        executor.is_sleeping, shown[0] = False, [b"slept"]

    executor = SimpleNamespace(collective_rpc=lambda _: [*shown], is_sleeping=False)
    executor.sleep, executor.wake_up = sleep, wake_up
    core = SimpleNamespace(collective_rpc=sleep)
    engine: Any = object.__new__(HostingEngine)
    engine._executor, engine._seen, engine._is_compared = executor, [[b"old"]], True
    engine._is_outdated = engine._has_looked = engine._has_failed = engine._is_fresh = False
    engine._resets, engine._watch = 0, WeightWatch(Weights(), ranks=1)
    engine._room = SimpleNamespace(step_begins=lambda: None)
    engine._watch_calls(core)
    if after != "the start":
        engine.reset()
    if after == "a step":
        engine.end_step()
    executor.sleep() if who == "the engine" else core.collective_rpc("sleep")
    if who != "a client":
        assert engine.is_outdated
        executor.wake_up()
    assert engine.is_outdated == (after != "a reset")
    engine.reset()
    assert not engine.is_outdated


@pytest.mark.parametrize("reset", ["asleep", "awake", "awake, then a step"])
def test_a_reset_forgets_what_weights_changed_before(reset: str) -> None:
    """As in training: a part of what sleeps wakes, for weights to be written, then all of it."""
    from tiers.engine.vllm_hosting import HostingEngine

    engine: Any = object.__new__(HostingEngine)
    weights = [b"new"]
    engine._executor = SimpleNamespace(collective_rpc=lambda _: [*weights], is_sleeping=True)
    engine._seen, engine._is_compared, engine._has_looked = [b"old"], False, True
    engine._is_outdated = engine._has_failed = False
    engine._resets, engine._watch = 0, WeightWatch(Weights(), ranks=1)
    engine._room = SimpleNamespace(step_begins=lambda: None)
    engine._executor.is_sleeping = reset == "asleep"
    if reset == "awake, then a step":
        engine.end_step()
        assert engine.is_outdated
    engine.reset()
    assert engine.is_outdated == (reset == "asleep")
    engine._executor.is_sleeping = False
    engine.end_step()
    assert not engine.is_outdated
    weights[0], engine._is_compared = b"newer", False
    engine.end_step()
    assert engine.is_outdated


@pytest.mark.parametrize("how", ["raises", "ends so", "ends well"])
def test_nothing_is_served_or_kept_after_a_step_that_failed(how: str) -> None:
    """An engine may go on, as one of this process whose caller catches that."""
    from tiers.engine.vllm_hosting import HostingEngine

    def execute_model(step: str) -> Future[Any]:
        if how == "raises":
            raise MemoryError("there is none for this layer")
        return step_ends

    step_ends = Future[Any]()
    engine: Any = object.__new__(HostingEngine)
    engine._executor = SimpleNamespace(is_sleeping=False, execute_model=execute_model)
    engine._has_failed = engine._is_outdated = False
    engine._has_looked = engine._is_compared = True
    engine._watch_steps("execute_model")
    with suppress(MemoryError):
        assert engine._executor.execute_model("step") is step_ends
    assert engine.is_outdated == (how == "raises")
    step_ends.set_result(None) if how == "ends well" else step_ends.set_exception(MemoryError())
    assert engine.is_outdated == (how != "ends well")


@pytest.mark.parametrize("right", [True, False])
def test_nothing_is_served_or_kept_behind_a_request_that_goes_on_under_wrong_names(
    right: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Until a reset when there is none: one that is preempted by a reset computes all again."""
    from tiers.engine.vllm_hosting import HostingEngine

    engine: Any = object.__new__(HostingEngine)
    engine._executor, engine._goes_on_right = SimpleNamespace(is_sleeping=False), right
    engine._has_failed = engine._is_outdated = False
    engine._has_looked = engine._is_compared = True
    scheduler: Any = SimpleNamespace(requests={}, add_request=lambda request: "added")
    engine._watch_requests(scheduler)
    assert scheduler.add_request(SimpleNamespace(resumable=False)) == "added"
    assert not engine.is_outdated
    scheduler.requests["r"] = session = SimpleNamespace(resumable=True)
    caplog.set_level("INFO")
    for _ in range(3):  # each part of it is added
        assert scheduler.add_request(session) == "added"
        assert engine.is_outdated != right and engine.serves == right
    assert caplog.text.count("serve and keep nothing") == (not right)
    for there, succeeded in ((True, True), (False, False), (False, True)):
        engine._is_outdated = False
        scheduler.requests = {"r": session} if there else {}
        engine._was_reset(scheduler, succeeded)
        assert engine.is_outdated == (not succeeded or (there and not right))


def settings_of(*tiers: dict[str, Any], **chain: Any) -> dict[str, Any]:
    """What vLLM's own spec is given for a chain, with blocks of 1 MiB."""
    from tiers.engine.vllm_offloading import vllm_settings

    written = hosted(*tiers, **{"staging": None, **chain})["kv_connector_extra_config"]["chain"]
    return vllm_settings(load_chain(written), 1 << 20)


def test_a_chain_becomes_host_memory_and_a_tier_for_each_store(tmp_path: Path) -> None:
    redis = {"type": "redis", "url": "redis://127.0.0.1:1"}
    arc = {**CPU, "eviction": "arc"}
    settings = settings_of(arc, disk(tmp_path), redis)
    assert settings["cpu_bytes_to_use"] == 64 << 20
    assert settings["eviction_policy"] == "arc"
    stores = [tier.pop("store").type for tier in settings["secondary_tiers"]]
    assert stores == ["disk", "redis"]
    assert settings["secondary_tiers"][0] == {
        "type": "KVTiersStore",
        "module_path": "tiers.engine.vllm_offloading",
    }
    alone = settings_of(disk(tmp_path))
    assert alone["cpu_bytes_to_use"] == 1 << 30, "a long prompt fits"
    assert settings_of(disk(tmp_path), staging="3MiB")["cpu_bytes_to_use"] == 3 << 20


NOWHERE = {"type": "disk", "capacity": "64MiB", "path": "/nowhere"}


@pytest.mark.parametrize(
    ("chain", "match"),
    [
        ({"tiers": [CPU, {**CPU, "name": "more"}]}, "at most one cpu tier"),
        ({"tenants": {"a": {}}}, "the chain has tenants, which vLLM's"),
        ({"record": {"path": "/nowhere"}}, "the chain has record, which vLLM's"),
        ({"explain": {}}, "the chain has explain, which vLLM's"),
        ({"events": {"ownership": True}}, "the chain has events, which vLLM's"),
        ({"max_wait": "1s"}, "the chain has max_wait, which vLLM's"),
        ({"warm": {}, "tiers": [CPU, NOWHERE]}, "the chain has warm, which vLLM's"),
        ({"report_cached_tokens": False}, "the chain has report_cached_tokens, which vLLM's"),
        ({"control": {"name": "one"}}, "the chain has control, which vLLM's"),
        ({"load_policy": "longest"}, "sets load_policy, .* it is stitched"),
        ({"load_when": "sooner"}, "sets load_when, .* it is always"),
        ({"promote": False}, "sets promote, .* it is true"),
        ({"on_reset": "keep"}, "on_reset: keep"),
        ({"store": "computed"}, "store: computed"),
        ({"tiers": [{**CPU, "store_threshold": 2}]}, "'cpu' has store_threshold"),
    ],
)
def test_what_vllm_does_not_obey_is_refused(chain: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        settings_of(CPU, **chain)
    assert settings_of(CPU, record=None, tenants={}, promote=True, control=None)


def test_a_package_that_says_what_is_stored_is_refused() -> None:
    """vLLM stores all blocks."""
    from tiers.engine.vllm_secondary_tier import refuse_unhosted
    from tiers.remote.spec import RedisSpec

    spec = RedisSpec.model_validate({"url": "redis://127.0.0.1:1"})
    refuse_unhosted(spec)
    with pytest.raises(ValueError, match="'redis' has admission, which vLLM's"):
        refuse_unhosted(spec.model_copy(update={"admission": "seldom"}))


def test_a_key_of_vllms_that_the_chain_decides_is_refused() -> None:
    from tiers.engine.vllm_offloading import KVTiersOffloadingSpec

    transfer = hosted(CPU)
    transfer["kv_connector_extra_config"]["secondary_tiers"] = [{"type": "fs"}]
    with pytest.raises(ValueError, match="has secondary_tiers, which the chain decides"):
        KVTiersOffloadingSpec(config_of(transfer))


def test_host_memory_without_room_for_a_block_is_refused() -> None:
    from tiers.engine.vllm_offloading import KVTiersOffloadingSpec
    from tiers.errors import TierUnusable

    with pytest.raises(TierUnusable, match="less than one block"):
        KVTiersOffloadingSpec(config_of(hosted({**CPU, "capacity": "1KiB"})))


@pytest.mark.faults
@pytest.mark.fault
def test_a_chain_of_stores_serves_past_a_damaged_one(
    run_vllm: Callable[..., Run], answers: list[list[list[int]]], server: Any, tmp_path: Path
) -> None:
    """Each block is stored in all of them, and the first that has it whole serves it."""
    redis = {"type": "redis", "url": server.url}
    both = hosted(disk(tmp_path / "disk"), redis)
    run_vllm(ONE_BY_ONE, kv_transfer_config=both, settled=True, **IN_PROCESS)
    overwrite(tmp_path / "disk")
    again = run_vllm(ONE_BY_ONE * 2, kv_transfer_config=both, settled=True, **IN_PROCESS)
    assert again.tokens == answers * 2
    assert again.cached[4:] == ALL
    (file,) = set(re.findall(r"/dev/shm/vllm_offload_\S+\.mmap", again.log))
    assert not Path(file).exists()


def test_a_store_of_ours_under_vllms_own_spec(
    run_vllm: Callable[..., Run], answers: list[list[list[int]]], tmp_path: Path
) -> None:
    """Beside vLLM's own tiers: by one entry of `secondary_tiers`. Stores may hold half of its host
    memory, 24 blocks: no prompt of 18 is stored while another's still are."""
    transfer = under_own_spec(disk(tmp_path), 3 << 20)
    run_vllm(ONE_BY_ONE, kv_transfer_config=transfer, settled=True, **IN_PROCESS)
    again = run_vllm(ONE_BY_ONE, kv_transfer_config=transfer, **IN_PROCESS)
    assert (again.tokens, again.cached) == (answers, ALL)


@pytest.mark.parametrize("own", [False, True])
def test_a_tier_that_serves_no_more_shows_it_in_the_metrics(
    run_vllm: Callable[..., Run], answers: list[list[list[int]]], tmp_path: Path, own: bool
) -> None:
    """By a reset of the engine's own cache alone; what else ends its service is the same to it."""
    store = disk(tmp_path)
    transfer = under_own_spec(store, 3 << 20) if own else hosted(store)
    options: dict[str, Any] = {"kv_transfer_config": transfer, "settled": True, **IN_PROCESS}
    first = run_vllm(ONE_BY_ONE, **options)
    assert first.count("disk", "hosted_tier_state open") == 1
    told: dict[str, Any] = {"1": [("reset_prefix_cache", {})]}
    again = run_vllm(ONE_BY_ONE, told=told, **options)
    assert again.tokens == answers
    assert again.count("disk", "hosted_tier_state open") == 0
    assert again.count("disk", "hosted_tier_state down") == 1


def overwrite(folder: Path) -> None:
    """Damage the blocks of a disk here and there."""
    for slab in folder.glob("**/slab-*"):
        with slab.open("r+b") as file:
            for position in range(5096, slab.stat().st_size, 500_000):
                file.seek(position)
                file.write(b"wrong KV")
