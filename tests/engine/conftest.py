"""Engines: the replay engine, and a real vLLM with a tiny random Llama in its own process."""

from __future__ import annotations

import itertools
import json
import subprocess
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from spec.chain import ChainSpec
from tests.engine.vllm.checkpoints import write_model
from tests.engine.vllm.tiny_vllm import BLOCK_TOKENS, LLAMA, Batch, EngineFailed, Run
from tests.support.process_worker import ProcessWorker
from tests.support.replay import ReplayEngine
from tests.support.replay_chains import MODEL, close, cpu, disk, redis
from tests.support.servers import RedisServer
from tests.support.slow_store import STORES, TroubledStore
from tiers.connector.policy import request_state
from tiers.engine.plugin import transfer_config
from tiers.wrappers import reopening


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ReplayEngine]]:
    """Make replay engines; what they leave is checked, and they are closed, after the test."""
    # A busy machine must not make misses of hits that a test counts on, so lookups have longer
    # here, as Redis has in `replay_chains.redis`, and a start waits longer for its first answer:
    # what is computed before that is not stored. test_production_limits.py runs with the defaults.
    monkeypatch.setattr(request_state, "LOOKUP_SECONDS", 30.0)
    monkeypatch.setattr(reopening, "REACH_SECONDS", 30.0)
    engines: list[ReplayEngine] = []

    def make(chain: ChainSpec | None, *, processes: bool = False, **options: Any) -> ReplayEngine:
        if processes:
            options["make_worker"] = ProcessWorker
        engines.append(ReplayEngine(chain, options.pop("model", MODEL), **options))
        return engines[-1]

    yield make
    for made in engines:
        close(made)


@pytest.fixture
def store() -> Iterator[TroubledStore]:
    """What the tier of `slow_store` keeps its blocks in, for this test."""
    STORES[:] = [TroubledStore()]
    yield STORES[0]
    STORES[0].close()


@pytest.fixture(params=["cpu", "redis", "all"])
def tiers(request: Any, tmp_path: Path, shared_server: RedisServer) -> list[dict[str, Any]]:
    """Host memory alone, a store alone, and then one of each type."""
    each = {
        "cpu": cpu(),
        "disk": disk(tmp_path / "disk"),
        "redis": redis(shared_server, tmp_path),
    }
    return [*each.values()] if request.param == "all" else [each[request.param]]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, Any]], Path]:
    """Make the folder of a model of random weights, once in a session."""
    return partial(write_model, tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def tiny_llama(tiny_model: Callable[[dict[str, Any]], Path]) -> Path:
    """The model of most tests."""
    return tiny_model(LLAMA)


@pytest.fixture(scope="session")
def run_vllm(
    tiny_llama: Path,
    tmp_path_factory: pytest.TempPathFactory,
    vllm_jobs: subprocess.Popen[str],
) -> Callable[..., Run]:
    """Run batches of requests through a fresh engine, with the chain of `tiers` or without.
    `drawn`: other settings of that chain."""
    return runs(vllm_jobs, tiny_llama, tmp_path_factory)


def runs(
    jobs: subprocess.Popen[str], tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Run]:
    """See `run_vllm`; `jobs`: where the engines run."""
    folder = tmp_path_factory.mktemp("vllm")
    sockets = tmp_path_factory.mktemp("control")
    numbers = itertools.count()

    def run(batches: Sequence[Batch], tiers: Sequence[Any] | None = None, **options: Any) -> Run:
        name = folder / f"run-{next(numbers)}"
        env = options.pop("env", {})
        extras = "abort before hosts is_async path preempt settled steps_in_flight told warmed"
        more = {name: options.pop(name) for name in extras.split() if name in options}
        control = options.pop("control", sockets)
        policy = options.pop("load_policy", "first")
        load_when = options.pop("load_when", "always")
        # A lookup has a tenth of it: a busy machine must not make misses of hits that tests count.
        max_wait = options.pop("max_wait", "100s")
        on_reset = options.pop("on_reset", "forget")
        drawn = options.pop("drawn", {})
        recording = {"record": {"path": str(options.pop("record"))}} if "record" in options else {}
        recording |= {key: options.pop(key) for key in ("tenants", "warm") if key in options}
        engine = {
            "model": str(tiny_llama),
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "block_size": BLOCK_TOKENS,
            "max_model_len": 1024,
            "num_gpu_blocks_override": 40,
            "enforce_eager": True,
            "disable_log_stats": False,
            **options,
        }
        if tiers is not None:
            chain = name.with_suffix(".yaml")
            spec = {"version": 1, "staging": "64MiB", "load_policy": policy, "tiers": list(tiers)}
            # These models compute sooner than any tier delivers, and tests count hits.
            spec["load_when"] = load_when
            spec |= {"max_wait": max_wait, "on_reset": on_reset, **recording, **drawn}
            spec |= {"explain": {}, "control": {"folder": str(control)}}
            chain.write_text(yaml.safe_dump(spec))
            engine["kv_transfer_config"] = transfer_config(chain)
        result, log = name.with_suffix(".json"), name.with_suffix(".log")
        job = {"engine": engine, "batches": batches, "env": env, **more}
        job |= {"control": str(control)} if tiers is not None else {}
        status = do_job(jobs, {**job, "result": str(result), "log": str(log)})
        said = log.read_text(errors="replace")
        if status != "0" or not result.exists():
            raise EngineFailed(said[-6000:])
        data = json.loads(result.read_text())
        print(data["tiers"], said[-3000:])  # shown where a test fails
        return Run(
            [[r["tokens"] for r in batch] for batch in data["batches"]],
            [[r["cached"] for r in batch] for batch in data["batches"]],
            [[r["ttft"] for r in batch] for batch in data["batches"]],
            data["tiers"],
            data["preemptions"],
            data["external_hits"],
            data["drafts"],
            data["drafts_accepted"],
            said,
            data["explained"],
            data["status"],
            data["running"],
            [[r.get("logits", []) for r in batch] for batch in data["batches"]],
            [[(a, b) for a, b in batch[0].get("chunks", [])] for batch in data["batches"]],
            [[r.get("params") for r in batch] for batch in data["batches"]],
        )

    return run


def do_job(process: subprocess.Popen[str], job: dict[str, Any]) -> str:
    """Run one job; its exit status, or the process of one that serves. A job that hangs is ended by
    the test's own timeout."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps(job) + "\n")
    process.stdin.flush()
    return process.stdout.readline().strip()
