"""A real vLLM on this machine: what it answers with a chain, and how soon, beside vLLM's own
OffloadingConnector and no connector.

    python -m bench.gpu_engine [--json FILE] [--smoke] [--only equal|speed] [--seconds 590]
    make gpu-engine ARGS=...

`equal`: small models of four kinds, runners, graphs. Each has to answer from tiers what it answers
from its own cache, to the last bit of the log probabilities. `speed`, with a model of 3B's shape:
time to first token by prompt length, with 1 and 16 prompts at once, without a connector, with
vLLM's own, with a chain, restarted with that chain's disk, and with a chain whose blocks the
engine's process stores (`inside`). Engines start beside each other, as many as the GPU has room
for; those of `speed` are asked one by one, and once the others have ended. Writes JSON anew after
each, with what it logged of who stores its blocks. It ends with 0 if there is a GPU, and all
engines with a chain ran, had their blocks stored by another process, and answered what they should.
`--smoke`: small models and short prompts, which shows only that all of it runs, on a CPU too.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from bench.engine_models import LARGE, LATENT, SMALL, STATES, TINY, WINDOWS, write_model
from bench.gpu_facts import facts
from bench.on_gpu import in_time, write
from bench.report import machine
from tiers.engine.identity.digests import SETTLED_SECONDS

ROOT = Path(__file__).parents[1]
FILE = ROOT / "build" / "gpu-engine.json"
SECONDS = 590.0
ENGINE_SECONDS = 200.0
"""Of an engine that is asked beside others, from its start."""
ASKED_SECONDS = 100.0
"""Of one that is asked alone, from its turn, which may be long after its start."""
TENTHS = 10
ROOM = 9
"""Tenths of a GPU's memory that all engines may ask for; the next wait until others have ended.
They take a little more than they ask for, and this process has some."""
BESIDE = "blocks are stored by the process"
STORES = (
    BESIDE,
    "the engine's stores",
    "blocks are stored by the engine's",
    "stores blocks is gone",
)
"""What a tier logs of who stores blocks: another process, or the engine's own."""
TAIL = 20_000
ANSWER = 8
EAGER: dict[str, Any] = {"enforce_eager": True}
GRAPHS: dict[str, Any] = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16]}
FULL_GRAPHS: dict[str, Any] = {
    **GRAPHS,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
}
"""Without a compiler of PyTorch's."""
V1, V2 = ({"VLLM_USE_V2_MODEL_RUNNER": number} for number in ("0", "1"))
INVARIANT = {**V2, "VLLM_BATCH_INVARIANT": "1"}
"""Kernels that round alike whatever else is computed beside."""
TRITON: dict[str, Any] = {"additional_config": {"gdn_prefill_backend": "triton"}}
OWN_SAMPLER = {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
"""Kernels of vLLM's own, not of a package that is not carried."""


@dataclass(frozen=True)
class Engine:
    """One engine: its model, how it computes (`env` and arguments of LLM), what is beside it, and
    the cells that it is asked; see `engine_child`. One that is `sampled` shows where its thread
    spends the time, and is not judged."""

    name: str
    model: str
    env: Mapping[str, str]
    more: Mapping[str, Any]
    connector: str
    cells: Sequence[tuple[int, int]]
    sampled: int = 0
    sizes: tuple[str, str] | None = None
    """Of its tiers, if others than the plan's."""


@dataclass(frozen=True)
class Plan:
    """What is run: models by name, engines beside each other, and engines one by one; and by part
    the sizes of a tier in memory and of one on disk."""

    models: Mapping[str, tuple[Mapping[str, Any], str]]
    equal: Sequence[Engine]
    speed: Sequence[Engine]
    sizes: Mapping[str, tuple[str, str]]


EQUAL_CELLS = ((2000, 1), (6000, 1), (3000, 4), (12000, 1))
FEW = ("6GiB", "6GiB")
"""Tiers of an engine with few cells: what is pinned for all engines has to fit the host."""
SPEED_CELLS = ((1024, 1), (4096, 1), (16384, 1), (65536, 1), (1024, 16), (2048, 16))
INSIDE_CELLS = (SPEED_CELLS[0], SPEED_CELLS[1], SPEED_CELLS[4])
KINDS = {"llama": SMALL, "windows": WINDOWS, "latent": LATENT, "states": STATES}


def _beside(share: float, gib: int, length: int, blocks: int) -> dict[str, Any]:
    """Arguments of engines that share a GPU: blocks for requests up to a length, and few more."""
    return {
        "gpu_memory_utilization": share,
        "kv_cache_memory_bytes": gib << 30,
        "max_model_len": length,
        "max_num_seqs": 16,
        "num_gpu_blocks_override": blocks,
        "enable_prefix_caching": True,
    }


def _equal(kind: str, env: Mapping[str, str], how: str, blocks: int, **more: Any) -> Engine:
    name = f"{kind}, V{2 - (env is V1)}, {how}"
    return Engine(
        name, kind, env, {**_beside(0.1, 2, 13_000, blocks), **more}, "chain", EQUAL_CELLS
    )


def _speed(connector: str) -> Engine:
    more = {**_beside(0.2, 9, 65536 + 64, 4400), **FULL_GRAPHS}
    return Engine(connector, "3B", V2, more, connector, SPEED_CELLS)


def _sampled(one: Engine) -> Engine:
    """The same, whose thread is looked at."""
    env = {**one.env, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    few = replace(one, cells=one.cells[:1], sizes=FEW)
    return replace(few, name=f"{one.name}, sampled", env=env, sampled=30)


FULL = Plan(
    models={**{name: (one, "bfloat16") for name, one in KINDS.items()}, "3B": (LARGE, "bfloat16")},
    equal=(
        _equal("llama", V2, "graphs", 900, **GRAPHS),
        _equal("llama", V1, "graphs", 900, **GRAPHS),
        _equal("llama", INVARIANT, "whatever the batch", 900, **EAGER),
        _equal("windows", V2, "full graphs", 1500, **FULL_GRAPHS, max_num_batched_tokens=2048),
        _equal("latent", V2, "full graphs", 900, **FULL_GRAPHS),
        _equal("states", V2, "full graphs", 160, **FULL_GRAPHS, **TRITON),
    ),
    speed=(
        *map(_speed, ("none", "chain")),
        replace(_speed("inside"), cells=INSIDE_CELLS, sizes=FEW),
        _speed("native"),
        *(_sampled(_speed(name)) for name in ("chain", "none")),
        _speed("restarted"),
    ),
    sizes={"equal": ("1GiB", "2GiB"), "speed": ("28GiB", "32GiB")},
)
_SMOKE = {**EAGER, "max_model_len": 1024, "block_size": 32, "num_gpu_blocks_override": 44}
_SMOKE_CELLS = ((256, 1), (320, 4), (999, 1), (512, 1))


def _smoke(name: str, connector: str) -> Engine:
    return Engine(name, "llama", V1, _SMOKE, connector, _SMOKE_CELLS)


SMOKE = Plan(
    models={"llama": (TINY, "float32")},
    equal=(_smoke("llama, V1, eager", "chain"),),
    speed=(
        *(_smoke(name, name) for name in ("none", "chain", "restarted", "inside", "native")),
        _sampled(_smoke("chain", "chain")),
    ),
    sizes={"equal": ("64MiB", "64MiB"), "speed": ("64MiB", "64MiB")},
)


@dataclass
class Runs:
    """Runs a plan's engines, and keeps what came of each in `file`. `scratch`: where models and
    disk tiers are."""

    plan: Plan
    file: Path
    scratch: Path
    seconds: float = SECONDS
    began: float = field(default_factory=time.monotonic)
    said: dict[str, Any] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Without it two engines that end together would write one file."""

    def all(self, parts: Sequence[str]) -> bool:
        """Run these parts' engines; whether each is as it should be. One starts when the GPU has
        room for it, and one that is restarted when the one with the same chain has ended."""
        asked = [(one, part) for part in parts for one in getattr(self.plan, part)]
        room = threading.Semaphore(ROOM)
        with ThreadPoolExecutor(len(asked)) as pool:
            runs: dict[str, Future[bool]] = {}
            for engine, part in asked:
                tenths = round(TENTHS * engine.more.get("gpu_memory_utilization", 0))
                for _ in range(tenths):
                    room.acquire()
                before = runs.get("chain") if engine.connector == "restarted" else None
                run = runs[engine.name] = pool.submit(self.run, engine, part, before)
                run.add_done_callback(partial(_leave, room, tenths))
        return all(run.result() for run in runs.values())

    def run(self, engine: Engine, part: str, before: Future[bool] | None = None) -> bool:
        """Run one engine, once what is to be `before` has ended, and write what came of it; whether
        it is as it should be. An engine without a chain is, whatever came of it."""
        if before is not None:
            before.exception()
        file = self.scratch / f"{part}, {engine.name}.json"
        began = time.monotonic()
        left = self.seconds - (began - self.began)
        if part != "speed":
            left = min(ENGINE_SECONDS, left)
        output, code = _child(self._job(engine, part, file), engine.env, max(1.0, left))
        came: dict[str, Any] = {"exit": code, "seconds": round(time.monotonic() - began, 1)}
        came["stores"] = stores(output)
        if code == 0 and file.exists():
            came |= json.loads(file.read_text())
            came["cells"] = [told(cell) for cell in came["cells"]]
        else:
            came["output"] = output[-TAIL:]
        with self.lock:
            self.said["engines"].setdefault(part, {})[engine.name] = came
            write(self.file, self.said)
        print("\n".join(_lines(f"{part}, {engine.name}", came)), flush=True)
        is_judged = engine.connector in ("chain", "restarted") and not engine.sampled
        return not is_judged or is_right(came, engine)

    def _job(self, engine: Engine, part: str, file: Path) -> dict[str, Any]:
        model, dtype = self.scratch / "models" / engine.model, self.plan.models[engine.model][1]
        is_shared = engine.name in ("chain", "restarted")  # a disk of another size is its own
        folder = self.scratch / part / ("disk" if is_shared else engine.name)
        arguments = {"model": str(model), "dtype": dtype, **engine.more}
        sizes = engine.sizes or self.plan.sizes[part]
        if engine.connector == "native":
            arguments["kv_transfer_config"] = {
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"cpu_bytes_to_use": 28 << 30},
            }
        elif engine.connector != "none":
            process = "never" if engine.connector == "inside" else "always"
            arguments["kv_transfer_config"] = _chain(folder, process, *sizes)
        return {
            "engine": arguments,
            "cells": engine.cells,
            "answer": ANSWER,
            "again": engine.connector in ("chain", "native") and not engine.sampled,
            "sampled": engine.sampled,
            "folder": str(folder) if engine.connector in ("chain", "inside") else None,
            "turn": str(self.scratch / "turn"),
            "alone": part == "speed",
            "seconds": ASKED_SECONDS,
            "result": str(file),
        }


def _leave(room: threading.Semaphore, tenths: int, run: Future[bool]) -> None:
    for _ in range(tenths):
        room.release()


def _chain(folder: Path, process: str, in_memory: str, on_disk: str) -> dict[str, Any]:
    """The configuration of our connector, with a tier in memory and one on disk of these sizes."""
    disk = {"type": "disk", "path": str(folder), "capacity": on_disk, "store_process": process}
    cpu = {"type": "cpu", "capacity": in_memory}
    chain = {"version": 1, "load_when": "always", "tiers": [cpu, disk]}
    return {
        "kv_connector": "KVTiersConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"chain": chain},
    }


def told(cell: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a cell: seconds to the first token and cached tokens, by median, and how many
    answers from tiers were those from the engine's own cache, by tokens and to the last bit of log
    probabilities. Where a cell was not asked again, what it was asked first came from tiers."""
    own, again = cell["own"], cell.get("again", cell["cold"])
    count = cell["at_once"]
    came: dict[str, Any] = {"length": cell["length"], "at_once": count}
    came["tokens_per_second"] = count * (cell["length"] + ANSWER) / cell["seconds"]
    for name, answers in (("cold", cell["cold"]), ("own", own), ("again", again)):
        came[f"ttft_{name}"] = statistics.median(one["ttft"] or 0.0 for one in answers)
        came[f"cached_{name}"] = statistics.median(one["cached"] for one in answers)
    tiers = {name for one in again for name in one["from_tiers"]}
    came["from_tiers"] = {
        name: statistics.median(one["from_tiers"].get(name, 0) for one in again) for name in tiers
    }
    pairs = list(zip(own, again, strict=True))
    came["same_answers"] = sum(one["answer"] == two["answer"] for one, two in pairs)
    came["same_bits"] = sum(one["logprobs"] == two["logprobs"] for one, two in pairs)
    if "other" in cell:
        came["prefix_matters"] = cell["other"]["logprobs"] != own[0]["logprobs"]
    return came


def is_right(came: Mapping[str, Any], engine: Engine) -> bool:
    """Whether an engine with a chain ran, had its blocks stored by another process alone, loaded,
    and answered from tiers the same as from its own cache. A restarted one need not store. One
    prompt alone is computed the same way again, to the last bit; of several at once the
    batches differ, and so may rounding, but where the engine rounds alike whatever the batch."""
    always = engine.env is INVARIANT
    cells, stored = came.get("cells", ()), came.get("stores", ())
    is_beside = all(BESIDE in line for line in stored) and len(stored) > 0
    if not is_beside and (stored or engine.connector != "restarted"):
        return False
    return len(cells) == len(engine.cells) and all(
        cell.get("prefix_matters", True)
        and cell["cached_again"] >= cell["cached_own"]  # more where a store came late for its own
        and sum(cell["from_tiers"].values()) > 0.9 * cell["cached_again"]
        and (cell["same_bits"] == cell["at_once"] or not (always or cell["at_once"] == 1))
        for cell in cells
    )


def _child(job: dict[str, Any], env: Mapping[str, str], seconds: float) -> tuple[str, int | None]:
    """Run `engine_child`; what it printed, and its exit status."""
    ours = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", **OWN_SAMPLER, **env}
    command = [sys.executable, "-m", "bench.engine_child"]
    return in_time(command, seconds, json.dumps(job), {**os.environ, **ours})


def stores(output: str) -> list[str]:
    """What an engine logged of who stores its blocks, each line once."""
    said = (line.partition("tier ")[2].strip() for line in output.splitlines())
    return [*dict.fromkeys(line for line in said if any(sign in line for sign in STORES))]


def _lines(name: str, came: Mapping[str, Any]) -> list[str]:
    if "cells" not in came:
        lines = str(came["output"]).strip().splitlines() or ["it printed nothing"]
        # What a tracker of resources says comes behind it, and what its engine said before.
        errors = [line for line in lines if "Error" in line and "See root cause above" not in line]
        return [f"{name}: exit {came['exit']}: {(errors or lines)[-1]}"]
    how = f"{came['runner']}, {came['graphs']}, async {came['async_scheduling']}"
    heads = [f"{name}: {how}, {came['seconds']} s", *(f"  {line}" for line in came["stores"])]
    return heads + [
        f"  {cell['length']:>6} x {cell['at_once']:<2} TTFT ms cold {cell['ttft_cold'] * 1e3:.1f} "
        f"own {cell['ttft_own'] * 1e3:.1f} again {cell['ttft_again'] * 1e3:.1f} "
        f"(cached {cell['cached_own']:.0f}, {cell['cached_again']:.0f}, of {cell['from_tiers']}), "
        f"{cell['tokens_per_second']:,.0f} tokens/s, same {cell['same_answers']}, to the bit "
        f"{cell['same_bits']} of {cell['at_once']}"
        for cell in came["cells"]
    ]


def main(
    file: Path,
    plan: Plan,
    only: str | None = None,
    scratch: Path | None = None,
    seconds: float = SECONDS,
) -> int:
    """Run all and write `file`. `seconds`: for all of it, writing the models too."""
    began = time.monotonic()
    import torch

    scratch = scratch or file.with_suffix("")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parts = [only] if only else ["equal", "speed"]
    for name in {one.model for part in parts for one in getattr(plan, part)}:
        config, dtype = plan.models[name]
        if not (scratch / "models" / name).exists():
            write_model(scratch / "models" / name, dict(config), dtype, device)
    time.sleep(2 * SETTLED_SECONDS)  # of weights younger than that no KV outlasts an engine
    torch.cuda.empty_cache()
    here = {**machine(), "device": facts()}
    here["free_bytes"] = shutil.disk_usage(scratch).free
    said = {"machine": here, "engines": {}}
    write(file, said)
    fine = Runs(plan, file, scratch, seconds, began, said).all(parts)
    print(f"{file}: {here['gpu'] or 'no CUDA device here'}, {'equal' if fine else 'not equal'}")
    return 0 if fine and (here["gpu"] or plan is SMOKE) else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=FILE)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--only", choices=("equal", "speed"))
    parser.add_argument("--scratch", type=Path, help="for models and disk tiers; some 40 GB")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    given = parser.parse_args()
    chosen = SMOKE if given.smoke else FULL
    sys.exit(main(given.json, chosen, given.only, given.scratch, given.seconds))
