"""What a model decides while it is made is a fact, and each place of vLLM that reads what could
decide it is known."""

from __future__ import annotations

import copy
import importlib.util
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tiers.engine.identity.made import generation_facts, made_facts, unseen_facts

ROPE = "how its rotary embeddings are made is a fact"
MADE = "noted in the configuration that the model holds, which is a fact"
TABLE = "the length of a table or of working memory"
MEDIA = "how large an image or a sound may be when memory is measured"
POOLING = "no model that generates"
SAMPLING = "which tokens come next"
NOTHING = "removes what has no effect at this length"
WARMING = "what is tried before requests come"
JUDGED = {
    "kernels/attention/dsa/candidate_blocks.py": TABLE,
    "layers/attention/mla_attention.py": TABLE,
    "layers/attention/sparse_mla_attention.py": TABLE,
    "layers/attention/static_sink_attention.py": TABLE,
    "layers/indexer_topk.py": TABLE,
    "layers/quantization/modelopt_block_quant.py": TABLE,
    "layers/rocm_paged_mxfp4_indexer.py": TABLE,
    "layers/rotary_embedding/phi3_long_rope_scaled_rope.py": ROPE,
    "layers/sparse_attn_indexer.py": TABLE,
    "layers/sparse_attn_indexer_kpool.py": TABLE,
    "models/cohere_compass.py": ROPE,
    "models/colpali.py": POOLING,
    "models/config.py": POOLING,
    "models/deepseek_ocr.py": MEDIA,
    "models/deepseek_v2.py": TABLE,
    "models/deepseek_vl2.py": MEDIA,
    "models/diffusion_gemma.py": SAMPLING,
    "models/embedding_gemma2.py": POOLING,
    "models/ernie45_vl.py": MEDIA,
    "models/gemma3_mm.py": MEDIA,
    "models/gemma4_mm.py": SAMPLING,
    "models/gemma4_mtp.py": SAMPLING,
    "models/gemma4_unified.py": SAMPLING,
    "models/glm4_1v.py": MEDIA,
    "models/idefics3.py": MEDIA,
    "models/internvl.py": MEDIA,
    "models/kimi_k25.py": MEDIA,
    "models/kimi_vl.py": MEDIA,
    "models/lfm2_vl.py": MEDIA,
    "models/llama4.py": MADE,
    "models/minicpmv.py": MEDIA,
    "models/minimax_m2.py": MADE,
    "models/mllama4.py": MEDIA,
    "models/nano_nemotron_vl.py": MEDIA,
    "models/parakeet.py": MEDIA,
    "models/plamo3.py": ROPE,
    "models/qwen2_5_vl.py": MEDIA,
    "models/qwen2_vl.py": MEDIA,
    "models/qwen3_vl.py": MEDIA,
    "models/step3_vl.py": MEDIA,
    "models/transformers/utils.py": NOTHING,
    "models/voxtral.py": MEDIA,
    "models/voxtral_realtime.py": MEDIA,
    "warmup/attention_warmup.py": WARMING,
    "warmup/rocm_segmented_attn_autotune_warmup.py": WARMING,
    "warmup/step5_dsa_warmup.py": WARMING,
}
"""The modules under `model_executor` that read what the table of fields takes for no fact."""
READS = re.compile(r"\b(max_model_len|generation_config)\b")


def readers(vllm: Path) -> set[str]:
    """The modules of an installed or unpacked vLLM that read these."""
    root = vllm / "model_executor"
    return {
        str(path.relative_to(root)) for path in root.rglob("*.py") if READS.search(path.read_text())
    }


def sources() -> list[Path]:
    """The installed vLLM, and those in the folders that VLLM_SOURCES names."""
    spec = importlib.util.find_spec("vllm")
    found = [] if spec is None or spec.origin is None else [Path(spec.origin).parent]
    named = filter(None, os.environ.get("VLLM_SOURCES", "").split(os.pathsep))
    return found + [Path(one) / "vllm" for one in named]


@pytest.mark.vllm
def test_all_that_reads_the_longest_request_or_the_generation_config_is_judged() -> None:
    if not sources():
        pytest.skip("no source of vLLM is at hand")
    for vllm in sources():
        found = readers(vllm)
        assert "models/llama4.py" in found, vllm
        assert found - JUDGED.keys() == set(), f"{vllm}: does its KV depend on these?"


def test_a_new_reader_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "model_executor" / "models"
    folder.mkdir(parents=True)
    (folder / "new.py").write_text("scale = vllm_config.model_config.max_model_len > 8192\n")
    assert readers(tmp_path) - JUDGED.keys() == {"models/new.py"}


class Config:
    """A model's configuration."""

    def __init__(self, **said: Any) -> None:
        self.said = said

    def to_dict(self) -> dict[str, Any]:
        return self.said


class RotaryEmbedding(torch.nn.Module):
    def __init__(self, use_long_rope: bool) -> None:
        super().__init__()
        self.use_long_rope = use_long_rope


class Model(torch.nn.Module):
    """A model that notes how it computes in a copy of the configuration that it is given."""

    def __init__(self, config: Config, longest: int) -> None:
        super().__init__()
        self.config = copy.deepcopy(config)
        self.config.said["attn_temperature_tuning"] = longest > 32768
        self.rotary_emb = RotaryEmbedding(longest > 4096)


def test_what_a_model_decides_while_it_is_made_is_a_fact() -> None:
    config = Config(_name_or_path="here")
    facts = [made_facts(Model(config, longest)) for longest in (8192, 16384, 65536, 1024)]
    assert facts[0] == facts[1] == made_facts(Model(Config(_name_or_path="there"), 8192))
    assert len({one["made"] for one in facts}) == 2, "its configuration"
    assert len({one["rotary"] for one in facts}) == 2, "its rotary embeddings"
    lengths = [unseen_facts(SimpleNamespace(max_model_len=longest)) for longest in (1024, 8192)]
    assert lengths[0] != lengths[1], "who sees no model goes by the length"


@pytest.mark.vllm
def test_longest_request_matters_where_it_chooses_the_rotary_factors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As of Phi-3, which has two sets of them."""
    from vllm.model_executor.layers.rotary_embedding import phi3_long_rope_scaled_rope as phi

    def facts(longest: int) -> dict[str, str]:
        config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=longest))
        monkeypatch.setattr(phi, "get_current_vllm_config", lambda: config)
        shape: Any = (32, 32, 131072, 4096, 10000.0, True, torch.float32)
        return made_facts(phi.Phi3LongRoPEScaledRotaryEmbedding(*shape, [1.0] * 16, [2.0] * 16))

    assert facts(2048) == facts(4096) != facts(131072) == facts(8192)


def test_a_generation_config_that_says_more_than_sampling_is_a_fact() -> None:
    def facts(override: dict[str, Any] | None = None, **said: Any) -> dict[str, str]:
        return generation_facts(
            SimpleNamespace(
                try_get_generation_config=lambda: said, override_generation_config=override
            )
        )

    assert facts() == facts(temperature=0.5) == facts({"top_k": 3}) == {}
    assert facts(attn_temperature_tuning=True) == facts({"attn_temperature_tuning": True}) != {}
    assert facts({"attn_temperature_tuning": False}, attn_temperature_tuning=True) != facts(
        attn_temperature_tuning=True
    )
