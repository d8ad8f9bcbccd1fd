"""What the doctor says of real vLLM configurations, which need no weights."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.engine.vllm.imported import Program
from tests.engine.vllm.tiny_vllm import LLAMA, QWEN_NEXT
from tests.support.compatibility import ON_V2

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


def model(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_engines_that_are_and_are_not_served(
    vllm_jobs: subprocess.Popen[str], tmp_path: Path
) -> None:
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
    examining = Program(vllm_jobs, "tests.engine.vllm.examining", {}, [str(chain)], errors=True)
    said = examining.communicate(lines)
    found = [json.loads(line[6:]) for line in said.splitlines() if line[:6] == "found "]
    assert len(found) == len(jobs), said
    good, doubtful, wrong, odd, bert = found
    assert {gravity for gravity, *_ in good} == {"fine", "can't tell"}
    runner = f"Qwen3NextForCausalLM: Model Runner {'V2' if ON_V2 else 'V1'}"
    assert any(runner in text for _, text, _ in good)
    uncached, weak = [each for each in doubtful if each[0] == "warning"]
    assert "own prefix cache is off" in uncached[1]
    assert "by xxhash are equal" in weak[1] and "sha256 for all engines" in weak[2]
    ((gravity, text, _),) = wrong
    assert gravity == "can't tell" and "--max-model-len" in text
    ((gravity, text, _),) = odd
    assert gravity == "can't tell" and "model_type" in text and "\n" not in text
    error, hashes = bert
    assert error[0] == "error" and "can't be reused" in error[1]
    assert error[2] == "Start vLLM without kvtiers." and hashes[0] == "fine"
