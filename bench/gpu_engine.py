"""A real vLLM on this machine: without a chain, with one, and with vLLM's own OffloadingConnector.

    python -m bench.gpu_engine [--json FILE] [--smoke]      make gpu-engine

Eager first, then graphs, then Model Runner V1: each engine answers the same prompts, and once more
when they have left its own cache. Answers that are not those without a chain end it, after that
engine has been run with less and less: without asynchronous scheduling, without loads, with the
older runner. Writes JSON anew after each engine, and prints time to first token and throughput. It
ends with 0 if there is a GPU, and all engines with a chain ran and answered as those without.
`--smoke`: a tiny model, which shows only that all of it runs, on a CPU too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.gpu_facts import facts
from bench.report import machine

ROOT = Path(__file__).parents[1]
FILE = ROOT / "build" / "gpu-engine.json"
SECONDS = 590.0
ENGINE_SECONDS = 150.0
TAIL = 3000
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
SMALL = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 16}
SMALL |= {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
"""64 KiB of KV a token."""
VOCABULARY = 1000


@dataclass(frozen=True)
class Mode:
    """How an engine computes: `env` and arguments of LLM."""

    name: str
    env: Mapping[str, str]
    engine: Mapping[str, Any]


@dataclass(frozen=True)
class Load:
    """What each engine is asked; see `engine_child`. `blocks`: of the engine's own KV, fewer than
    all prompts need."""

    model: Mapping[str, int]
    dtype: str
    tokens: int
    prompts: int = 4
    answer: int = 16
    at_once: int = 16
    block_tokens: int = 16

    @property
    def blocks(self) -> int:
        return 2 * (self.tokens + self.answer) // self.block_tokens + 8

    @property
    def cache_bytes(self) -> int:
        """Enough for all blocks of all prompts, twice."""
        layers, heads = self.model["num_hidden_layers"], self.model["num_key_value_heads"]
        width = {"float32": 4, "bfloat16": 2}[self.dtype]
        token = 2 * layers * heads * self.model["head_dim"] * width
        return 2 * token * (self.tokens + self.answer) * (self.prompts + self.at_once + 1)


EAGER, GRAPHS = {"enforce_eager": True}, {"enforce_eager": False}
V1, V2 = ({"VLLM_USE_V2_MODEL_RUNNER": number} for number in ("0", "1"))
MODES = (
    Mode("V2, eager", V2, EAGER),
    Mode("V2, graphs", V2, GRAPHS),
    Mode("V1, eager", V1, EAGER),
)
FULL = Load(SMALL, "bfloat16", tokens=8192)
SMOKE = Load(TINY, "float32", tokens=256, answer=4, at_once=4, block_tokens=32)
CONNECTORS = ("none", "chain", "native")


@dataclass
class Runs:
    """Runs engines one after the other, and keeps what came of each in `file`."""

    load: Load
    file: Path
    folder: Path
    began: float = field(default_factory=time.monotonic)
    said: dict[str, Any] = field(default_factory=dict)

    def run(self, mode: Mode, connector: str, **more: Any) -> dict[str, Any]:
        """Run one engine and write what came of it; `more`: of the job."""
        name = f"{mode.name}, {connector}"
        result = self.folder / "result.json"
        result.unlink(missing_ok=True)
        job = {**self._job(mode, connector), "result": str(result), **more}
        began = time.monotonic()
        left = SECONDS - (began - self.began)
        output, code = _child(job, mode.env, max(1.0, min(ENGINE_SECONDS, left)))
        came: dict[str, Any] = {"exit": code, "seconds": round(time.monotonic() - began, 1)}
        if code == 0 and result.exists():
            came |= json.loads(result.read_text())
        else:
            came["output"] = output[-TAIL:]
        self.said["engines"][name] = came
        self.write()
        print(f"{name}: {_summary(came)}", flush=True)
        return came

    def write(self) -> None:
        fresh = self.file.with_suffix(".new")
        fresh.write_text(json.dumps(self.said, indent=1) + "\n")
        fresh.replace(self.file)

    def _job(self, mode: Mode, connector: str) -> dict[str, Any]:
        load = self.load
        engine = {
            "model": str(self.folder / "model"),
            "dtype": load.dtype,
            "block_size": load.block_tokens,
            "max_model_len": load.tokens + load.answer + load.block_tokens,
            "num_gpu_blocks_override": load.blocks,
            **mode.engine,
        }
        if connector != "none":
            engine["kv_transfer_config"] = self._transfer(connector)
        asked = {"prompts": load.prompts, "tokens": load.tokens, "answer": load.answer}
        return {"engine": engine, **asked, "at_once": load.at_once, "loads": True}

    def _transfer(self, connector: str) -> dict[str, Any]:
        if connector == "native":
            extra: dict[str, Any] = {"cpu_bytes_to_use": self.load.cache_bytes}
            return {
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": extra,
            }
        disk = {"type": "disk", "path": str(self.folder / "disk"), "capacity": "4GiB"}
        cpu = {"type": "cpu", "capacity": self.load.cache_bytes}
        chain = {"version": 1, "load_when": "always", "tiers": [cpu, disk]}
        return {
            "kv_connector": "KVTiersConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"chain": chain},
        }


def _child(job: dict[str, Any], env: Mapping[str, str], seconds: float) -> tuple[str, int | None]:
    """Run `engine_child` in a process group of its own; what it printed, and its exit status."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.engine_child"],
        cwd=ROOT,
        env={**os.environ, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", **env},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(json.dumps(job), timeout=seconds)
        return output, process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)  # the engine's own processes, too
        output, _ = process.communicate()
        return output, None


def _summary(came: Mapping[str, Any]) -> str:
    if "rounds" not in came:
        lines = str(came["output"]).strip().splitlines()
        return f"exit {came['exit']}: {lines[-1] if lines else 'it printed nothing'}"
    cold, again = came["rounds"]
    first, second = (statistics.median(one["ttft"] or 0 for one in part) for part in (cold, again))
    cached = sum(one["cached"] for one in again)
    return (
        f"TTFT {first * 1e3:.1f} ms, again {second * 1e3:.1f} ms ({cached} tokens from caches), "
        f"{came['tokens_per_second']:,.0f} tokens/s at once, {came['runner']}, "
        f"{'asynchronous' if came['async_scheduling'] else 'synchronous'}"
    )


def answers(came: Mapping[str, Any]) -> list[Any] | None:
    """All that an engine answered; None: it did not."""
    if "rounds" not in came:
        return None
    return [[one["answer"] for one in part] for part in came["rounds"]] + [came["together"]]


def fewer(mode: Mode) -> Iterator[tuple[Mode, dict[str, Any]]]:
    """A mode with less and less, to see which part changes answers."""
    engine = {**mode.engine, "async_scheduling": False}
    yield replace(mode, name=f"{mode.name}, synchronous", engine=engine), {}
    yield replace(mode, name=f"{mode.name}, without loads"), {"loads": False}
    yield replace(mode, name=f"{mode.name}, by V1 and eager", env=V1, engine=EAGER), {}


def run_all(runs: Runs, modes: Sequence[Mode], connectors: Sequence[str] = CONNECTORS) -> bool:
    """Run every mode with every connector; whether those with a chain answered as without. The
    first that does not ends it. A mode that starts without no connector is left out."""
    equal = 0
    for mode in modes:
        plain = answers(runs.run(mode, "none"))
        if plain is None:
            continue
        for connector in connectors[1:]:
            found = answers(runs.run(mode, connector))
            if connector == "chain" and found is None:
                return False
            if found is not None and found != plain:
                runs.said["differs"] = _bisect(runs, mode, connector)
                runs.write()
                if connector == "chain":
                    return False
            equal += connector == "chain"
    return equal > 0


def _bisect(runs: Runs, mode: Mode, connector: str) -> dict[str, Any]:
    """Which engines with less answer as the same without a connector."""
    equal = {}
    for less, more in fewer(mode):
        plain = answers(runs.run(less, "none", **more))
        equal[less.name] = plain is not None and plain == answers(runs.run(less, connector, **more))
    return {"mode": mode.name, "connector": connector, "equal": equal}


def write_model(folder: Path, model: Mapping[str, int], dtype: str) -> None:
    """Write a Llama of random weights, whose answers depend on all of a prompt."""
    import torch
    from safetensors.torch import save_file

    hidden, inner = model["hidden_size"], model["intermediate_size"]
    queries = model["num_attention_heads"] * model["head_dim"]
    keys = model["num_key_value_heads"] * model["head_dim"]
    shapes = {"self_attn.q_proj": (queries, hidden), "self_attn.k_proj": (keys, hidden)}
    shapes |= {"self_attn.v_proj": (keys, hidden), "self_attn.o_proj": (hidden, queries)}
    shapes |= {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden)}
    shapes |= {"mlp.down_proj": (hidden, inner)}
    spread, kind = 0.3 * (64 / hidden) ** 0.5, getattr(torch, dtype)
    made = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Any:
        return (torch.randn(shape, generator=made) * spread).to(kind)

    weights = {f"{name}.weight": draw(VOCABULARY, hidden) for name in ("model.embed_tokens",)}
    weights["lm_head.weight"] = draw(VOCABULARY, hidden)
    weights["model.norm.weight"] = torch.ones(hidden, dtype=kind)
    for layer in range(model["num_hidden_layers"]):
        of = f"model.layers.{layer}"
        weights |= {f"{of}.{name}.weight": draw(*shape) for name, shape in shapes.items()}
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{of}.{name}.weight"] = torch.ones(hidden, dtype=kind)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **model}
    config |= {"vocab_size": VOCABULARY, "max_position_embeddings": 131072, "torch_dtype": dtype}
    config |= {"bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))


def main(file: Path, smoke: bool) -> int:
    """Run all and write `file`."""
    folder = file.with_suffix("")
    load = SMOKE if smoke else FULL
    write_model(folder / "model", load.model, load.dtype)
    here = {**machine(), "device": facts()}
    runs = Runs(load, file, folder, said={"machine": here, "engines": {}})
    runs.write()
    fine = run_all(runs, MODES)
    print(f"{file}: {here['gpu'] or 'no CUDA device here'}, {'equal' if fine else 'not equal'}")
    return 0 if fine and (here["gpu"] or smoke) else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=FILE)
    parser.add_argument("--smoke", action="store_true")
    given = parser.parse_args()
    sys.exit(main(given.json, given.smoke))
