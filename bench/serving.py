"""An engine that stands for yours: it serves a trace's requests over a chain.

    python -m bench.serving CHAIN TRACE [--requests N] [--then COMMAND]

It is the engine of the project's tests, with a model that computes nothing but has KV. Tiers,
recording, ghosts and explanations are the real ones. Requests are served one by one, and blocks are
of 4 tokens, whatever the trace says. What the chain logs of its ghosts is printed. With `--then` a
command runs while the engine is still there; $FOLDER is where it explains its requests.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

from spec.chain import ControlSpec, ExplainSpec
from spec.load import load_chain
from tests.support.replay import ReplayEngine, ReplayModel
from tiers.control.engine_control import Control
from tiers.ghosts import ghosts as following
from tiers.lab.replay.model import VOCABULARY
from tiers.traces.open_trace import open_trace

OWN_BLOCKS = 128
"""Of the engine's own cache."""
ANSWER = 3
"""Tokens of each answer."""
MODEL = ReplayModel(width=64)
"""Its blocks have 4 KiB."""


def prompt(blocks: Sequence[int]) -> list[int]:
    """Tokens for a trace's blocks: the same for the same ids, and one token more."""
    size = MODEL.block_tokens
    tokens = [[block % VOCABULARY, block // VOCABULARY, *[0] * (size - 2)] for block in blocks]
    return [token for four in tokens for token in four] + [1]


def serve(engine: ReplayEngine, trace: Path, requests: int) -> str:
    """Serve the first requests of a trace; what came of their tokens."""
    served = tokens = 0
    for request in islice(open_trace(trace), requests):
        asked = prompt(request.blocks)
        engine.generate(asked, max_tokens=ANSWER)
        engine.settle()  # what one request stores is there for the next, on any machine
        served += 1
        tokens += len(asked)
    counts = {name: measures.get("hit_tokens") for name, measures in engine.stats.data.items()}
    hits = {name: n for name, n in counts.items() if n and not isinstance(n, list)}
    said = ", ".join(f"{count:,.0f} from {name}" for name, count in hits.items())
    return f"{served} requests of {tokens:,} prompt tokens were served, {said or 'none from tiers'}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m bench.serving", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("chain", type=Path)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, default=80)
    parser.add_argument("--then", help="a shell command")
    options = parser.parse_args(arguments)
    following.HALF_LIFE = math.inf  # a slow machine's run must not tell of other numbers
    ghosts = logging.getLogger("tiers.ghosts")
    ghosts.setLevel(logging.INFO)
    ghosts.addHandler(handler := logging.StreamHandler(sys.stdout))
    with TemporaryDirectory() as folder:  # its path is short: it holds a socket
        chain = load_chain(options.chain)
        update = {"explain": ExplainSpec(), "control": ControlSpec(folder=Path(folder))}
        chain = chain.model_copy(update=update)
        engine = ReplayEngine(chain, MODEL, num_blocks=OWN_BLOCKS)
        assert engine.connector is not None, "it has a chain"
        control = Control(chain, engine.connector)
        try:
            print(serve(engine, options.trace, options.requests), flush=True)
            return _then(options.then, folder) if options.then else 0
        finally:
            control.close()
            engine.close()
            ghosts.removeHandler(handler)


def _then(command: str, folder: str) -> int:
    """Run a command; its status."""
    return subprocess.run(command, shell=True, env={**os.environ, "FOLDER": folder}).returncode


if __name__ == "__main__":
    sys.exit(main())
