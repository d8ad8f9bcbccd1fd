"""How many blocks each load policy loads, on a trace of real prompts.

    python -m bench.policies TRACE [--requests 3000] [--cpu 200 1000 5000] [--disk 20000] [--json F]

A trace has one JSON object a line: {"timestamp", "input_length", "output_length", "hash_ids"},
where `hash_ids` names the prompt's blocks of 512 tokens, each id standing for its block and all
before it. The default is the conversation trace of the Mooncake project (Apache-2.0,
https://github.com/kvcache-ai/Mooncake, FAST25-release/traces).

Only decisions are replayed, so the clock is the order of requests: the scheduler halves of a chain
of two tiers are real (slots, LRU, lookups, policy, metadata), every transfer succeeds at once, and
an index in memory with LRU stands for the disk. The engine has no prefix cache of its own.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from pydantic import PrivateAttr

from spec.chain import LOAD_POLICIES, ChainSpec, LoadPolicy
from spec.offloading import StoreContext, StoreSpec
from tiers.connector.assembly import open_scheduler
from tiers.connector.multi.multi_connector import MultiWorkerMetadata
from tiers.contract.engine_info import EngineInfo
from tiers.contract.messages import (
    JobResult,
    LoadJob,
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
    StoreJob,
    WorkerHandshake,
)
from tiers.contract.stats import TierStats
from tiers.cpu.spec import CpuSpec
from tiers.host.slot_memory import ALIGNMENT
from tiers.lab.replay.requests import CachedRequests, NewRequest
from tiers.store import Block

TRACE = Path(__file__).parents[2] / "shared" / "traces" / "mooncake_conversation.jsonl"
BLOCK_TOKENS = 512
NAMESPACE = b"trace"
STAGING_BLOCKS = 4096
"""Slots beside those of the CPU tier: no store is ever dropped, so that only policies differ."""
"""All of them. What is computed since that is sooner is left out: see `bench.load_when`."""


class IndexStore:
    """A store's keys, the least recently used of which go when there are more than `blocks`."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        """Which keys are kept."""
        return [key in self._keys for key in keys]

    peek = has

    def touch(self, keys: Sequence[bytes]) -> None:
        """Count keys as used now, the first of them most."""
        for key in reversed(keys):
            if key in self._keys:
                self._keys.move_to_end(key)

    def keep(self, keys: Sequence[bytes]) -> None:
        """Store keys, the first of them as the one used last."""
        self._keys.update(dict.fromkeys(reversed(keys)))
        while len(self._keys) > self._blocks:
            self._keys.popitem(last=False)

    def put(self, blocks: Sequence[Block]) -> list[bool]:
        """Keep the keys of blocks."""
        self.keep([block.key for block in blocks])
        return [True] * len(blocks)

    def get(self, blocks: Sequence[Block]) -> list[bool]:
        """Nothing can be loaded: there are no bytes."""
        return [False] * len(blocks)

    def drop(self, keys: Sequence[bytes]) -> None:
        """Forget keys."""
        for key in keys:
            self._keys.pop(key, None)

    def close(self) -> None:
        """Nothing to release."""


class IndexSpec(StoreSpec):
    """The tier that stands for the disk; `blocks` is its capacity."""

    is_prompt: ClassVar[bool] = True

    blocks: int
    _store: IndexStore = PrivateAttr()

    def model_post_init(self, context: Any) -> None:
        """Make the store that both this bench and the chain use."""
        self._store = IndexStore(self.blocks)

    def open(self, site: StoreContext) -> IndexStore:
        """The one store."""
        return self._store


def _count(stats: TierStats, tier: str, name: str) -> int:
    value = stats.data.get(tier, {}).get(name, 0)
    assert not isinstance(value, list)
    return int(value)


@dataclass
class TraceRequest:
    """A prompt of the trace, as connectors see a request and its blocks."""

    request_id: str
    block_hashes: list[bytes]
    num_computed_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of its full blocks; the rest of the prompt can't be loaded."""
        return len(self.block_hashes) * BLOCK_TOKENS

    @property
    def num_prompt_tokens(self) -> int:
        """All of its tokens."""
        return self.num_tokens

    def get_block_ids(self) -> tuple[list[int], ...]:
        """Any blocks will do: nothing is copied."""
        return (list(range(len(self.block_hashes))),)


@dataclass
class Step:
    """A step that runs one request to the end of its prompt."""

    scheduled_new_reqs: list[NewRequest]
    num_scheduled_tokens: dict[str, int]
    scheduled_cached_reqs: CachedRequests = field(default_factory=CachedRequests)


@dataclass
class Output:
    """What the one worker says."""

    kv_connector_worker_meta: MultiWorkerMetadata


def read_trace(path: Path, requests: int | None = None) -> Iterator[TraceRequest]:
    """The first `requests` prompts, or all, as their full blocks."""
    with path.open() as lines:
        for number, line in enumerate(islice(lines, requests)):
            said = json.loads(line)
            ids = said["hash_ids"][: said["input_length"] // BLOCK_TOKENS]
            yield TraceRequest(str(number), [i.to_bytes(8, "little") for i in ids])


class Replay:
    """One chain that the trace runs over."""

    def __init__(self, load: LoadPolicy, cpu_blocks: int, disk_blocks: int) -> None:
        disk = IndexSpec(type="index", name="disk", blocks=disk_blocks)
        self._disk = disk._store
        chain = ChainSpec(
            version=1,
            load_when="always",
            load_policy=load,
            staging=STAGING_BLOCKS * ALIGNMENT,
            tiers=(CpuSpec(name="cpu", capacity=cpu_blocks * ALIGNMENT), disk),
        )
        engine = EngineInfo({}, BLOCK_TOKENS, BLOCK_TOKENS, num_blocks=1)
        self._chain = open_scheduler(chain, engine)
        handshake = WorkerHandshake(0, NAMESPACE, ALIGNMENT)
        self._hear(OffloadingWorkerMetadata(handshakes={0: handshake}) for _ in chain.tiers)

    def run(self, request: TraceRequest) -> None:
        """Load what can be loaded of a prompt, compute the rest, store it, and forget it."""
        tokens, _ = self._chain.get_num_new_matched_tokens(request, 0)
        assert tokens is not None, "an index in memory answers at once"
        self._chain.update_state_after_alloc(request, request, tokens)
        new = NewRequest(request.request_id, request.get_block_ids(), tokens)
        step = Step([new], {request.request_id: request.num_tokens - tokens})
        orders = self._chain.build_connector_meta(step)
        for job in orders.metadata[1].reqs_to_store:
            self._disk.keep([NAMESPACE + item.key for item in job.items])
        self._hear(map(all_done, orders.metadata))
        self._chain.request_finished(request, [])

    def _hear(self, children: Iterable[OffloadingWorkerMetadata]) -> None:
        self._chain.update_connector_output(Output(MultiWorkerMetadata(tuple(children))))

    def loaded(self) -> dict[str, int]:
        """Blocks loaded from each tier since the start; ends the replay."""
        stats = self._chain.get_kv_connector_stats() or TierStats()
        self._chain.shutdown()
        assert not any(c.get("store_dropped_no_slot") for c in stats.data.values()), (
            "staging is too small"
        )
        return {
            tier: _count(stats, tier, "loaded_tokens") // BLOCK_TOKENS for tier in ("cpu", "disk")
        }


def all_done(orders: OffloadingConnectorMetadata) -> OffloadingWorkerMetadata:
    """Every job of a step has ended, whole."""
    jobs: list[LoadJob | StoreJob] = [*orders.reqs_to_load, *orders.reqs_to_store]
    return OffloadingWorkerMetadata({job.job_id: JobResult(1, set()) for job in jobs})


def measure(
    requests: Sequence[TraceRequest], cpu_sizes: Sequence[int], disk_blocks: int
) -> list[dict[str, Any]]:
    """A row per CPU size and policy: blocks loaded, from which tier, and seconds it took."""
    rows = []
    for cpu_blocks in cpu_sizes:
        for load in LOAD_POLICIES:
            replay = Replay(load, cpu_blocks, disk_blocks)
            began = time.perf_counter()
            for request in requests:
                replay.run(request)
            seconds = time.perf_counter() - began
            loaded = replay.loaded()
            rows.append(
                {
                    "cpu_blocks": cpu_blocks,
                    "disk_blocks": disk_blocks,
                    "load": load,
                    "loaded": sum(loaded.values()),
                    **{f"from_{tier}": blocks for tier, blocks in loaded.items()},
                    "seconds": round(seconds, 2),
                }
            )
    return rows


def print_table(rows: Sequence[dict[str, Any]], blocks: int) -> None:
    """The rows, with what share of all the prompts' blocks was loaded."""
    print(f"{'cpu':>7} {'disk':>7}  {'load':<9} {'loaded':>8} {'of all':>7} {'cpu':>8} {'disk':>8}")
    for row in rows:
        print(
            f"{row['cpu_blocks']:>7} {row['disk_blocks']:>7}  {row['load']:<9} {row['loaded']:>8} "
            f"{row['loaded'] / max(1, blocks):>7.1%} {row['from_cpu']:>8} {row['from_disk']:>8}"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m bench.policies", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("trace", nargs="?", type=Path, default=TRACE)
    parser.add_argument("--requests", type=int, default=3000, help="how many of the trace")
    parser.add_argument("--cpu", type=int, nargs="+", default=[200, 1000, 5000], help="blocks")
    parser.add_argument("--disk", type=int, default=20_000, help="blocks")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    options = parser.parse_args(arguments)
    if not options.trace.exists():
        print(f"there is no trace at {options.trace}; name one", file=sys.stderr)
        return 2
    requests = list(read_trace(options.trace, options.requests))
    blocks = sum(len(request.block_hashes) for request in requests)
    rows = measure(requests, options.cpu, options.disk)
    print(f"{len(requests)} prompts of {blocks} full blocks of {BLOCK_TOKENS} tokens")
    print_table(rows, blocks)
    if options.json is not None:
        whole = {"requests": len(requests), "blocks": blocks, "rows": rows}
        options.json.write_text(json.dumps(whole, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
