"""Traces, chains and machines that replays of seconds are made of."""

from __future__ import annotations

import random
from typing import Any

from spec.chain import ChainSpec
from tiers.testing import GivenSpec
from tiers.traces.trace import TraceRequest
from tiers.tuning.machine import Machine, TierProfile

SIZE = 16
"""Tokens of a block."""
KV_BYTES = 1000
"""Of a token: a block has 16 kB."""
BLOCK_BYTES = SIZE * KV_BYTES


def chats(seed: int, count: int = 120, every: float = 120.0) -> list[TraceRequest]:
    """Conversations that share a beginning, go on in turns, and branch; one each `every` ms."""
    rng = random.Random(seed)
    ids = iter(range(1 << 30))
    shared = [next(ids) for _ in range(3)]
    open_chats = [list(shared)]
    requests = []
    moment = 0.0
    for _ in range(count):
        if rng.random() < 0.3:
            open_chats.append(shared[: rng.randrange(4)])
        chat = rng.choice(open_chats[-12:])
        if rng.random() < 0.1:
            chat = chat[: rng.randrange(len(chat) + 1)]
            open_chats.append(chat)
        chat += [next(ids) for _ in range(rng.randrange(1, 9))]
        tokens = len(chat) * SIZE + rng.randrange(1, SIZE)
        requests.append(TraceRequest(moment, tokens, 20, list(chat)))
        moment += rng.expovariate(1 / every)
    return requests


def answered(requests: list[TraceRequest]) -> list[TraceRequest]:
    """The same, but that up to three blocks which the next turn adds are its answer's."""
    found = []
    for number, one in enumerate(requests):
        known = len(one.blocks)
        later = (r.blocks for r in requests[number + 1 :] if len(r.blocks) > known)
        turn = next((blocks for blocks in later if blocks[:known] == one.blocks), [])
        answer = turn[known : known + 3]
        tokens = (known + len(answer)) * SIZE + 2 - one.input_length if answer else 1
        found.append(one._replace(answer_blocks=answer, output_length=max(1, tokens)))
    return found


def machine(**more: Any) -> Machine:
    """One GPU of a thousand tokens a second; a cache of 150 blocks; links that are not idle."""
    links = {
        "cpu": TierProfile(load_bandwidth=20e6, store_bandwidth=20e6),
        "disk": TierProfile(load_bandwidth=8e6, store_bandwidth=4e6, load_latency=0.002),
        "given": TierProfile(load_bandwidth=6e6, store_bandwidth=6e6, load_latency=0.004),
        "redis": TierProfile(load_bandwidth=6e6, store_bandwidth=6e6, load_latency=0.004),
    }
    base = {
        "kv_bytes_per_token": KV_BYTES,
        "engine_cache": 150 * BLOCK_BYTES,
        "prefill_rate": 4000,
        "step_tokens": 256,
        "decode_seconds_per_token": 0.002,
    }
    return Machine.model_validate(base | {"tiers": links} | more)


def chain(*tiers: Any, **more: Any) -> ChainSpec:
    """A chain; all its host memory for blocks on their way is 40 blocks."""
    return ChainSpec.model_validate(
        {"version": 1, "staging": 40 * BLOCK_BYTES, "tiers": tiers, "load_when": "always"} | more
    )


def cpu(blocks: int, **more: Any) -> dict[str, Any]:
    """A tier of host memory."""
    return {"type": "cpu", "capacity": blocks * BLOCK_BYTES} | more


def disk(blocks: int, **more: Any) -> dict[str, Any]:
    """A tier on disk, in a folder that nobody has: the replay has its own."""
    return {"type": "disk", "capacity": blocks * BLOCK_BYTES, "path": "/nowhere/disk"} | more


def given(**more: Any) -> GivenSpec:
    """A plugin's tier, whose store has no limit."""
    return GivenSpec.model_validate({"type": "given"} | more)
