"""What explaining costs the engine's thread: `python -m bench.explain`.

The scheduler halves of a chain are real, as in the suite `scheduler`. Each prompt is begun, run for
a step and ended by two engines in turn, of which one explains; half of each prompt's blocks are in
the CPU tier. Figures are seconds that the calling thread ran, of all calls for one request.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.policies import Step, all_done
from bench.scheduler import PAYLOAD, TOKENS, Halves, Prompt
from tiers.cpu.spec import CpuSpec
from tiers.disk.spec import DiskSpec
from tiers.host.slot_memory import slot_stride
from tiers.lab.replay.requests import NewRequest

PROMPTS = 400


def serve(halves: Halves, prompt: Any) -> float:
    """Seconds that all calls for a request took."""
    chain = halves.chain
    began = time.thread_time()
    chain.on_new_request(prompt)
    tokens, _ = chain.get_num_new_matched_tokens(prompt, 0)
    assert tokens is not None
    chain.update_state_after_alloc(prompt, prompt, tokens)
    took = time.thread_time() - began
    new = NewRequest(prompt.request_id, prompt.get_block_ids(), tokens)
    step = Step([new], {prompt.request_id: prompt.num_tokens - tokens})
    began = time.thread_time()
    orders = chain.build_connector_meta(step)
    took += time.thread_time() - began
    done = [all_done(one) for one in orders.metadata]
    began = time.thread_time()
    halves._hear(done)
    chain.request_finished(prompt, [])
    return took + time.thread_time() - began


def measure(blocks: int, folder: Path) -> tuple[float, float]:
    """Seconds of a request of so many blocks without, and what explaining adds: lower quartiles."""
    explain = {"folder": str(folder / f"explain-{blocks}")}
    engines = []
    for number, more in enumerate(({}, {"explain": explain})):
        cpu = CpuSpec(type="cpu", capacity=2 * blocks * slot_stride(PAYLOAD))
        disk = DiskSpec(path=folder / f"{blocks}-{number}", capacity=64 * blocks * 8192)
        engines.append(Halves((cpu, disk), blocks, **more))
    times: list[list[float]] = [[], []]
    gc.collect()
    gc.freeze()
    for number in range(PROMPTS):
        for which in (0, 1) if number % 2 else (1, 0):
            prompt = Prompt(number % 7, blocks, number)
            prompt.block_hashes[blocks // 2 :] = Prompt(number + 100, blocks).block_hashes[
                blocks // 2 :
            ]
            times[which].append(serve(engines[which], prompt))
    for engine in engines:
        engine.chain.shutdown()
    # Of a machine that does more than this, the faster half is less of the others' doing.
    without, explained = (statistics.quantiles(one[50:], n=4)[0] for one in times)
    return without, explained - without


def main() -> None:
    """Print a line for each length of prompt."""
    with tempfile.TemporaryDirectory() as folder:
        for blocks in (8, 64, 512, 2048):
            without, added = measure(blocks, Path(folder))
            print(
                f"{blocks * TOKENS:6} tokens: {without * 1e6:8.0f} us a request, explaining "
                f"{added * 1e6:+.1f} us ({added / without:+.1%})"
            )


if __name__ == "__main__":
    main()
