"""Time to the first token of the first requests after a restart, with `warm` and without.

    python -m bench.restart [--documents N] [--tokens N] [--quiet 0 2] [--rounds N] [--json FILE]

A real vLLM with a small model of random weights, over a cpu tier that has room for all documents
and a disk tier that is read past the page cache. In each round an engine that has served all
documents serves them once more, then one that has just begun serves them, with `warm` and without,
after so many quiet seconds. All ask one by one; the engine's own cache has room for two. Every
answer must be that of the first engine, which computed it.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from bench import engine_models
from bench.e2e import BLOCK_TOKENS
from bench.report import machine
from bench.serve import Engine
from tiers.engine.plugin import transfer_config

MODEL = {
    **engine_models.SMALL,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
"""8 KiB of KV a token."""


class Restarts:
    """Engines over one disk tier, one at a time."""

    def __init__(self, folder: Path, documents: int, tokens: int) -> None:
        self._folder = folder
        self._tokens = tokens
        rng = random.Random(0)
        self._prompts = [[rng.randrange(3, 1000) for _ in range(tokens)] for _ in range(documents)]
        self._own_blocks = 2 * (tokens // BLOCK_TOKENS + 2) + 2
        self._model = engine_models.write_model(folder / "model", MODEL, "float32")
        self.answers: list[list[list[int]]] = []
        """Of all documents, in each pass."""

    def _engine(self, warm: bool) -> Engine:
        chain: dict[str, Any] = {
            "version": 1,
            "tiers": [
                {"type": "cpu", "capacity": "2GiB"},
                {
                    "type": "disk",
                    "path": str(self._folder / "kv"),
                    "capacity": "4GiB",
                    "io": "direct",
                },
            ],
            **({"warm": {}} if warm else {}),
        }
        file = self._folder / "chain.yaml"
        file.write_text(yaml.safe_dump(chain))
        return Engine(
            {},
            model=str(self._model),
            skip_tokenizer_init=True,
            dtype="float32",
            block_size=BLOCK_TOKENS,
            max_model_len=self._tokens + 2 * BLOCK_TOKENS,
            num_gpu_blocks_override=self._own_blocks,
            enforce_eager=True,
            kv_transfer_config=transfer_config(file),
        )

    def _pass(self, engine: Engine) -> tuple[float, float]:
        """Milliseconds to the first token, the median over the documents; share of tokens that
        were not computed."""
        answers = [engine.ask([prompt], 1) for prompt in self._prompts]
        self.answers.append([answer.tokens for answer in answers])
        cached = sum(answer.cached_tokens for answer in answers)
        every = sum(map(len, self._prompts))
        return 1e3 * statistics.median(a.first_token_seconds for a in answers), cached / every

    def served(self) -> tuple[float, float]:
        """An engine that has served all documents."""
        with closing(self._engine(warm=False)) as engine:
            self._pass(engine)
            return self._pass(engine)

    def begun(self, warm: bool, quiet: float) -> tuple[float, float]:
        """An engine that began this many seconds ago."""
        with closing(self._engine(warm)) as engine:
            engine.ask([[5, 6, 7]], 1)
            time.sleep(quiet)
            return self._pass(engine)


def run(
    folder: Path, documents: int, tokens: int, quiet: Sequence[float], rounds: int
) -> dict[str, Any]:
    """The medians over the rounds, and all figures."""
    restarts = Restarts(folder, documents, tokens)
    found: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for _ in range(rounds):
        found["has served"].append(restarts.served())
        for seconds in quiet:
            for warm, kind in ((True, "warm"), (False, "without")):
                made = restarts.begun(warm, seconds)
                found[f"{kind}, after {seconds:g} s"].append(made)
    base = statistics.median(ms for ms, _ in found["has served"])
    rows = [
        {
            "engine": kind,
            "p50_ttft_ms": statistics.median(ms for ms, _ in figures),
            "of_served": statistics.median(ms for ms, _ in figures) / base,
            "not_computed": statistics.median(share for _, share in figures),
            "rounds_ms": [ms for ms, _ in figures],
        }
        for kind, figures in found.items()
    ]
    return {
        "machine": machine(),
        "documents": documents,
        "tokens": tokens,
        "equal": all(answers == restarts.answers[0] for answers in restarts.answers),
        "rows": rows,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: 1 where an answer is another."""
    parser = argparse.ArgumentParser(prog="python -m bench.restart", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--documents", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=1000, help="of each document")
    parser.add_argument("--quiet", type=float, nargs="+", default=[0.0, 2.0], help="seconds")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="measure the disk here")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    options = parser.parse_args(arguments)
    with TemporaryDirectory(prefix="kvtiers-restart-", dir=options.folder) as made:
        found = run(Path(made), options.documents, options.tokens, options.quiet, options.rounds)
    print(f"{'engine':<22} {'p50 TTFT':>10} {'of served':>10} {'not computed':>13}")
    for row in found["rows"]:
        print(
            f"{row['engine']:<22} {row['p50_ttft_ms']:>7.1f} ms {row['of_served']:>9.2f}x "
            f"{row['not_computed']:>12.0%}"
        )
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    print("all answers " + ("are equal" if found["equal"] else "DIFFER"))
    return 0 if found["equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
