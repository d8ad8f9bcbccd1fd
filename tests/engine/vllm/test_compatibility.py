"""What is served, by kind of model and of request: each tier loads, and no answer changes.

These tests, and those of what is refused, fill docs/compatibility.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml

from tests.engine.vllm.checkpoints import write_adapter, write_vision_model
from tests.engine.vllm.tiny_vllm import (
    DEEPSEEK,
    DEEPSEEK_V4,
    GEMMA,
    GRANITE,
    LLAMA,
    MISTRAL,
    QWEN_3,
    QWEN_NEXT,
    Batch,
    EngineFailed,
    Run,
    documents,
)
from tests.engine.vllm.vllm_server import VllmServer
from tests.support.compatibility import Cells, engine_version
from tests.support.servers import RedisServer, binaries

pytestmark = [pytest.mark.vllm, pytest.mark.compatibility, pytest.mark.timeout(600)]

TIERS = ("cpu", "disk", "redis")
END = documents(1, 25, seed=9)[0]
PROMPTS = [document + END for document in documents(3, 576)]
"""Three prompts of 18 full blocks, which end alike: only what is before tells them apart."""
FULL = 576
ONE: dict[str, Any] = {"env": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}}
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 2,
    "prompt_lookup_min": 1,
}


of_ranks = pytest.mark.parametrize("ranks", [1, 2], ids=["tp1", "tp2"])


class Kind(NamedTuple):
    """A row of the table, and how its engine is started."""

    name: str
    model: dict[str, Any]
    options: dict[str, Any]
    has_states: bool = False
    """They come back at the ends of blocks alone, of which a prompt has one."""


FEW: dict[str, Any] = {"max_model_len": 704, "num_gpu_blocks_override": 80}
WINDOWS = {**FEW, "max_num_batched_tokens": 128}
LATENT = {**FEW, "enable_prefix_caching": False, "num_gpu_blocks_override": 100, "dtype": "float16"}
STATES = {"dtype": "bfloat16", "max_num_batched_tokens": 256}
COMPRESSED = {
    "max_num_batched_tokens": 256,
    "num_gpu_blocks_override": 300,
    "before": {"start": ["deepseek_v4"]},
    "dtype": "bfloat16",
}
MAMBA = {"before": {"start": ["mamba_states"]}}
KINDS = [
    Kind("full attention", LLAMA, {}),
    Kind("sliding windows", MISTRAL, WINDOWS),
    Kind("sliding windows and full attention", GEMMA, WINDOWS),
    # Chunks are as long as what is loaded: others would round otherwise.
    Kind("latent attention (MLA)", DEEPSEEK, {**LATENT, "max_num_batched_tokens": FULL}),
    Kind("compressed attention and windows", DEEPSEEK_V4, COMPRESSED),
    Kind("linear attention and full attention", QWEN_NEXT, STATES, has_states=True),
    Kind("Mamba 2 and full attention", GRANITE, {**STATES, **MAMBA}, has_states=True),
]
OF_STATES = [kind.name for kind in KINDS if kind.has_states]
REFUSED = {
    "0.29": {
        "sliding windows": "use vLLM 0.30 or later",
        **dict.fromkeys(OF_STATES, "Failed to promote"),
    },
    "0.30": dict.fromkeys(OF_STATES, "0.32 and later"),
    "0.31": dict.fromkeys(OF_STATES, "0.32 and later"),
}
"""Kinds of models that are refused on some version, and what is said of it."""
NO_DRAFTS = {"0.30"}
"""Versions whose speculation by n-grams does not work on the CPU, without kvtiers either."""


def bound(ranks: int) -> dict[str, str]:
    """The environment of so many processes that compute on two cores."""
    return {"VLLM_CPU_OMP_THREADS_BIND": "|".join("01"[rank % 2] for rank in range(ranks))}


def placed(ranks: int) -> dict[str, Any]:
    """Engine options for an engine of so many ranks."""
    return ONE if ranks == 1 else {"tensor_parallel_size": ranks, "env": bound(ranks)}


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer(binaries()["valkey"]) as server:
        yield server


@pytest.fixture
def tiers(redis: RedisServer, tmp_path: Path) -> list[dict[str, Any]]:
    """A tier of each type, with nothing in them yet."""
    stored = {"type": "redis", "url": redis.url, "key_prefix": str(tmp_path), "timeout": "30s"}
    disk = {"type": "disk", "capacity": "64MiB", "path": str(tmp_path / "disk")}
    return [{"type": "cpu", "capacity": "64MiB"}, disk, stored]


def limited(batch: Batch, *tiers: str) -> Batch:
    """The same requests, which load from these tiers alone."""
    params = {"kv_transfer_params": {"kvtiers": {"tiers": list(tiers)}}}
    asked = []
    for tokens, count, *more in batch:
        said = dict(more[0]) if more else {}
        said["sampling"] = {**said.get("sampling", {}), "extra_args": params}
        asked.append((tokens, count, said))
    return asked


def from_each_tier(batches: Sequence[Batch]) -> dict[str, Any]:
    """All batches for four times: computed, and then loaded from each tier. Between these, stores
    end and the engine forgets its own cache."""
    rounds = [[], *([tier] for tier in TIERS)]
    asked = [limited(batch, *tiers) for tiers in rounds for batch in batches]
    forget: list[Any] = [("reset_prefix_cache", {})]
    return {"batches": asked, "told": {number * len(batches): forget for number in (1, 2, 3)}}


def check(
    run_vllm: Callable[..., Run],
    batches: Sequence[Batch],
    tiers: Sequence[dict[str, Any]],
    *,
    refused: str = "",
    **options: Any,
) -> Run:
    """The run of an engine that served the requests from each tier in turn, answers as without;
    `refused`: the one that it goes on without."""
    plain = run_vllm(batches, **options)
    answers = [tuple(tokens) for batch in plain.tokens for tokens in batch]
    asked = {repr(request) for batch in batches for request in batch}
    assert len(set(answers)) == len(asked), "what comes before the end must matter"
    forgetting = from_each_tier(batches)
    run = run_vllm(tiers=tiers, max_wait="100s", on_reset="keep", **forgetting, **options)
    assert run.tokens == plain.tokens * 4
    assert run.loaded().keys() == set(TIERS) - {refused}, run.tiers
    return run


@of_ranks
@pytest.mark.parametrize("kind", KINDS, ids=[kind.model["model_type"] for kind in KINDS])
def test_models(
    run_vllm: Callable[..., Run],
    tiny_model: Callable[..., Path],
    tiers: list[dict[str, Any]],
    cells: Cells,
    kind: Kind,
    ranks: int,
) -> None:
    if kind.model is DEEPSEEK and not torch.cpu._is_amx_tile_supported():
        pytest.skip("latent attention is refused here: this processor has no AMX")
    if kind.model is DEEPSEEK_V4 and engine_version() < "0.32":
        pytest.skip("this vLLM has it on devices alone, or not all of it on CPUs")
    options = {"model": str(tiny_model(kind.model)), **placed(ranks), **kind.options}
    batches = [[(prompt, 8)] for prompt in PROMPTS]
    refusal = REFUSED.get(engine_version(), {}).get(kind.name)
    if refusal is not None:
        start = partial(run_vllm, batches, tiers=tiers, **options)
        assert refusal in cells.refuses(kind.name, f"TP {ranks}", start)
        return
    run = check(run_vllm, batches, tiers, **options)
    (block,) = run.cached[-1]
    # Of these a prompt has few blocks.
    assert kind.has_states or kind.model is DEEPSEEK_V4 or block == FULL
    assert run.loaded() == dict.fromkeys(TIERS, len(PROMPTS) * block)
    cells.loaded(kind.name, f"TP {ranks}", run.loaded())


@of_ranks
def test_adapters_take_turns(
    run_vllm: Callable[..., Run],
    tiers: list[dict[str, Any]],
    cells: Cells,
    tmp_path: Path,
    ranks: int,
) -> None:
    """Requests at once of two adapters, where the engine has room for one; then of none."""
    folders = [str(write_adapter(tmp_path / name, LLAMA, seed)) for seed, name in enumerate("ab")]
    at_once: Batch = [
        (prompt, 8, {"adapter": folder}) for prompt in PROMPTS[:2] for folder in folders
    ]
    without: Batch = [(prompt, 8, {}) for prompt in PROMPTS[:2]]
    lora: dict[str, Any] = {
        "enable_lora": True,
        "max_loras": 1,
        "max_cpu_loras": 1,
        "max_lora_rank": 8,
    }
    run = check(
        run_vllm, [at_once, without], tiers, **placed(ranks), **lora, num_gpu_blocks_override=80
    )
    # Until an adapter is digested its requests share nothing.
    assert all(2 * FULL <= tokens <= 6 * FULL for tokens in run.loaded().values()), run.loaded()
    cells.loaded("LoRA adapters that take turns", f"TP {ranks}", run.loaded())


@of_ranks
def test_images_repeat_and_differ(
    run_vllm: Callable[..., Run],
    tiers: list[dict[str, Any]],
    cells: Cells,
    tmp_path: Path,
    ranks: int,
) -> None:
    text = documents(1, 128, seed=4)[0]
    colors = ([255, 0, 0], [0, 0, 255], [0, 255, 0])
    run = check(
        run_vllm,
        [[(text, 8, {"image": color})] for color in colors],
        tiers,
        model=str(write_vision_model(tmp_path)),
        skip_tokenizer_init=False,
        num_gpu_blocks_override=80,
        **placed(ranks),
    )
    assert run.loaded() == dict.fromkeys(TIERS, 3 * 160)
    cells.loaded("images that repeat and differ", f"TP {ranks}", run.loaded())


@of_ranks
def test_embeddings_instead_of_tokens(
    run_vllm: Callable[..., Run],
    tiers: list[dict[str, Any]],
    cells: Cells,
    tiny_llama: Path,
    ranks: int,
) -> None:
    """All prompts have the same tokens, which are none: their embeddings tell them apart."""
    weights = {"embeddings": str(tiny_llama / "model.safetensors")}
    batches: list[Batch] = [[(prompt, 8, weights)] for prompt in PROMPTS]
    run = check(run_vllm, batches, tiers, enable_prompt_embeds=True, **placed(ranks))
    assert run.loaded() == dict.fromkeys(TIERS, len(PROMPTS) * FULL)
    cells.loaded("prompt embeddings", f"TP {ranks}", run.loaded())


@of_ranks
def test_speculation_by_ngrams(
    run_vllm: Callable[..., Run], tiers: list[dict[str, Any]], cells: Cells, ranks: int
) -> None:
    """Next turns of conversations load blocks of answers that drafts were taken into."""
    few = {"sampling": {"allowed_token_ids": [11, 12, 13]}}  # so that some drafts are right
    first: list[Batch] = [[(prompt, 40, few)] for prompt in PROMPTS[:2]]
    if engine_version() in NO_DRAFTS:
        why = "Cannot inspect kernel parameters"
        with pytest.raises(EngineFailed, match=why):
            run_vllm(first, speculative_config=NGRAM, **placed(ranks))
        cells.refused("n-gram speculation", why, f"TP {ranks}", who="vLLM refuses")
        return
    said = [tokens for (tokens,) in run_vllm(first, **placed(ranks)).tokens]
    turns: list[Batch] = [
        [(prompt + answer + END, 4)] for prompt, answer in zip(PROMPTS, said, strict=False)
    ]
    run = check(run_vllm, [*first, *turns], tiers, speculative_config=NGRAM, **placed(ranks))
    assert run.tokens[:2] == [[answer] for answer in said], "nor does speculation change any"
    assert 0 < run.drafts_accepted < run.drafts
    assert run.loaded() == dict.fromkeys(TIERS, 2 * 640), "of a turn, what the engine had not kept"
    cells.loaded("n-gram speculation", f"TP {ranks}", run.loaded())


@of_ranks
def test_a_pipeline_of_two(
    run_vllm: Callable[..., Run], tiers: list[dict[str, Any]], cells: Cells, ranks: int
) -> None:
    """Several requests at once, so that both stages are at work.

    Not eager, since vLLM's CPU worker makes what stages exchange while it warms up to compile.
    """
    batch: Batch = [(prompt, 8) for prompt in PROMPTS]
    stages: dict[str, Any] = {"pipeline_parallel_size": 2, "tensor_parallel_size": ranks, **FEW}
    stages |= {"env": bound(2 * ranks), "enforce_eager": False}
    stages["compilation_config"] = {"mode": 2, "backend": "eager"}
    run = check(run_vllm, [batch], tiers, **stages)
    assert run.loaded() == dict.fromkeys(TIERS, len(PROMPTS) * FULL)
    cells.loaded("pipeline parallel 2", f"TP {ranks}", run.loaded())


@of_ranks
def test_ranks_share_out_tokens(
    run_vllm: Callable[..., Run],
    tiny_model: Callable[..., Path],
    tiers: list[dict[str, Any]],
    cells: Cells,
    ranks: int,
) -> None:
    """Of each block's 64 tokens a rank has every other."""
    kind = "decode context parallel 2"
    shared = {"decode_context_parallel_size": 2, **placed(ranks), **FEW}
    shared |= {"model": str(tiny_model(QWEN_3)), "before": {"start": ["context_parallel"]}}
    batch: Batch = [(prompt, 8) for prompt in PROMPTS]
    if ranks == 1:
        why = "tp_size=1 must be divisible by dcp_size=2"
        with pytest.raises(EngineFailed, match=why):
            run_vllm([batch], **shared)
        cells.refused(kind, why, "TP 1", who="vLLM refuses")
        return
    if engine_version() < "0.32":
        cells.refuses(kind, "TP 2", partial(run_vllm, [batch], tiers=tiers, **shared))
        return
    run = check(run_vllm, [batch], tiers, **shared)
    assert run.loaded() == dict.fromkeys(TIERS, len(PROMPTS) * FULL)
    cells.loaded(kind, "TP 2", run.loaded())


@of_ranks
def test_ranks_on_two_hosts(
    run_vllm: Callable[..., Run], tiers: list[dict[str, Any]], cells: Cells, ranks: int
) -> None:
    """Each half of them is another process's. A disk is refused, and the chain goes on without."""
    kind = "ranks on two hosts"
    batch: Batch = [(prompt, 8) for prompt in PROMPTS]
    if ranks == 1:
        why = "must evenly divide the total world size"
        with pytest.raises(EngineFailed, match=why):
            run_vllm([batch], nnodes=2)
        cells.refused(kind, why, "TP 1", who="vLLM refuses")
        return
    tiers[2]["url"] = tiers[2]["url"].replace("127.0.0.1", "0.0.0.0")  # else it is each host's own
    run = check(run_vllm, [batch], tiers, refused="disk", hosts=2, **placed(ranks), **FEW)
    assert run.loaded() == dict.fromkeys(("cpu", "redis"), len(PROMPTS) * FULL)
    cells.loaded(kind, "TP 2", run.loaded())
    why = "its blocks can be found on the host alone that stored them"
    assert f"tier 'disk' is unusable and the chain goes on without it: {why}" in run.log
    cells.refused(kind, why, "TP 2", tiers=("disk",))


@of_ranks
def test_replicas_share_a_redis_and_a_disk(
    tiny_llama: Path,
    tiers: list[dict[str, Any]],
    cells: Cells,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
) -> None:
    """What the first of two data-parallel replicas computed, the second loads."""
    # Where this is set, vLLM 0.33 wants no NUMA node for each rank; with 0 it takes a binding, too.
    environment = {"VLLM_CPU_SIM_MULTI_NUMA": "1" if ranks == 1 else "0"}
    environment |= bound(2 * ranks) if ranks > 1 else {}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    chain = tmp_path / "chain.yaml"
    chain.write_text(
        yaml.safe_dump({"version": 1, "load_when": "always", "staging": "64MiB", "tiers": tiers})
    )
    server = VllmServer(
        tiny_llama,
        chain,
        tmp_path / "log",
        **{"data-parallel-size": 2, "no-enable-prefix-caching": None},
        **({} if ranks == 1 else {"tensor-parallel-size": ranks}),
    )
    try:
        plain = [server.complete(prompt, 8, replica=0, tiers=()) for prompt in PROMPTS]
        assert len(set(map(tuple, plain))) == len(PROMPTS), "the prompts must matter"
        server.settle(0)
        for replica, tier in ((0, "cpu"), (1, "disk"), (1, "redis")):
            for prompt, answer in zip(PROMPTS, plain, strict=True):
                got = server.complete(prompt, 8, replica=replica, tiers=(tier,))
                assert got == answer
        server.settle(0, 1)
        loaded = server.metrics()["vllm:kvtiers_loaded_tokens_total"]
    finally:
        server.close()
    assert loaded == dict.fromkeys(TIERS, len(PROMPTS) * FULL)
    cells.loaded("data parallel 2", f"TP {ranks}", loaded)
