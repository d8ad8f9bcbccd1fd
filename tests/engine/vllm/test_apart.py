"""Prefill and decode apart, with tiers on both nodes: the same tokens as of one engine alone, and
each block is stored once, where it is computed."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from itertools import accumulate, count
from pathlib import Path
from typing import Any

import pytest

from bench.apart import TO_PREFILL
from tests.engine.vllm.apart import Apart, Node
from tests.engine.vllm.checkpoints import write_adapter
from tests.engine.vllm.recipes import recipe
from tests.engine.vllm.tiny_vllm import BLOCK_BYTES, BLOCK_TOKENS, LLAMA, Run, documents
from tests.engine.vllm.vllm_chains import IN_PROCESS, disk
from tests.support.clock import wait_for
from tests.support.damage import damage_blocks
from tests.support.servers import RedisServer

pytestmark = pytest.mark.vllm

pytest.importorskip("nixl_cu12", reason="NIXL is not installed")

SAID = 200
"""Tokens that a user says in a turn; not whole blocks."""
ANSWER = 40
TURN = SAID + ANSWER
HITS = "vllm:prefix_cache_hits"
EXTERNAL = "vllm:external_prefix_cache_hits"
USAGE = "vllm:kv_cache_usage_perc"
PULLED = "vllm:nixl_bytes_transferred"

Turns = list[tuple[list[int], list[int]]]
"""Prompt and answer of each."""
Start = Callable[..., Apart]


@pytest.fixture
def start(vllm_jobs: subprocess.Popen[str], tiny_llama: Path, tmp_path: Path) -> Iterator[Start]:
    """Start a prefill and a decode node with paged KV of so many blocks, and a KV transfer
    config of each. `change`: is called with the model's folder between the two starts. `more`:
    settings of both."""
    nodes: list[Node] = []
    pairs: list[Apart] = []

    def both(
        blocks: tuple[int, int],
        *configs: dict[str, Any],
        change: Callable[[Path], object] | None = None,
        **more: Any,
    ) -> Apart:
        model = tiny_llama
        if change is not None:
            model = shutil.copytree(tiny_llama, tmp_path / "model")
        for role, size, config in zip(("prefill", "decode"), blocks, configs, strict=True):
            tokens = min(1024, (min(blocks) - 1) * BLOCK_TOKENS)
            nodes.append(Node(vllm_jobs, model, tmp_path / role, config, size, tokens, more))
            if change is not None and role == "prefill":
                nodes[-1].wait_until_it_runs()
                change(model)
        pairs.append(Apart(*nodes))
        return pairs[-1]

    yield both
    for node in (*nodes, *(node for pair in pairs for node in pair.nodes)):
        node.kill()


def apart(tier: dict[str, Any], store: str = "computed") -> dict[str, Any]:
    """As the page has it, over one tier, and with KV in host memory."""
    # A busy machine must not make misses of hits that a test counts on.
    chain = {"version": 1, "store": store, "load_when": "always", "max_wait": "100s"}
    config = recipe("Apart", chain={**chain, "staging": "64MiB", "tiers": [tier]})
    config["kv_connector_extra_config"]["connectors"][1]["kv_buffer_device"] = "cpu"
    return config


def conversations(pair: Apart, turns: int) -> Turns:
    """The turns of two conversations that take turns themselves."""
    spoken: list[list[int]] = [[], []]
    said = []
    for turn in range(turns):
        for number, before in enumerate(spoken):
            said.append(asked(pair, before, turn * 2 + number))
            spoken[number] = spoken_by(said[-1])
    return said


def asked(pair: Apart, before: list[int], seed: int) -> tuple[list[int], list[int]]:
    """Say something new after this."""
    prompt = before + documents(1, SAID, seed)[0]
    answer = pair.ask(prompt, ANSWER)["tokens"]
    for node in pair.nodes:
        node.measured()
    return prompt, answer


def spoken_by(turn: tuple[list[int], list[int]]) -> list[int]:
    prompt, answer = turn
    return prompt + answer


def full(tokens: int) -> int:
    """Blocks that are full of computed tokens; the last one is only sampled."""
    return (tokens - 1) // BLOCK_TOKENS


def wait_until_nothing_is_kept(pair: Apart) -> None:
    """An engine sees in its steps that the other has pulled, or that a lease is over, of 30
    seconds: so long it keeps what a node that died has not pulled."""

    def kept() -> list[float]:
        for node in pair.nodes:
            node.ask([3], 1, {})
        return [node.measured(USAGE)["total"][USAGE] for node in pair.nodes]

    wait_for(lambda: kept() == [0, 0], seconds=120)


def is_as_of_one_engine(run_vllm: Callable[..., Run], turns: Turns) -> bool:
    prompts = [[(prompt, ANSWER)] for prompt, _ in turns]
    run = run_vllm(prompts, num_gpu_blocks_override=64, **IN_PROCESS)
    return [answer for _, answer in turns] == [batch[0] for batch in run.tokens]


def stored(node: Node, tier: str = "ours/redis") -> float:
    return float(node.measured()["tiers"].get(tier, {}).get("stored_blocks", 0))


def others() -> Iterator[list[int]]:
    """Prompts that begin as no turn does."""
    return (documents(1, SAID, seed)[0] for seed in count(1000))


def wait_until_tiers_join(
    pair: Apart, prompts: Iterator[list[int]], tier: str = "ours/redis"
) -> float:
    """They do once the weights are identified: what is computed before is stored nowhere. How many
    blocks both have stored by then."""
    for node in pair.nodes:
        while not stored(node, tier):
            node.ask(next(prompts), 1, {})
    return sum(stored(node, tier) for node in pair.nodes)


def test_what_one_node_computes_the_other_finds_in_the_next_turn(
    start: Start, shared_server: RedisServer, tmp_path: Path, run_vllm: Callable[..., Run]
) -> None:
    """The prefill node's own cache is too small for both conversations."""
    tier = {"type": "redis", "url": shared_server.url, "timeout": "30s"}
    config = apart({**tier, "key_prefix": str(tmp_path)})
    extra = config["kv_connector_extra_config"]
    extra |= {"load_policy": "first", "connectors": extra["connectors"][::-1]}
    pair = start((36, 64), config, config)
    before = wait_until_tiers_join(pair, others())
    turns = conversations(pair, 4)
    assert is_as_of_one_engine(run_vllm, turns)

    prefill, decode = (node.measured(HITS, EXTERNAL) for node in pair.nodes)
    ends = [*accumulate([TURN] * 4)]
    found = prefill["total"][HITS] + prefill["total"][EXTERNAL]
    assert found == 2 * BLOCK_TOKENS * sum(map(full, ends[:-1])), "answers, too"
    assert prefill["tiers"]["ours/redis"]["loaded_tokens"] == prefill["total"][EXTERNAL] > 0
    stored = [node["tiers"]["ours/redis"]["stored_blocks"] for node in (prefill, decode)]
    assert sum(stored) == before + 2 * full(ends[-1]), "each block once"
    assert all(stored)
    assert decode["tiers"]["ours/redis"]["loaded_tokens"] == 0
    pulled = decode["total"][HITS] + decode["total"][EXTERNAL]
    assert pulled == sum(len(prompt) for prompt, _ in turns), "all of each prompt"
    wait_until_nothing_is_kept(pair)


@pytest.mark.parametrize("first", ["ours", "NixlConnector"])
def test_under_vllms_multi_connector_either_comes_first(
    start: Start,
    shared_server: RedisServer,
    tmp_path: Path,
    run_vllm: Callable[..., Run],
    first: str,
) -> None:
    """Dynamo takes no other that lists both. It gives the first one's handshake to all."""
    tier = {"type": "redis", "url": shared_server.url, "timeout": "30s"}
    config = apart({**tier, "key_prefix": str(tmp_path)}) | {"kv_connector": "MultiConnector"}
    inherited = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    listed = [{**one, **inherited} for one in config["kv_connector_extra_config"]["connectors"]]
    listed[0].pop("name")
    listed.sort(key=lambda one: one["kv_connector"], reverse=first != "ours")
    pair = start((36, 64), *[{**config, "kv_connector_extra_config": {"connectors": listed}}] * 2)
    before = wait_until_tiers_join(pair, others(), "redis")
    turns = conversations(pair, 2)
    assert is_as_of_one_engine(run_vllm, turns)
    measured = [node.measured(PULLED) for node in pair.nodes]
    assert measured[1]["total"][PULLED] > 0 or first == "ours"  # which may have all by then
    stored = sum(one["tiers"]["redis"]["stored_blocks"] for one in measured)
    assert stored == before + 2 * full(2 * TURN)


@pytest.mark.fault
def test_the_decode_node_has_what_was_said_from_tiers_and_pulls_just_the_rest(
    start: Start, tmp_path: Path, run_vllm: Callable[..., Run]
) -> None:
    """Each node has tiers of its own. Where either fails, that is computed."""
    own = [apart(disk(tmp_path / role), store="all") for role in ("prefill", "decode")]
    pair = start((26, 26), *own)
    wait_until_tiers_join(pair, others(), "ours/disk")
    turns = conversations(pair, 3)
    decode = pair.decode.measured(HITS, EXTERNAL, PULLED)
    assert loaded(decode) >= BLOCK_TOKENS * full(TURN)
    assert loaded(decode) < decode["total"][EXTERNAL], "the rest was pulled"
    assert decode["total"][HITS] + decode["total"][EXTERNAL] == sum(len(p) for p, _ in turns)
    assert decode["tiers"]["ours/disk"].get("load_failures", 0) == 0
    had = (decode["total"][HITS] + loaded(decode)) // BLOCK_TOKENS
    pulled = sum(-(-len(prompt) // BLOCK_TOKENS) for prompt, _ in turns) - had
    assert decode["total"][PULLED] == pulled * BLOCK_BYTES, "no byte of what it had"

    prompt = spoken_by(turns[0]) + documents(1, SAID, 100)[0]
    first = pair.prefill.ask(prompt, 1, TO_PREFILL)
    assert damage_blocks(tmp_path / "decode", lambda key: True)
    turns.append((prompt, pair.decode.ask(prompt, ANSWER, first["params"])["tokens"]))
    damaged = pair.decode.measured(HITS)
    assert damaged["tiers"]["ours/disk"]["load_failures"] > 0
    own_cache = damaged["total"][HITS] - decode["total"][HITS]
    assert recovered(pair.decode) == [len(prompt) - own_cache], "it needs what failed"

    turns.append(asked(pair, [], 103))
    filler = documents(1, 700, 101)[0]
    turns.append((filler, pair.decode.ask(filler, ANSWER, {})["tokens"]))
    prompt = spoken_by(turns[-2]) + documents(1, SAID, 102)[0]
    known = BLOCK_TOKENS * full(len(prompt) - SAID)
    first = pair.prefill.ask(prompt, 1, TO_PREFILL)
    before = pair.decode.measured(HITS)
    pair.prefill.kill()
    turns.append((prompt, pair.decode.ask(prompt, ANSWER, first["params"])["tokens"]))
    after = pair.decode.measured(HITS)
    own_cache = after["total"][HITS] - before["total"][HITS]
    assert loaded(after) - loaded(before) == known - own_cache > 0
    assert recovered(pair.decode)[1:] == [len(prompt) - known], "what tiers had stays"
    assert is_as_of_one_engine(run_vllm, turns)


@pytest.mark.fault
def test_each_side_and_the_server_are_killed_and_started_and_no_other_request_fails(
    start: Start, server: RedisServer, tmp_path: Path, run_vllm: Callable[..., Run]
) -> None:
    """Each between the prefill node's answer and the decode node's pull, in the midst of two
    conversations. The next requests go to what is there then."""
    tier = {"type": "redis", "url": server.url, "timeout": "5s"}
    config = apart({**tier, "key_prefix": str(tmp_path)})
    pair = start((36, 64), config, config)
    turns = conversations(pair, 1)

    def kill_prefill() -> None:
        pair.prefill.kill()

    def restart_decode() -> None:
        pair.restart(pair.decode)

    for number, kill in enumerate((kill_prefill, restart_decode, server.kill)):
        prompt = spoken_by(turns[-2]) + documents(1, SAID, 10 + number)[0]
        first = pair.prefill.ask(prompt, 1, TO_PREFILL)
        kill()
        turns.append((prompt, pair.decode.ask(prompt, ANSWER, first["params"])["tokens"]))
        if kill is kill_prefill:
            pair.restart(pair.prefill)
        turns.append(asked(pair, spoken_by(turns[-2]), 20 + number))
    server.start()
    turns.append(asked(pair, spoken_by(turns[1]), 30))
    assert is_as_of_one_engine(run_vllm, turns)

    wait_until_nothing_is_kept(pair)


def test_behind_kv_of_other_weights_nothing_is_stored(
    start: Start, shared_server: RedisServer, tmp_path: Path
) -> None:
    """NIXL compares the model's path alone."""
    from safetensors.torch import load_file, save_file

    def change(model: Path) -> None:
        (file,) = model.glob("*.safetensors")
        save_file({name: one * 0.9 for name, one in load_file(file).items()}, file)

    config = apart({"type": "redis", "url": shared_server.url, "key_prefix": str(tmp_path)})
    pair = start((26, 26), config, config, change=change)
    prompts = others()

    wait_until_tiers_join(pair, prompts)
    before = stored(pair.decode)
    prompt = next(prompts)
    first = pair.prefill.ask(prompt, 1, TO_PREFILL)
    pair.decode.ask(prompt, ANSWER, first["params"])
    assert stored(pair.decode) == before
    while stored(pair.decode) == before:  # of other requests something is
        pair.decode.ask(next(prompts), ANSWER, {})


def test_behind_kv_of_another_adapter_of_the_same_name_nothing_is_stored(
    start: Start, shared_server: RedisServer, tmp_path: Path
) -> None:
    """A trainer writes the next version between the two nodes' loading it."""
    config = apart({"type": "redis", "url": shared_server.url, "key_prefix": str(tmp_path)})
    lora = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2, "max_cpu_loras": 2}
    pair = start((26, 26), config, config, **lora)
    prompts = others()

    def stores_behind(folder: Path, meanwhile: Callable[[], object] = int) -> bool:
        """Whether the decode node does, of an adapter that the prefill node has identified."""
        before = stored(pair.prefill)
        while stored(pair.prefill) == before:
            pair.prefill.ask(next(prompts), 1, {}, folder)
        meanwhile()
        while True:  # until the decode node has identified its own
            prompt, before = next(prompts), stored(pair.decode)
            pair.decode.ask(next(prompts), ANSWER, {}, folder)
            if stored(pair.decode) > before:
                break
        first = pair.prefill.ask(prompt, 1, TO_PREFILL, folder)
        before = stored(pair.decode)
        pair.decode.ask(prompt, ANSWER, first["params"], folder)
        return stored(pair.decode) > before

    wait_until_tiers_join(pair, prompts)
    same, changed = (write_adapter(tmp_path / name, LLAMA, seed=1) for name in ("a", "b"))

    def change() -> None:
        shutil.rmtree(changed)
        write_adapter(changed, LLAMA, seed=2)

    assert stores_behind(same)
    assert not stores_behind(changed, change)


def loaded(measured: dict[str, Any]) -> float:
    return float(measured["tiers"]["ours/disk"]["loaded_tokens"])


def recovered(node: Node) -> list[int]:
    """Tokens of each load that failed, by what vLLM says of it."""
    said = re.findall(r"rescheduled \((\d+) tokens affected\)", node.log.read_text())
    return [int(tokens) for tokens in said]
