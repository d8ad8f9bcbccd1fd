"""What the doctor says of real vLLM configurations, which need no weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.engine.vllm.tiny_vllm import LLAMA, QWEN_NEXT

pytestmark = pytest.mark.vllm

BERT = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 512,
}
ASK = """
import json, os, sys
from pathlib import Path
from spec.load import load_chain
from tiers.doctor.examine import Engine, examine_model
chain = Path(sys.argv[1])
for line in sys.stdin:
    model, arguments, environ = json.loads(line)
    os.environ.update(environ)
    found = examine_model(Engine(Path(model), arguments), chain, load_chain(chain), environ)
    print("found", json.dumps([[each.gravity, each.found, each.change] for each in found]))
"""


def model(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_engines_that_are_and_are_not_served(tmp_path: Path) -> None:
    """One process, since the import takes longest."""
    chain = tmp_path / "chain.yaml"
    chain.write_text(f"version: 1\ntiers: [{{type: disk, capacity: 1MiB, path: {tmp_path}/kv}}]")
    llama = model(tmp_path / "llama", LLAMA)
    hybrid = model(tmp_path / "hybrid", QWEN_NEXT)
    both = ["--prefix-caching-hash-algo", "xxhash", "--no-enable-prefix-caching"]
    jobs: list[tuple[Path, Sequence[str], dict[str, str]]] = [
        (hybrid, ["--port", "8000"], {}),
        (llama, both, {}),
        (llama, ["--max-model-len", "many"], {}),
        (model(tmp_path / "odd", {}), [], {}),
        (model(tmp_path / "bert", BERT), [], {"PYTHONHASHSEED": "0"}),
    ]
    lines = "\n".join(json.dumps([str(place), words, env]) for place, words, env in jobs)
    done = subprocess.run(
        [sys.executable, "-c", ASK, str(chain)],
        input=lines,
        capture_output=True,
        text=True,
        env={**os.environ, "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": os.getcwd()},
    )
    found = [json.loads(line[6:]) for line in done.stdout.splitlines() if line[:6] == "found "]
    assert len(found) == len(jobs), done.stderr
    good, doubtful, wrong, odd, bert = found
    assert {gravity for gravity, *_ in good} == {"fine", "can't tell"}
    assert any("Qwen3NextForCausalLM: Model Runner V1" in text for _, text, _ in good)
    uncached, random = [each for each in doubtful if each[0] == "warning"]
    assert "own prefix cache is off" in uncached[1]
    assert "xxhash begins at random" in random[1] and "PYTHONHASHSEED=0" in random[2]
    ((gravity, text, _),) = wrong
    assert gravity == "can't tell" and "--max-model-len" in text
    ((gravity, text, _),) = odd
    assert gravity == "can't tell" and "model_type" in text and "\n" not in text
    error, hashes = bert
    assert error[0] == "error" and "can't be reused" in error[1]
    assert error[2] == "Start vLLM without kvtiers." and hashes[0] == "fine"
