"""What must never share blocks: salts, adapters, images; and which models can't be served."""

from __future__ import annotations

import copy
import dataclasses
import enum
import importlib.util
import json
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch

from spec.chain import ChainSpec
from tests.engine.vllm.tiny_vllm import QWEN_3, QWEN_NEXT
from tests.engine.vllm.vllm_chains import transfer
from tests.support.compatibility import Cells, engine_version
from tests.support.lacking import refuse_threads
from tests.support.replay import ReplayEngine, answer
from tests.support.replay_chains import MODEL, chain_of, close, cpu, disk, drive, measured
from tiers.connector import assembly as chains
from tiers.connector.policy.request_table import RequestTable
from tiers.connector.scheduler import open_tier
from tiers.connector.worker import offloading_worker as workers
from tiers.contract.engine_info import EngineInfo, KVGroup
from tiers.contract.marks import LoadedAdapter
from tiers.engine.adapter_marks import MarksOfRequests, name_of
from tiers.engine.content_marks import ContentMarks
from tiers.engine.digesting import SIZES
from tiers.engine.identity.facts import (
    SOURCES,
    BackgroundFacts,
    generation_facts,
    made_facts,
    text_of,
    unseen_facts,
)
from tiers.errors import TierUnusable

BLOCK = 16
TOKENS = list(range(3, 3 + 3 * BLOCK))


class Choice(enum.IntEnum):
    FIRST = 1


@dataclasses.dataclass(repr=False)
class Settings:
    choice: Any


def test_settings_have_one_text_in_every_process_and_others_another() -> None:
    names = [f"name {number}" for number in range(20)]
    assert text_of(set(names)) == text_of(frozenset(reversed(names))) == text_of(sorted(names))
    assert text_of(Choice.FIRST) != text_of(1)
    assert text_of(Settings({"a", "b"})) == text_of(Settings({"b", "a"}))
    assert text_of(Settings(Choice.FIRST)) != text_of(Settings(1))


@pytest.mark.vllm
def test_requests_that_differ_in_more_than_tokens_share_no_block() -> None:
    from vllm.lora.request import LoRARequest
    from vllm.multimodal.inputs import (
        MultiModalBatchedField,
        MultiModalFeatureSpec,
        MultiModalFieldElem,
        MultiModalKwargsItem,
        PlaceholderRange,
    )
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    loras = lora, other_lora = LoRARequest("sql", 1, "folder"), LoRARequest("prose", 2, "folder")

    def image(name: str, brightness: float = 0.5, at: int = 2) -> MultiModalFeatureSpec:
        pixels = MultiModalFieldElem(torch.full((3, 4), brightness), MultiModalBatchedField())
        return MultiModalFeatureSpec(
            data=MultiModalKwargsItem({"pixel_values": pixels}),
            modality="image",
            identifier=name,
            mm_position=PlaceholderRange(offset=at, length=4),
        )

    def keys(trust: bool = False, **more: Any) -> list[bytes]:
        request = Request(
            "id",
            TOKENS,
            SamplingParams(max_tokens=1),
            None,
            block_hasher=get_request_block_hasher(BLOCK, sha256),
            **more,
        )
        marks, media = MarksOfRequests(1), ContentMarks(trust, room=10)
        loaded = {
            name_of(one): LoadedAdapter(one.lora_int_id, b"weights", b"files") for one in loras
        }
        marks.take_reports({0: loaded})
        engine = EngineInfo({}, BLOCK, BLOCK, num_blocks=9, marks=marks, media=media)
        table = RequestTable(engine)
        return table.keys(table.of(request))

    variants = [
        keys(),
        keys(cache_salt="tenant a"),
        keys(cache_salt="tenant b"),
        keys(mm_features=[image("cat")]),
        keys(mm_features=[image("dog")]),
        keys(mm_features=[image("cat", brightness=0.6)]),
        keys(mm_features=[image("cat")], lora_request=lora),
        keys(lora_request=lora),
        keys(lora_request=other_lora),
    ]
    assert all(len(one) == 3 for one in variants)
    assert len({key for one in variants for key in one}) == 3 * len(variants)
    assert keys(cache_salt="tenant a") == variants[1], "but with themselves they do"
    assert keys(mm_features=[image("cat")]) == variants[3]
    assert keys(lora_request=lora) == variants[-2]

    late = keys(mm_features=[image("cat", at=20)])
    assert [key in variants[0] for key in late] == [True, False, False], "what precedes an image"
    trusted = keys(True, mm_features=[image("cat")])
    assert keys(True, mm_features=[image("cat", brightness=0.6)]) == trusted
    assert not set(trusted) & set(variants[3])


@pytest.mark.vllm
def test_tokens_in_the_places_of_embeddings_share_no_block() -> None:
    """The engine hashes a token of 0 and an embedding at each place of either."""
    import inspect

    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    if "prompt_is_token_ids" not in inspect.signature(Request).parameters:
        pytest.skip("this vLLM has no prompts of tokens and embeddings")
    init_none_hash(sha256)
    embeddings = torch.arange(3.0 * BLOCK * 4).reshape(3 * BLOCK, 4)

    def keys(mask: list[bool] | None) -> list[bytes]:
        request = Request(
            "id",
            None if mask is None else [0] * 3 * BLOCK,
            SamplingParams(max_tokens=1),
            None,
            prompt_embeds=embeddings,
            prompt_is_token_ids=mask,
            block_hasher=get_request_block_hasher(BLOCK, sha256),
        )
        engine = EngineInfo({}, BLOCK, BLOCK, num_blocks=9, marks=MarksOfRequests(1))
        table = RequestTable(engine)
        return table.keys(table.of(request))

    no, yes = [False] * BLOCK, [True] * BLOCK
    masks = None, [*no, *yes, *no], [*no, *no, *no], [*yes, *yes, *yes], [*no, True, *no[1:], *no]
    victim, *others = map(keys, masks)
    assert [len(one) for one in (victim, *others)] == [3] * 5
    assert not set(victim) & {key for one in others for key in one}
    shared = [len({one[block] for one in others}) for block in range(3)]
    assert shared == [2, 4, 4], "blocks up to the first place that differs are shared"
    assert keys(masks[1]) == others[0]


def model(**more: Any) -> Any:
    config = {
        "model": "org/model",
        "revision": None,
        "dtype": "bfloat16",
        "quantization": None,
        "seed": 0,
        "max_model_len": 4096,
        "hf_config": SimpleNamespace(to_dict=dict),
        "hf_text_config": SimpleNamespace(),
    }
    return SimpleNamespace(
        model_config=SimpleNamespace(**{**config, **more}),
        cache_config=SimpleNamespace(cache_dtype="auto", prefix_caching_hash_algo="sha256"),
        load_config=SimpleNamespace(load_format="auto"),
    )


STATE = {"kind": "MambaSpec", "mamba_cache_mode": "align"}


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("what", "groups", "more", "words"),
    [
        ("non-causal attention", [{"non_causal": True}], {}, "non-causal FullAttentionSpec"),
        (
            "prefixes that vLLM can't reuse",
            [{}],
            {"is_prefix_caching_supported": False},
            "can't be reused",
        ),
        (
            "prefill context parallelism",
            [{}],
            {"prefill_context_parallel_size": 2},
            "prefill_context_parallel_size 2",
        ),
        (
            "sliding windows with decode context parallelism",
            [{"kind": "SlidingWindowSpec", "sliding_window": 96, "dcp_sharded": True}],
            {"decode_context_parallel_size": 2},
            "full attention alone|0.32 and later",
        ),
        (
            "speculation in a pipeline, on Model Runner V1",
            [{}],
            {"pipeline_parallel_size": 2, "speculative_config": object()},
            "speculative decoding with pipeline parallelism",
        ),
        (
            "recurrent states and speculation in a pipeline",
            [{**STATE}, {}],
            {
                "pipeline_parallel_size": 2,
                "speculative_config": object(),
                "use_v2_model_runner": True,
            },
            "ranks before a pipeline's last keep states where they belong too late|0.32 and later",
        ),
        ("an engine that only encodes", [{}], {"encodes": True}, "has no KV: start it without"),
        (
            "fault tolerance",
            [{}],
            {"enable_fault_tolerance": True},
            "with --enable-fault-tolerance vLLM goes on after a step that failed",
        ),
        (
            "elastic EP that captures graphs again",
            [{}],
            {"enable_elastic_ep": True, "all2all_backend": "deepep_high_throughput"},
            "with --enable-elastic-ep vLLM captures graphs again",
        ),
        ("KV on an XPU", [{}], {"device": "xpu"}, "does not copy KV on a device of kind xpu"),
        (
            "several ranks of external_launcher",
            [{}],
            {"distributed_executor_backend": "external_launcher", "world_size": 2},
            "several ranks of external_launcher",
        ),
        (
            "recurrent states without prefix caching",
            [{**STATE, "mamba_cache_mode": "none"}],
            {},
            "mamba_cache_mode align, not none. Start vLLM with --enable-prefix-caching",
        ),
        (
            "recurrent states in blocks of another size",
            [STATE, {"block_size": 32}],
            {},
            "blocks have another size than those of attention|0.32 and later",
        ),
        (
            "Mamba 2 with prefix_match_unit below a block",
            [{**STATE, "num_prefill_checkpoint_blocks": 1}, {}],
            {"prefix_match_unit": 8},
            "Leave --prefix-match-unit out|0.32 and later",
        ),
        (
            "chunked local attention",
            [{"kind": "ChunkedLocalAttentionSpec"}],
            {},
            "ChunkedLocalAttentionSpec",
        ),
        (
            "returned experts",
            [{}],
            {"enable_return_routed_experts": True},
            "with --enable-return-routed-experts",
        ),
        (
            "KV by TurboQuant",
            [{}],
            {"cache_dtype": "turboquant_4bit_nc"},
            "with --kv-cache-dtype turboquant_4bit_nc vLLM mistakes prefixes",
        ),
        (
            "pruned videos and M-RoPE",
            [{}],
            {"prunes": True},
            "with --video-pruning-rate for org/model vLLM mistakes prefixes",
        ),
        (
            "loops with one cache",
            [{}],
            {"recurrent_kv_cache_mode": "last_loop"},
            "with recurrent_kv_cache_mode last_loop of org/model vLLM mistakes prefixes",
        ),
        (
            "windows that are not cached, and computed again",
            [{}, {"kind": "SlidingWindowMLASpec", "prefix_cacheable": False}],
            {},
            "SlidingWindowMLASpec",
        ),
    ],
)
def test_what_can_t_be_served_is_named(
    cells: Cells, what: str, groups: list[dict[str, Any]], more: dict[str, Any], words: str
) -> None:
    from tiers.engine.vllm_groups import kv_groups

    def group(kind: str = "FullAttentionSpec", **fields: Any) -> Any:
        spec = type(kind, (SimpleNamespace,), {})(**{"block_size": 16, **fields})
        return SimpleNamespace(kv_cache_spec=spec, layer_names=["layers.0"])

    config = SimpleNamespace(
        model_config=SimpleNamespace(
            model="org/model",
            is_prefix_caching_supported=more.get("is_prefix_caching_supported", True),
            uses_mrope=True,
            hf_config=SimpleNamespace(recurrent_kv_cache_mode=more.get("recurrent_kv_cache_mode")),
            multimodal_config=SimpleNamespace(
                is_multimodal_pruning_enabled=lambda: more.get("prunes", False)
            ),
        ),
        aux_output_config=SimpleNamespace(
            enable_return_routed_experts=more.get("enable_return_routed_experts", False)
        ),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=more.get("decode_context_parallel_size", 1),
            prefill_context_parallel_size=more.get("prefill_context_parallel_size", 1),
            pipeline_parallel_size=more.get("pipeline_parallel_size", 1),
            enable_fault_tolerance=more.get("enable_fault_tolerance", False),
            enable_elastic_ep=more.get("enable_elastic_ep", False),
            all2all_backend=more.get("all2all_backend"),
            distributed_executor_backend=more.get("distributed_executor_backend", "mp"),
            world_size=more.get("world_size", 1),
        ),
        cache_config=SimpleNamespace(
            prefix_match_unit=more.get("prefix_match_unit"),
            cache_dtype=more.get("cache_dtype", "auto"),
        ),
        device_config=SimpleNamespace(device_type=more.get("device", "cuda")),
        speculative_config=more.get("speculative_config"),
        is_mm_encoder_only=more.get("encodes", False),
        use_v2_model_runner=more.get("use_v2_model_runner", False),
    )
    cache = SimpleNamespace(kv_cache_groups=[group(**fields) for fields in groups])
    with pytest.raises(ValueError, match=words) as refusal:
        kv_groups(config, cache)
    cells.refused(what, str(refusal.value))


@pytest.mark.vllm
def test_the_engine_is_held_where_its_runner_overwrites_before_it_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By vLLM's own configuration: of states, and of KV of two precisions, as the sparse attention
    of DeepSeek V3.2 has it, in one group with its indexer."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        MambaSpec,
        MLAAttentionSpec,
        UniformTypeKVCacheSpecs,
    )

    from tiers.engine.vllm import engine_info
    from tiers.engine.vllm_settings import engine_config

    (tmp_path / "config.json").write_text(json.dumps(QWEN_NEXT))
    config = engine_config(tmp_path, ["--skip-tokenizer-init", "--enable-prefix-caching"], None)
    tokens = config.cache_config.block_size
    plain = FullAttentionSpec(block_size=tokens, num_kv_heads=1, head_size=8, dtype=torch.float32)
    shapes, dtypes = ((2, 8),), (torch.float32,)
    states = MambaSpec(block_size=tokens, shapes=shapes, dtypes=dtypes, mamba_cache_mode="align")
    latent = partial(MLAAttentionSpec, block_size=tokens, num_kv_heads=1)
    sparse = {
        "layers.0.attention": latent(head_size=576, dtype=torch.bfloat16),
        "layers.0.indexer": latent(head_size=132, dtype=torch.uint8),
    }

    def overwrites(is_v2: bool, *specs: Any) -> bool:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", str(int(is_v2)))
        groups = [KVCacheGroupSpec([f"layers.{i}"], spec) for i, spec in enumerate(specs)]
        cache = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)
        info = engine_info(config, cache, KVConnectorRole.SCHEDULER, chain_of(cpu()))
        return info.overwrites_early

    assert overwrites(True, plain, states)
    assert overwrites(True, UniformTypeKVCacheSpecs.from_specs(sparse))
    assert not overwrites(True, plain)
    assert not overwrites(False, plain, states)


@pytest.mark.vllm
def test_hashes_that_clients_can_make_equal_are_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once an engine, by its scheduler."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    from tiers.engine import vllm_watch
    from tiers.engine.vllm import engine_info
    from tiers.engine.vllm_settings import engine_config

    (tmp_path / "config.json").write_text(json.dumps(QWEN_3))
    spec = FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=32, dtype=torch.float32)
    groups = [KVCacheGroupSpec(["layers.0"], spec)]
    cache = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)
    warned: list[str] = []
    monkeypatch.setattr(vllm_watch.logger, "warning", lambda *words: warned.append(words[-1]))
    monkeypatch.setattr("tiers.engine.vllm.worker_weights", lambda: None)
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    for algorithm in ("sha256", "sha256_cbor", "xxhash"):
        words = ["--skip-tokenizer-init", "--block-size", "32"]
        words += ["--prefix-caching-hash-algo", algorithm]
        config = engine_config(tmp_path, words, None)
        for role in KVConnectorRole:
            engine_info(config, cache, role, chain_of(cpu()))
    assert warned == ["xxhash"]


@pytest.mark.vllm
def test_ranks_that_share_out_tokens_have_longer_blocks(tmp_path: Path) -> None:
    """A chain is told so, and a list of connectors, whatever they are."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    from tiers.engine.vllm import KVTiersConnector, engine_info
    from tiers.engine.vllm_settings import engine_config

    role = KVConnectorRole.SCHEDULER
    (tmp_path / "config.json").write_text(json.dumps(QWEN_3))
    listed = transfer("KVTiersConnector", [transfer("ExampleConnector", [])])
    words = ["--skip-tokenizer-init", "--block-size", "32", "-tp", "2", "-dcp", "2"]
    words += ["--kv-transfer-config", json.dumps(listed)]
    config = engine_config(tmp_path, words, None)
    heads = {"num_kv_heads": 1, "head_size": 32, "dtype": torch.float32}
    groups = [KVCacheGroupSpec(["layers.0"], FullAttentionSpec(block_size=32, **heads))]
    cache = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)
    assert cast(Any, KVTiersConnector(config, role, cache))._block_tokens == 64
    if engine_version() < "0.32":
        with pytest.raises(ValueError, match=r"0\.32 and later"):
            engine_info(config, cache, role, chain_of(cpu()))
        return
    info = engine_info(config, cache, role, chain_of(cpu()))
    assert (info.block_tokens, info.hash_tokens, info.groups) == (64, 64, (KVGroup(64),))


@pytest.mark.vllm
def test_an_engine_of_one_rank_is_first_wherever_it_was_launched(tmp_path: Path) -> None:
    """Under external_launcher each process has an engine, and vLLM numbers their ranks on."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    from tiers.engine.vllm import engine_info
    from tiers.engine.vllm_settings import engine_config

    (tmp_path / "config.json").write_text(json.dumps(QWEN_3))
    spec = FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=32, dtype=torch.float32)
    groups = [KVCacheGroupSpec(["layers.0"], spec)]
    cache = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)

    def rank_of(rank: int, *words: str) -> int:
        words = ("--skip-tokenizer-init", "--block-size", "32", *words)
        config = engine_config(tmp_path, [*words], None)
        config.parallel_config.rank = rank
        return engine_info(config, cache, KVConnectorRole.SCHEDULER, chain_of(cpu())).rank

    assert [rank_of(rank) for rank in (0, 3)] == [0, 0]
    assert [rank_of(rank, "-tp", "2") for rank in (0, 1)] == [0, 1]


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
FOLDERS = {
    "deepseek_v32/": TABLE,
    "deepseek_v4/": TABLE,
    "deepseek_v41/": TABLE,
    "dots3_note/common/processor.py": MEDIA,
    "glm5next/": TABLE,
    "hy_v4/": TABLE,
    "inkling/": TABLE,
    "kimi_k3/nvidia/model.py": MEDIA,
    "kimi_k3/nvidia/specialized_decode/": TABLE,
    "minimax_m3/amd/": TABLE,
    "minimax_m3/common/encoder_cudagraph.py": MEDIA,
    "minimax_m3/common/mm_preprocess.py": MEDIA,
    "muse_spark/": ROPE,
    "step5/": ROPE,
}
"""The same of models that have a folder each, under `models`."""
READS = re.compile(r"\b(max_model_len|generation_config)\b")


def readers(root: Path) -> set[str]:
    """The modules of an installed or unpacked vLLM, in a folder of it, that read these."""
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
        found = readers(vllm / "model_executor")
        assert "models/llama4.py" in found, vllm
        assert found - JUDGED.keys() == set(), f"{vllm}: does its KV depend on these?"
        found = readers(vllm / "models")
        new = {path for path in found if not path.startswith(tuple(FOLDERS))}
        assert not new, f"{vllm}: does its KV depend on these?"


@pytest.mark.vllm
def test_what_sizes_a_medium_is_taken_for_no_content() -> None:
    for vllm in sources():
        models = [*(vllm / "model_executor").rglob("*.py"), *(vllm / "models").rglob("*.py")]
        found = {
            field
            for path in models
            for field in re.findall(r'"(\w+)": "metadata"', path.read_text())
        }
        assert {"image_grid_thw"} <= found <= SIZES, vllm


def test_a_new_reader_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "new.py").write_text("scale = vllm_config.model_config.max_model_len > 8192\n")
    assert readers(tmp_path) - JUDGED.keys() == {"models/new.py"}


class Config:
    """A model's configuration."""

    def __init__(self, **said: Any) -> None:
        self.said = said

    def to_dict(self) -> dict[str, Any]:
        return self.said


class RotaryEmbedding(torch.nn.Module):
    def __init__(self, use_long_rope: int) -> None:
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
    several = torch.nn.ModuleList(Model(config, longest) for longest in (1, 8192, 65536))
    for number in range(20):
        other = Model(Config(number=number), 1)
        other.rotary_emb.use_long_rope = number
        several.append(other)
    for fact in made_facts(several).values():
        assert json.loads(fact) == sorted(json.loads(fact)), "in every process"
    lengths = [unseen_facts(SimpleNamespace(max_model_len=longest)) for longest in (1024, 8192)]
    assert lengths[0] != lengths[1], "who sees no model goes by the length"


def test_code_of_others_is_a_fact_by_its_version_or_else_by_its_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, own = ModuleType("towers"), ModuleType("own_code")
    own.__file__ = str(tmp_path / "own_code.py")
    kinds = [
        type("Tower", (torch.nn.Linear,), {"__module__": "towers.vision"}),
        type("Own", (torch.nn.Linear,), {"__module__": "own_code"}),
    ]
    monkeypatch.setitem(sys.modules, "towers", package)
    monkeypatch.setitem(sys.modules, "own_code", own)

    def facts(version: str, code: str) -> str:
        monkeypatch.setattr(package, "__version__", version, raising=False)
        Path(str(own.__file__)).write_text(code)
        return made_facts(torch.nn.ModuleList(kind(1, 1) for kind in kinds))["code"]

    assert facts("1.2", "scale = 1") == facts("1.2", "scale = 1")
    assert len({facts("1.2", "scale = 1"), facts("1.3", "scale = 1"), facts("1.2", "")}) == 3
    assert made_facts(torch.nn.Linear(1, 1)).keys() == {"made", "rotary"}


def test_how_experts_quantise_and_where_more_weights_are_are_facts() -> None:
    def facts(dtype: Any = None, shape: Any = None, kernel: str = "Triton") -> dict[str, str]:
        model = torch.nn.Linear(1, 1)
        model.quant_method = SimpleNamespace(  # type: ignore[assignment]
            moe_quant_config=SimpleNamespace(quant_dtype=dtype, block_shape=shape),
            moe_kernel=SimpleNamespace(fused_experts=type(kernel, (), {})()),
        )
        return made_facts(model)

    fp8 = torch.float8_e4m3fn
    assert "experts" not in facts()
    assert facts(fp8) == facts(fp8, kernel="Cutlass")
    others = facts(fp8), facts("mxfp8"), facts(fp8, [128, 128]), facts(fp8, None, "DeepGemmExperts")
    assert len({one["experts"] for one in others}) == 4
    model = torch.nn.Linear(1, 1)
    more = [SimpleNamespace(model_or_path="org/tower", revision=None, subfolder="whisper")]
    model.secondary_weights = more  # type: ignore[assignment]
    assert [*map(json.loads, json.loads(made_facts(model)[SOURCES]))] == [
        ["org/tower", None, "whisper"]
    ]


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


@pytest.mark.vllm
def test_an_engine_that_compiles_shares_with_one_that_does_not() -> None:
    """It leaves vLLM's own kernels out, which a rotary embedding notes."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding as OfVllm

    def facts(kernels: str, base: float = 10000.0) -> dict[str, str]:
        config = VllmConfig(compilation_config={"custom_ops": [kernels]})
        with set_current_vllm_config(config):
            return made_facts(OfVllm(32, 32, 2048, base, True, torch.float32))

    assert facts("all") == facts("none") != facts("all", base=500.0)


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


PROMPT = list(range(48))
SECONDS = 30.0


class Facts:
    """Late facts that a test lets be known; of all ranks."""

    def __init__(self, weights: str = "weights") -> None:
        self.weights = weights
        self.are_known = False
        self.asked = 0

    def known(self, seconds: float = 0.0) -> Mapping[str, str] | None:
        self.asked += 1
        return {"weights": self.weights} if self.are_known else None


@pytest.fixture
def make() -> Iterator[Callable[..., ReplayEngine]]:
    """Make engines; each is closed, and must have given everything back."""
    engines: list[ReplayEngine] = []

    def one(chain: ChainSpec, late: Any, **more: Any) -> ReplayEngine:
        engines.append(ReplayEngine(chain, late_facts=late, prefix_caching=False, **more))
        return engines[-1]

    yield one
    for engine in engines:
        close(engine)


def count(engine: ReplayEngine, tier: str, what: str) -> float:
    return measured(engine, what, tier)


def loaded(engine: ReplayEngine, tier: str) -> float:
    """Tokens of the prompt that come from a tier."""
    before = count(engine, tier, "loaded_tokens")
    request = engine.generate(PROMPT)
    assert request.output == answer(MODEL, PROMPT, 4, len(engine.workers))
    engine.settle()
    return count(engine, tier, "loaded_tokens") - before


def until(engine: ReplayEngine, tier: str) -> None:
    """Serve until the tier does."""
    limit = time.monotonic() + SECONDS
    while not loaded(engine, tier):
        assert time.monotonic() < limit, f"{tier} never joined"


@pytest.mark.fault
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_tier_that_others_share_joins_when_the_facts_are_known(
    make: Callable[..., ReplayEngine],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    world_size: int,
) -> None:
    caplog.set_level(logging.INFO)
    late = Facts()
    engine = make(chain_of(disk(tmp_path)), late, world_size=world_size)
    assert loaded(engine, "disk") == 0 and loaded(engine, "disk") == 0
    assert not count(engine, "disk", "store_dropped_inflight")
    assert [r.levelname for r in caplog.records if "being identified" in r.message] == ["INFO"]
    late.are_known = True
    until(engine, "disk")
    assert len([r for r in caplog.records if "join now" in r.message]) == 1
    # What it stored is found by the next engine with these facts, and by no other.
    engine.settle()
    assert loaded(make(chain_of(disk(tmp_path)), _known(), world_size=world_size), "disk")
    assert not loaded(
        make(chain_of(disk(tmp_path)), _known("others"), world_size=world_size), "disk"
    )


def _known(weights: str = "weights") -> Facts:
    facts = Facts(weights)
    facts.are_known = True
    return facts


def test_the_cpu_tier_waits_for_nothing_and_asks_for_nothing(
    make: Callable[..., ReplayEngine], tmp_path: Path
) -> None:
    alone = Facts()
    engine = make(chain_of(cpu()), alone)
    loaded(engine, "cpu")
    assert loaded(engine, "cpu") and alone.asked == 0, "nobody reads weights for it"
    beside = make(chain_of(cpu(), disk(tmp_path)), Facts())
    loaded(beside, "cpu")
    assert loaded(beside, "cpu")


def test_a_load_of_requests_is_right_before_and_after(
    make: Callable[..., ReplayEngine], tmp_path: Path
) -> None:
    late = Facts()
    engine = make(chain_of(cpu(8), disk(tmp_path)), late)
    drive(engine, 1)
    late.are_known = True
    drive(engine, 2)
    drive(engine, 1)
    until(make(chain_of(disk(tmp_path)), _known()), "disk")


@pytest.mark.fault
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), TierUnusable("no disk")])
def test_a_tier_that_one_rank_can_not_open_late_is_said_once(
    make: Callable[..., ReplayEngine],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    world_size: int,
) -> None:
    opens = vars(workers)["open_guarded"]
    opened: list[str] = []

    def last_fails(*args: Any, **named: Any) -> Any:
        opened.append("worker")
        if len(opened) == world_size:
            raise error
        return opens(*args, **named)

    monkeypatch.setattr(workers, "open_guarded", last_fails)
    monkeypatch.setattr(open_tier, "open_guarded", lambda *_: opened.append("scheduler"))
    late = Facts()
    engine = make(chain_of(disk(tmp_path)), late, world_size=world_size)
    loaded(engine, "disk")
    late.are_known = True
    limit = time.monotonic() + SECONDS
    while "unusable" not in caplog.text:
        assert time.monotonic() < limit, "nobody says why the tier is absent"
        loaded(engine, "disk")
    for _ in range(3):
        assert loaded(engine, "disk") == 0
    (line,) = [r.getMessage() for r in caplog.records if "unusable" in r.getMessage()]
    assert "tier 'disk' is unusable" in line and str(error) in line
    assert opened == ["worker"] * world_size, "what can't be used is opened in vain"


@pytest.mark.fault
@pytest.mark.parametrize("thread", ["open", "clear", "lookup", "watch-disk", "inventory"])
def test_a_tier_that_the_scheduler_finds_no_thread_for_is_closed(
    make: Callable[..., ReplayEngine],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    thread: str,
) -> None:
    """It joins in a step, which must not fail: of a large model, each one does."""
    late, mine = Facts(), threading.get_ident()

    def is_refused(some: threading.Thread) -> bool:
        return threading.get_ident() == mine and some.name.startswith(f"kvtiers-{thread}")

    engine = make(chain_of(cpu(), disk(tmp_path)), late, kv_events=True)
    refuse_threads(monkeypatch, is_refused)
    late.are_known = True
    limit = time.monotonic() + SECONDS
    while "unusable" not in caplog.text:
        assert time.monotonic() < limit, "nobody says why the tier is absent"
        loaded(engine, "disk")
    assert "tier 'disk' is unusable" in caplog.text and "can't start new thread" in caplog.text
    assert loaded(engine, "cpu") and not loaded(engine, "disk")
    close(engine)
    while list((tmp_path / "owners").glob("*")):
        assert time.monotonic() < limit, "its folder stays in use"
        time.sleep(0.01)


def test_a_store_that_opens_after_its_worker_was_closed_is_closed(
    make: Callable[..., ReplayEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opens = vars(workers)["open_guarded"]
    begun, begin, stores = threading.Event(), threading.Event(), []

    def slowly(*args: Any, **named: Any) -> Any:
        begun.set()
        assert begin.wait(SECONDS)
        stores.append(opens(*args, **named))
        return stores[0]

    monkeypatch.setattr(workers, "open_guarded", slowly)
    monkeypatch.setattr(chains, "DRAIN_SECONDS", 0.01)
    late = Facts()
    engine = make(chain_of(disk(tmp_path)), late)
    late.are_known = True
    loaded(engine, "disk")
    assert begun.wait(SECONDS), "else nothing is opened once the worker is closed"
    close(engine)
    begin.set()
    limit = time.monotonic() + SECONDS
    while not stores or not stores[0]._closed:
        assert time.monotonic() < limit, "its folder stays in use"
        time.sleep(0.01)


# -- finding them out ----------------------------------------------------------------------------


def test_facts_are_found_beside_who_asks() -> None:
    begin = threading.Event()

    def slowly(early: Mapping[str, str]) -> dict[str, str]:
        assert begin.wait(SECONDS)
        return {"weights": f"w of {early['attention']}"}

    late = BackgroundFacts(lambda: {"attention": "amx"}, slowly, {"weights": "alone"})
    assert late.known() is None and late.known(0.01) is None
    begin.set()
    assert late.known(SECONDS) == {"attention": "amx", "weights": "w of amx"}


@pytest.mark.vllm
def test_where_more_weights_lie_is_no_fact() -> None:
    from tiers.engine.vllm_hosting import facts_of_all

    def facts(place: str) -> tuple[Any, Any]:
        early = {"attention": "amx", SOURCES: place}
        late = BackgroundFacts(lambda: early, lambda sources: {}, {})
        hosted = facts_of_all([{**early}, {**early}])
        assert hosted.pop(SOURCES) == place
        return late.known(SECONDS), hosted

    assert facts("/a") == facts("/b")


def test_facts_that_can_t_be_found_are_this_process_s_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda told: None)

    def fails(_: object) -> dict[str, str]:
        raise MemoryError

    late = BackgroundFacts(dict, fails, {"weights": "alone"})
    assert late.known(SECONDS) == {"weights": "alone"}


def test_layers_that_can_t_be_identified_start_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails() -> dict[str, str]:
        raise NotImplementedError("a layer of a kind that is new")

    late = BackgroundFacts(fails, lambda _: {"weights": "w"}, {"weights": "alone"})
    assert late.known() == late.known() == {"weights": "alone"}
    assert len(caplog.records) == 1
