"""How long an engine takes to start beside what reads its weights to identify them.

    python -m bench.start --gib 1 --rounds 3

Makes a Llama of random weights of that size on disk, and starts engines on it in turn: without a
chain, with a disk tier and no digest kept, and with the digest kept. A start ends when the engine
could take its first request. `--before FOLDER` starts engines with another checkout, too.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HIDDEN = 1024
LAYER_BYTES = 2 * 16 * HIDDEN * HIDDEN
CHILD = """
import json, sys, time
began = time.perf_counter()
from vllm import LLM
llm = LLM(**json.loads(sys.argv[1]))
print("started", time.perf_counter() - began, flush=True)
llm.llm_engine.engine_core.shutdown()
"""


def make_model(folder: Path, gib: float) -> None:
    """Write a Llama with about so many GiB of weights in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=4 * HIDDEN,
        num_hidden_layers=max(1, round(gib * 2**30 / LAYER_BYTES)),
        num_attention_heads=16,
        num_key_value_heads=16,
        vocab_size=1000,
        max_position_embeddings=2048,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def start(model: Path, cache: Path, chain: Path | None, checkout: Path | None = None) -> float:
    """Seconds that a fresh engine takes to start. Raises RuntimeError with its log."""
    engine: dict[str, Any] = {
        "model": str(model),
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": 512,
        "num_gpu_blocks_override": 40,
        "enforce_eager": True,
    }
    if chain is not None:
        from tiers.engine.plugin import transfer_config

        engine["kv_transfer_config"] = transfer_config(chain)
    env = {**os.environ, "XDG_CACHE_HOME": str(cache), "HF_HUB_OFFLINE": "1"}
    env |= {"VLLM_CACHE_ROOT": str(Path.home() / ".cache" / "vllm"), "VLLM_CPU_KVCACHE_SPACE": "1"}
    if checkout is not None:
        env["PYTHONPATH"] = str(checkout)
    command = [sys.executable, "-c", CHILD, json.dumps(engine)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    said = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("started ")]
    if not said:
        raise RuntimeError(f"{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return float(said[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--before", type=Path, default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model", options.gib)
        chain = folder / "chain.yaml"
        tier = {"type": "disk", "path": str(folder / "disk"), "capacity": "64MiB"}
        chain.write_text(json.dumps({"version": 1, "tiers": [tier]}))
        time.sleep(3)  # a digest is kept of files that were let alone for a while
        start(folder / "model", folder / "cache", None)  # what is read once by all
        seconds: dict[str, list[float]] = {"no chain": [], "read": [], "kept": []}
        if options.before is not None:
            seconds["before"] = []
        for _ in range(options.rounds):
            for case, times in seconds.items():
                if case == "read":
                    shutil.rmtree(folder / "cache" / "kvtiers", ignore_errors=True)
                used = None if case == "no chain" else chain
                checkout = options.before if case == "before" else None
                times.append(start(folder / "model", folder / "cache", used, checkout))
                print(f"{case:9} {times[-1]:6.2f} s", flush=True)
        for case, times in seconds.items():
            print(f"{case:9} {statistics.median(times):6.2f} s, the median")


if __name__ == "__main__":
    main()
