"""What recording the traffic costs an engine: its throughput with and without, and time per line.

    python -m bench.recording [--requests 60] [--blocks 250] [--rounds 9] [--json F]

Two engines of the project's tests, one of which records, serve the same prompts in turn over a cpu
tier. What is told is the processor time of all their threads, which others' load on the machine
changes little, and how much of it is the recorder's, on the scheduler's thread and on its own.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from spec.chain import RecordSpec
from spec.load import load_chain
from tiers.contract.protocols import Request
from tiers.lab.replay import ReplayEngine, ReplayModel
from tiers.traces.recorder import EndedRequest, Recording, RecordWriter

MODEL = ReplayModel(width=64)
HASH_BYTES = 32
WATCHED = ("arrived", "ended")
"""What the scheduler's thread calls of the recorder for a request."""


def open_engine(blocks: int, trace: Path | None) -> ReplayEngine:
    """An engine with room for 4 such requests of its own, and for 64 in the cpu tier."""
    chain = {
        "version": 1,
        "load_when": "always",
        "tiers": [{"type": "cpu", "capacity": 64 * blocks * 4096}],
    }
    record = {} if trace is None else {"record": {"path": str(trace)}}
    return ReplayEngine(load_chain(chain | record), MODEL, num_blocks=4 * blocks + 64)


def serve(engine: ReplayEngine, prompts: Sequence[Sequence[int]]) -> float:
    """Processor seconds to serve them, four at once."""
    began = time.process_time()
    for at in range(0, len(prompts), 4):
        for prompt in prompts[at : at + 4]:
            engine.add(prompt, max_tokens=2)
        engine.run()
    return time.process_time() - began


def throughput(requests: int, blocks: int, rounds: int, folder: Path) -> dict[str, float]:
    """Seconds of a round without and with recording, medians, the median of their ratios, and
    seconds of the scheduler's thread for a request."""
    rng = random.Random(0)
    size = blocks * MODEL.block_tokens
    chats = [[rng.randrange(1000) for _ in range(size)] for _ in range(requests)]
    engines = open_engine(blocks, None), open_engine(blocks, folder / "trace")
    pairs, spent = [], Spent()
    assert engines[1].connector is not None
    for watcher in engines[1].connector._observers:
        vars(watcher).update({name: spent.on(getattr(watcher, name)) for name in WATCHED})
    for number in range(rounds + 1):
        prompts = rng.sample(chats, len(chats))
        both = [(one, serve(engines[one], prompts)) for one in ((0, 1), (1, 0))[number % 2]]
        pairs.append([seconds for _, seconds in sorted(both)])
    pairs = pairs[1:]  # the first one only warms
    recorded = engines[1].stats.data.get("(chain)", {}).get("recorded_requests", 0)
    for engine in engines:
        engine.settle()
        engine.close()
    assert recorded, "nothing was recorded"
    return {
        "without": median(one for one, _ in pairs),
        "with": median(other for _, other in pairs),
        "slower": median(other / one for one, other in pairs) - 1,
        "scheduler": spent.seconds / (requests * (rounds + 1)),
    }


class Spent:
    """Sums the processor time that a thread spends in calls."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def on(self, call: Callable[[Request], None]) -> Callable[[Request], None]:
        """The same call, timed."""

        def timed(request: Request) -> None:
            began = time.thread_time()
            call(request)
            self.seconds += time.thread_time() - began

        return timed


def line_seconds(blocks: int, lines: int, folder: Path) -> float:
    """Processor time of the writer for a line."""
    rng = random.Random(0)
    hashes = [rng.randbytes(HASH_BYTES) for _ in range(blocks)]
    writer = RecordWriter(Recording(RecordSpec(path=folder / "lines"), 16, 16))
    writer.open()
    ended = EndedRequest(0.0, 0.0, blocks * 16 + 1, 2, hashes, "")
    began = time.process_time()
    for _ in range(lines):
        writer.write(ended)
    seconds = time.process_time() - began
    writer.close()
    assert writer.recorded == lines
    return seconds / lines


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m bench.recording", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--blocks", type=int, default=250, help="of each prompt")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        place = Path(folder)
        line = line_seconds(options.blocks, 2000, place)
        said = throughput(options.requests, options.blocks, options.rounds, place)
    a_request = said["without"] / options.requests
    scheduler = said["scheduler"]
    print(f"a request of {options.blocks} blocks takes the engine {a_request * 1e3:.1f} ms")
    share = scheduler / a_request
    print(f"to record it takes the scheduler's thread {scheduler * 1e6:.0f} us, {share:.2%}")
    print(f"and the recorder's own {line * 1e6:.0f} us, {line / a_request:.2%}")
    print(f"with recording a round takes {said['slower']:+.2%}")
    if options.json is not None:
        options.json.write_text(json.dumps(said | {"line": line}) + "\n")


if __name__ == "__main__":
    main()
