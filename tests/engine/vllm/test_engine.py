"""A real vLLM engine over real tiers: the same tokens as without them, whatever served."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spec.load import load_chain
from spec.offloading import StoreSpec
from tests.engine.vllm.tiny_vllm import BLOCK_TOKENS, EngineFailed, Run, documents
from tests.support.explaining import check_sums, tier_of
from tests.support.plugin_packages import write_package
from tiers.data.inspection import inspect_tier
from tiers.traces.open_trace import open_trace

pytestmark = pytest.mark.vllm

CPU = {"type": "cpu", "capacity": "64MiB"}
PROMPTS = [(prompt, 8) for prompt in documents(4, 600)]
ONE_BY_ONE = [[prompt] for prompt in PROMPTS]
"""Four prompts of 18 full blocks each, of which an engine of 40 blocks keeps two."""
COMPLETE = 4 * 18 * 32


def disk(path: Path, **more: Any) -> dict[str, Any]:
    return {"type": "disk", "capacity": "64MiB", "path": str(path), **more}


SHARED = documents(3, 300)
CONCURRENT = [(SHARED[i % 3] + [i + 3] * 40, 60) for i in range(16)]
"""Sixteen prompts on three prefixes, which run at once in far fewer blocks than they need."""
IN_PROCESS = {"env": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}}
"""Scheduler and worker in one process, which also starts sooner."""
AHEAD: dict[str, Any] = {"steps_in_flight": 2}
"""What vLLM does by default on GPUs."""


@pytest.fixture(scope="module")
def plain(run_vllm: Callable[..., Run]) -> Run:
    """What the engine answers without a chain: the prompts, then the concurrent ones one by one."""
    run = run_vllm(ONE_BY_ONE + [[request] for request in CONCURRENT], **IN_PROCESS)
    assert len({tuple(batch[0]) for batch in run.tokens}) == 20, "the prompts must matter"
    return run


@pytest.fixture(scope="module")
def answers(plain: Run) -> list[list[list[int]]]:
    """The answers to the prompts, one by one."""
    return plain.tokens[:4]


def cached_by_tier(params: dict[str, Any] | None) -> dict[str, int]:
    """What an answer's transfer parameters report; they have nothing else."""
    if params is None:
        return {}
    assert [*params] == ["kvtiers"] and [*params["kvtiers"]] == ["cached_tokens"]
    tokens: dict[str, int] = params["kvtiers"]["cached_tokens"]
    return tokens


def hits_in(trace: Path, requests: int) -> int:
    """Tokens of all blocks that an earlier request of a recorded trace had, in its prompt or in
    its answer. Requests of one token, which let stores end, do not count."""
    known: set[int] = set()
    tokens = 0
    recorded = [one for one in open_trace(trace) if one.input_length > 1]
    assert len(recorded) == requests
    for request in recorded:
        for block in request.blocks:
            if block not in known:
                break
            tokens += BLOCK_TOKENS
        known.update(request.blocks, request.answer_blocks)
    return tokens


def test_eviction_restart_and_replica(
    run_vllm: Callable[..., Run],
    answers: list[list[list[int]]],
    tmp_path: Path,
    shared_server: Any,
) -> None:
    """Each tier serves in turn; two of them are of one type. What is asked is recorded. Of these
    engines one has two steps in flight, and the others find what it has stored, or what processes
    beside it have."""
    trace = tmp_path / "trace"
    redis = {"type": "redis", "url": shared_server.url, "key_prefix": str(tmp_path), "ttl": "1h"}
    redis["timeout"] = "30s"  # what a busy machine takes longer for is a miss otherwise
    redis["store_process"] = "always"
    slow = disk(tmp_path / "slow", name="slow")
    disks = [disk(tmp_path / "fast", name="fast", store_process="always"), slow]

    both = {"record": trace, "settled": True}
    first = run_vllm(ONE_BY_ONE * 2, [CPU, *disks, redis], **both, **AHEAD)
    assert first.tokens == answers * 2
    assert first.loaded() == {"cpu": COMPLETE}
    assert {first.count(t, "stored_blocks") for t in ("cpu", "fast", "slow", "redis")} == {72}

    restarted = run_vllm(ONE_BY_ONE * 2, [CPU, *disks, redis], **both, **IN_PROCESS)
    assert restarted.tokens == answers * 2
    assert restarted.loaded() == {"fast": COMPLETE, "cpu": COMPLETE}, "promoted on the first load"

    runs = [first, restarted]
    for run in runs:  # nothing but tiers had any
        reported = [cached_by_tier(params) for batch in run.params for params in batch]
        cached = [tokens for batch in run.cached for tokens in batch]
        assert [sum(tiers.values()) for tiers in reported] == cached
        sums = sum(map(Counter, reported), Counter())
        assert sums == run.loaded()
    hits = sum(sum(batch) for run in runs for batch in run.cached)
    assert hits == 3 * COMPLETE == sum(run.external_hits for run in runs)
    assert hits_in(trace, requests=16) == hits, "all that came before is found again"

    replica = run_vllm(ONE_BY_ONE, [CPU, disk(tmp_path / "there"), redis], **IN_PROCESS)
    assert replica.tokens == answers
    assert replica.loaded() == {"redis": COMPLETE}
    assert replica.count("disk", "stored_blocks") == 72, "promoted to the disk as well"

    for tier in (*disks, redis):  # each namespace has a note, which names the model and no salt
        (spec,) = load_chain({"version": 1, "tiers": [tier]}).tiers
        assert isinstance(spec, StoreSpec)
        records = spec.records()
        assert records is not None
        (group,) = inspect_tier(records, is_encrypted=False).groups
        records.close()
        assert group.note is not None and group.note.model.startswith("/"), "its path"
        note = (group.note.block_tokens, group.note.salted, group.note.lasts, group.blocks)
        assert (*note, group.standing) == (BLOCK_TOKENS, False, True, 72, "usable")


def test_after_a_restart_what_was_used_last_is_in_memory(
    run_vllm: Callable[..., Run], answers: list[list[list[int]]], tmp_path: Path
) -> None:
    tiers = [CPU, disk(tmp_path)]
    run_vllm(ONE_BY_ONE, tiers, **IN_PROCESS)
    warm = {"bytes": f"{2 * 18 * 2 * 4 * 2 * 32 * 32 * 4}B", "seconds": "1m"}
    run = run_vllm(ONE_BY_ONE[::-1], tiers, warm=warm, warmed=36, **IN_PROCESS)
    assert run.tokens == answers[::-1]
    assert run.count("disk", "warmed_blocks") == 36
    assert run.loaded() == {"cpu": COMPLETE / 2, "disk": COMPLETE / 2}


@pytest.mark.parametrize("in_flight", [pytest.param(1, marks=pytest.mark.faults), 2])
def test_concurrent_requests_and_preemption(
    run_vllm: Callable[..., Run], plain: Run, tmp_path: Path, in_flight: int
) -> None:
    salts = [{}, {"salt": "known"}, {"salt": "nameless"}]
    salted = [(*request, salts[i % 3]) for i, request in enumerate(CONCURRENT)]
    run = run_vllm(
        [salted, salted],
        [CPU, disk(tmp_path / "disk")],
        num_gpu_blocks_override=34,
        record=tmp_path / "trace",
        tenants={"known": {"name": "gold"}, "nameless": {}},
        steps_in_flight=in_flight,
        **IN_PROCESS,
    )
    assert run.preemptions > 0, "the engine was meant to run out of blocks"
    assert sum(run.loaded().values()) > 0
    expected = [batch[0] for batch in plain.tokens[4:]]
    assert run.tokens == [expected, expected]
    recorded = [one for one in open_trace(tmp_path / "trace") if one.input_length > 1]
    assert [one.input_length for one in recorded] == [len(p) for p, _ in CONCURRENT] * 2
    assert {one.output_length for one in recorded} == {60}, "once, with the whole answer"
    check_sums(run.explained, run.external_hits)
    assert len(run.explained) >= 2 * len(CONCURRENT)
    begun = [attempt for one in run.explained for attempt in one["attempts"]]
    assert any(attempt["preempted"] for attempt in begun)
    check_tenants(run, {"gold", "(other)"})
    assert run.count("tenant gold", "tenant_loaded_tokens") > 0


def check_tenants(run: Run, expected: set[str]) -> None:
    """The sums over tenants are those over tiers, and the engine's own."""
    tenants = {name for name in run.tiers if name.startswith("tenant ")}
    assert {name.removeprefix("tenant ") for name in tenants} == expected
    for name in ("hit_tokens", "loaded_tokens", "loaded_bytes", "stored_bytes"):
        of_tiers = sum(run.count(tier, name) for tier in run.tiers.keys() - tenants)
        assert sum(run.count(tenant, f"tenant_{name}") for tenant in tenants) == of_tiers > 0, name
    assert sum(run.count(tenant, "tenant_hit_tokens") for tenant in tenants) == run.external_hits
    assert not any("known" in name or "nameless" in name for name in run.tiers)


@pytest.mark.faults
def test_hundreds_of_requests_with_aborts_in_too_little_kv(
    run_vllm: Callable[..., Run], plain: Run, tmp_path: Path, shared_server: Any
) -> None:
    requests = CONCURRENT * 13
    redis = {"type": "redis", "url": shared_server.url, "key_prefix": str(tmp_path)}
    redis["timeout"] = "30s"
    tiers = [{"type": "cpu", "capacity": "2MiB"}, disk(tmp_path / "disk"), redis]
    few = {"num_gpu_blocks_override": 34, "abort": 70, **AHEAD, **IN_PROCESS}
    run = run_vllm([requests], tiers, load_policy="stitched", load_when="sooner", **few)
    assert run.count("cpu", "load_tokens_per_second") > 0
    assert run.count("cpu", "prefill_tokens_per_second") > 0
    assert run.preemptions > 0
    assert sum(run.loaded().values()) > 0
    whole = 0
    for number, tokens in enumerate(run.tokens[0]):
        (expected,) = plain.tokens[4 + number % len(CONCURRENT)]
        assert tokens == expected[: len(tokens)], f"request {number}"
        whole += len(tokens) == len(expected)
    assert whole >= len(requests) - 70
    check_sums(run.explained, run.external_hits)
    assert len(run.explained) >= len(requests)
    assert sum(one["state"] == "aborted" for one in run.explained) > 0


def test_unusable_tiers_are_reported_and_the_others_serve(
    run_vllm: Callable[..., Run], answers: list[list[list[int]]], tmp_path: Path, server: Any
) -> None:
    server.kill()
    in_the_way = tmp_path / "file"
    in_the_way.write_text("not a folder")
    tiers = [
        {"type": "cpu", "capacity": "4KiB", "name": "tiny"},
        {"type": "disk", "capacity": "64MiB", "path": "/proc/kvtiers", "name": "read-only"},
        disk(in_the_way / "tier", name="blocked"),
        {"type": "disk", "capacity": "4KiB", "path": str(tmp_path / "small"), "name": "small"},
        {"type": "redis", "url": server.url, "timeout": "500ms", "name": "down"},
        disk(tmp_path / "good", name="good"),
    ]
    run = run_vllm(ONE_BY_ONE * 2, tiers, settled=True, **IN_PROCESS)
    assert run.tokens == answers * 2
    assert run.loaded() == {"good": COMPLETE}
    for name in ("tiny", "read-only", "blocked", "small"):
        assert re.search(f"tier '?{name}'? is unusable", run.log)
    assert "tier down is configured, not reached yet" in run.log


@pytest.mark.faults
def test_two_worker_processes_hold_a_share_each(run_vllm: Callable[..., Run]) -> None:
    two = {"tensor_parallel_size": 2, "env": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}}
    run = run_vllm(ONE_BY_ONE * 2, [CPU], settled=True, **two)
    assert run.tokens[:4] == run.tokens[4:]
    assert run.loaded() == {"cpu": COMPLETE}
    check_sums(run.explained, run.external_hits)
    served = [one for one in run.explained if one["attempts"][0]["loaded"].get("cpu")]
    assert sum(one["attempts"][0]["loaded"]["cpu"] for one in served) == COMPLETE
    assert all(tier_of(one, "cpu")["copy_ms"] > 0 for one in served)


def test_a_damaged_disk_never_changes_an_answer(
    run_vllm: Callable[..., Run], answers: list[list[list[int]]], tmp_path: Path
) -> None:
    here = disk(tmp_path / "disk")
    run_vllm(ONE_BY_ONE, [here], **IN_PROCESS)
    for slab in (tmp_path / "disk").glob("**/slab-*"):
        with slab.open("r+b") as file:
            for position in range(5096, slab.stat().st_size, 500_000):
                file.seek(position)
                file.write(b"wrong KV")
    run = run_vllm(ONE_BY_ONE, [here], **AHEAD, **IN_PROCESS)
    assert run.tokens == answers
    assert run.count("disk", "load_failures") > 0
    assert 0 < run.loaded()["disk"] < COMPLETE


def test_an_engine_that_ends_within_a_step_leaves_nothing_of_it(
    run_vllm: Callable[..., Run], tmp_path: Path
) -> None:
    """Its blocks have the KV of one layer, under their right keys."""
    [prompt] = documents(1, 400, seed=5)
    asked, others = [[(prompt, 8)]], ONE_BY_ONE[:2]
    right = run_vllm(asked, **IN_PROCESS)
    with pytest.raises(EngineFailed, match="there is none for this layer"):
        run_vllm([*others, *asked], [disk(tmp_path)], before={"start": ("layers_raise", 400)})
    after = run_vllm([*asked, *others], [disk(tmp_path)], **IN_PROCESS)
    assert after.tokens[:1] == right.tokens
    assert after.loaded() == {"disk": 2 * 18 * 32}, "what ended before is there"


def test_a_step_that_was_queued_behind_one_that_raises_leaves_nothing(
    run_vllm: Callable[..., Run], tmp_path: Path
) -> None:
    """A worker of its own process goes on with the prompt's next chunk, before the engine ends. It
    attends to KV that the first never wrote; a restart stores what is missing before it."""
    asked = [[(documents(1, 400, seed=5)[0], 8)]]
    right = run_vllm(asked, **IN_PROCESS)
    chunks = {"max_num_batched_tokens": 128, "distributed_executor_backend": "mp", **AHEAD}
    with pytest.raises(EngineFailed, match="EngineDeadError"):
        run_vllm(asked, [disk(tmp_path)], before={"start": ("layers_raise", 128)}, **chunks)
    for loaded in ({}, {"disk": 12 * 32}):
        after = run_vllm(asked, [disk(tmp_path)], **IN_PROCESS)
        assert (after.tokens, after.loaded()) == (right.tokens, loaded)


def test_a_policy_that_fails_requests_for_a_tier_is_refused() -> None:
    from tiers.engine.vllm import configured_chain

    transfer = SimpleNamespace(
        kv_connector="KVTiersConnector",
        kv_load_failure_policy="fail",
        kv_connector_extra_config={"chain": "/chain.yaml"},
    )
    with pytest.raises(ValueError, match='"kv_load_failure_policy": "recompute"'):
        configured_chain(SimpleNamespace(kv_transfer_config=transfer))


PLUGIN = """
from spec.offloading import StoreSpec

class Store:
    def has(self, keys): return [True for key in keys]
    def put(self, blocks): return [True for block in blocks]
    def get(self, blocks):
        for _, payload in blocks: payload[:] = bytes(len(payload))
        return [True for block in blocks]
    def drop(self, keys): pass
    def close(self): raise KeyError("closed")
    def peek(self, keys): raise SystemExit("a plugin exits")
    def touch(self, keys): pass

class LiarSpec(StoreSpec):
    hit_source = "device"
    def open(self, site): return Store()

class RaiserSpec(StoreSpec):
    def open(self, site): raise ArithmeticError("no such tape")
"""


@pytest.mark.faults
@pytest.mark.fault
def test_plugins_that_lie_and_raise(
    run_vllm: Callable[..., Run], answers: list[list[list[int]]], tmp_path: Path
) -> None:
    package = write_package(tmp_path, "oddtapes", PLUGIN, liar="LiarSpec", raiser="RaiserSpec")
    tiers = [{"type": "liar"}, {"type": "raiser"}, CPU]
    run = run_vllm(ONE_BY_ONE * 2, tiers, path=[str(package)], settled=True, **IN_PROCESS)
    assert run.tokens == answers * 2
    assert run.loaded() == {"cpu": COMPLETE}
    assert run.count("liar", "damaged_blocks") > 0
    assert "raiser (package oddtapes 1.0): open raised ArithmeticError: no such tape" in run.log


@pytest.mark.faults
def test_a_cpu_tier_larger_than_the_machine_is_refused_by_name_and_the_disk_serves(
    run_vllm: Callable[..., Run], answers: list[list[list[int]]], tmp_path: Path
) -> None:
    tiers = [{"type": "cpu", "capacity": "1TiB"}, disk(tmp_path)]
    run = run_vllm(ONE_BY_ONE * 2, tiers, settled=True, **IN_PROCESS)
    assert run.tokens == answers * 2
    assert run.loaded() == {"disk": COMPLETE}
    assert "tier 'cpu' is unusable" in run.log and "1TiB on this host" in run.log
