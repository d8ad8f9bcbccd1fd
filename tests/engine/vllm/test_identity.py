"""A real vLLM engine: whose KV it takes for its own, and what it does until it knows."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.vllm.checkpoints import write_adapter, write_int4, write_llama_4
from tests.engine.vllm.tiny_vllm import LLAMA, Run, documents

pytestmark = pytest.mark.vllm

PROMPTS = [[(prompt, 4)] for prompt in documents(3, 300)]
COMPLETE = 3 * 9 * 32


def disk(path: Path) -> dict[str, object]:
    return {"type": "disk", "capacity": "64MiB", "path": str(path)}


@pytest.mark.faults
@pytest.mark.fault
@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="this processor has no AMX")
def test_a_processor_without_amx_takes_no_kv_of_one_that_has_it(
    run_vllm: Callable[..., Run], tmp_path: Path
) -> None:
    options = {
        "dtype": "bfloat16",
        # As long as what is loaded: another chunk would round otherwise.
        "max_num_batched_tokens": COMPLETE // len(PROMPTS),
        "env": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
    }
    first = run_vllm(PROMPTS, [disk(tmp_path)], **options)
    assert first.count("disk", "stored_blocks") == COMPLETE / 32
    other = run_vllm(PROMPTS, [disk(tmp_path)], before={"start": ["without_amx"]}, **options)
    assert other.loaded() == {}
    assert other.count("disk", "stored_blocks") == COMPLETE / 32
    again = run_vllm(PROMPTS, [disk(tmp_path)], **options)
    assert again.loaded() == {"disk": COMPLETE} and again.tokens == first.tokens


@pytest.mark.faults
@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="this processor has no AMX")
def test_activations_of_eight_bits_by_the_environment_alone(
    run_vllm: Callable[..., Run], tiny_llama: Path, tmp_path: Path
) -> None:
    """No setting says whether four-bit weights meet activations of 8 bits or of 16."""
    options: dict[str, Any] = {
        "model": str(write_int4(tiny_llama, tmp_path / "model")),
        "dtype": "bfloat16",
        # As long as what is loaded: another chunk would round otherwise.
        "max_num_batched_tokens": COMPLETE // len(PROMPTS),
        "before": {"start": ["allow_tiles"]},
    }
    eight, sixteen = (
        {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_INT4_W4A8": said} for said in "10"
    )
    tiers = [disk(tmp_path / "disk")]
    first = run_vllm(PROMPTS, tiers, env=eight, **options)
    plain = run_vllm(PROMPTS, env=sixteen, **options)
    assert first.tokens != plain.tokens, "how coarse they are must matter"
    other = run_vllm(PROMPTS, tiers, env=sixteen, **options)
    assert other.tokens == plain.tokens and other.loaded() == {}
    again = run_vllm(PROMPTS, tiers, env=eight, **options)
    assert again.tokens == first.tokens and again.loaded() == {"disk": COMPLETE}


@contextmanager
def held(lock: Path) -> Iterator[int]:
    """Another process, by its number, that holds the lock of a file's digest."""
    lock.parent.mkdir(parents=True, mode=0o700)
    code = (
        "import fcntl, sys, time; file = open(sys.argv[1], 'w'); "
        "fcntl.flock(file, fcntl.LOCK_EX); print('held', flush=True); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(lock)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"held\n"
        yield process.pid
    finally:
        process.kill()
        process.wait()


@pytest.mark.faults
@pytest.mark.fault
@pytest.mark.parametrize("multiprocessing", ["0", "1"])
def test_an_engine_serves_while_its_weights_are_identified(
    run_vllm: Callable[..., Run], tiny_llama: Path, tmp_path: Path, multiprocessing: str
) -> None:
    status = (tiny_llama / "model.safetensors").stat()
    lock = tmp_path / "kvtiers" / "weights" / f"{status.st_dev:x}-{status.st_ino:x}.lock"
    env = {"VLLM_ENABLE_V1_MULTIPROCESSING": multiprocessing, "XDG_CACHE_HOME": str(tmp_path)}
    while time.time() - status.st_ctime < 3:
        time.sleep(0.1)  # until the digest of the file is one that is kept
    with held(lock) as process:
        run = run_vllm(
            [*PROMPTS * 2, *PROMPTS * 4],
            [disk(tmp_path / "disk")],
            # It looks on another thread, and goes on to serve.
            before={str(len(PROMPTS) * 2): ["end", process]},
            told={str(len(PROMPTS) * 4): [["settle", {"opened": "disk"}]]},
            settled=True,
            env=env,
            enable_prefix_caching=False,
        )
    assert run.tokens == run.tokens[:3] * 6
    assert run.cached[:6] == [[0]] * 6, "nothing was loaded before"
    assert run.cached[-3:] == [[288]] * 3, "and then it was"
    assert run.log.count("are being identified") == run.log.count("join now") == 1
    assert list(lock.parent.glob("*-*[!k]")), "what was read is kept"


@pytest.mark.faults
@pytest.mark.fault
def test_an_adapter_is_what_was_loaded_and_not_what_is_there(
    run_vllm: Callable[..., Run], tmp_path: Path
) -> None:
    """A trainer writes the next version before anybody asks for the first one."""
    served, following = (
        write_adapter(tmp_path / name, LLAMA, seed)
        for seed, name in enumerate(("served", "following"))
    )
    tiers, asked = [disk(tmp_path / "disk")], {"adapter": str(served)}
    # The first is of many steps, so that news of the adapter comes with one on a busy machine, too.
    batches = [[([7, 8, 9], 100)], *([(*one, asked)] for [one] in PROMPTS[:2])]
    lora = {"enable_lora": True, "max_lora_rank": 8}
    options = {"told": {"0": [["add_lora", {"folder": str(served)}]]}, **lora}
    first = run_vllm(
        batches, tiers, before={"1": ["replace", str(served), str(following)]}, **options
    )
    plain = run_vllm(batches, **options)
    assert first.tokens[1:] != plain.tokens[1:], "the versions answer differently"
    second = run_vllm(batches, tiers, **options)
    assert second.tokens == plain.tokens and second.loaded() == {}
    third = run_vllm(batches, tiers, **options)
    assert third.tokens == plain.tokens, "and who loads the same weights shares"
    assert third.loaded() == {"disk": 2 * 9 * 32}


@pytest.mark.faults
@pytest.mark.fault
@pytest.mark.parametrize("how", ["evicted", "in place"])
def test_an_adapter_is_loaded_again(run_vllm: Callable[..., Run], tmp_path: Path, how: str) -> None:
    """By an engine with room for one, whose own cache would tell the versions apart by nothing."""
    names = ("served", "following", "other")
    served, following, other = (
        str(write_adapter(tmp_path / name, LLAMA, seed)) for seed, name in enumerate(names)
    )
    tiers, (one,) = [disk(tmp_path / "disk")], PROMPTS[0]
    first, between = [(*one, {"adapter": served})], [(*one, {"adapter": other})]
    options: dict[str, Any] = {"max_loras": 1, "max_cpu_loras": 1, "enable_prefix_caching": False}
    options |= {"enable_lora": True, "max_lora_rank": 8}
    batches = [first, between, first, first, between, first]
    change: dict[str, Any] = {"before": {"5": ["replace", served, following]}}
    if how == "in place":
        change = {"told": {"5": [["reload_lora", {"folder": served, "other": following}]]}}
    run = run_vllm(batches, tiers, settled=True, **change, **options)
    now = run_vllm([first, between], **options)
    assert run.tokens[0] != now.tokens[0], "the versions answer differently"
    expected = [run.tokens[0], now.tokens[1], run.tokens[0], run.tokens[0], now.tokens[1]]
    assert run.tokens == [*expected, now.tokens[0]]
    loaded = 9 * 32
    assert run.cached == [[0], [0], [loaded], [loaded], [loaded], [0]]
    told = {n: [["add_lora", {"folder": one}]] for n, one in (("0", served), ("1", other))}
    asked = [first, [([7, 8, 9], 1)], between]
    again = run_vllm(asked, tiers, told=told, settled=True, **options)
    assert [again.tokens[0], again.tokens[2]] == now.tokens
    assert again.cached == [[0], [0], [loaded]], "once a step has told what is loaded"


@pytest.mark.faults
@pytest.mark.fault
def test_llama_4_by_the_longest_request(run_vllm: Callable[..., Run], tmp_path: Path) -> None:
    """It scales the queries of some layers if requests may have more than 32,768 tokens, which it
    notes in a copy of its configuration."""
    options = {
        "model": str(write_llama_4(tmp_path / "model")),
        "language_model_only": True,
        "before": {"start": ["without_pictures"]},
        "num_gpu_blocks_override": 1100,
        "disable_hybrid_kv_cache_manager": True,
        # As long as what is loaded: another chunk would round otherwise.
        "max_num_batched_tokens": COMPLETE // len(PROMPTS),
        "env": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
    }
    tiers = [disk(tmp_path / "disk")]
    short = run_vllm(PROMPTS, tiers, max_model_len=32768, **options)
    plain = run_vllm(PROMPTS, max_model_len=32800, **options)
    assert short.tokens != plain.tokens, "the scale must matter"
    scaled = run_vllm(PROMPTS, tiers, max_model_len=32800, **options)
    assert scaled.tokens == plain.tokens and scaled.loaded() == {}
    shorter = run_vllm(PROMPTS, tiers, max_model_len=16384, **options)
    assert shorter.tokens == short.tokens and shorter.loaded() == {"disk": COMPLETE}
