"""One vLLM engine: a job as JSON on stdin, its results to the file that it names.

The job: `engine` (arguments of LLM), `cells` ([tokens of a prompt, prompts at once], ...), `answer`
tokens, `again` (whether cells are asked a third time), `sampled` (prompts of the first cell's
length that are asked besides, one by one, while the engine's thread is looked at), `folder` (of a
disk tier, or None), `turn` (a file to be locked), `alone` (whether no other engine may be asked
meanwhile), `seconds` (that such a one may have then: one that hangs costs the next no more) and
`result`.

Each cell is asked `cold`; then `own`, from the engine's own cache; and `again` when other cells
have taken its room there, from tiers if there are any. `own` and `again` compute the same tokens by
the same kernels: where the blocks that came back are those that were stored, answers and log
probabilities are the same, to the last bit. `other` is the first cell's prompt with another
beginning: a model whose log probabilities do not tell the two apart would not show wrong blocks.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import signal
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from bench.sampling import Sampler, stack

LOWEST, HIGHEST = 3, 1000
"""Of a prompt's tokens."""
WRITTEN_SECONDS = 15.0
"""Of waiting until a disk tier has what it was sent."""
STACKS = 40
"""Places of the engine's thread that are told, those where it was longest."""
EVICTED = 1.2
"""How much is asked before a cell comes again, beside the largest cell."""


def documents(count: int, length: int, seed: int) -> list[list[int]]:
    """Prompts of random tokens, the same for every engine."""
    rng = random.Random(seed)
    return [[rng.randrange(LOWEST, HIGHEST) for _ in range(length)] for _ in range(count)]


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Start the engine, ask it, and return the results."""
    late = threading.Timer(job["seconds"], _end, [job["seconds"]])
    late.daemon = True
    with Path(job["turn"]).open("a") as turn:
        try:
            return _run(job, turn, late)
        finally:
            late.cancel()


def _run(job: dict[str, Any], turn: IO[str], late: threading.Timer) -> dict[str, Any]:
    from vllm import LLM

    if not job["alone"]:
        fcntl.flock(turn, fcntl.LOCK_SH)
    began = time.perf_counter()
    llm = LLM(skip_tokenizer_init=True, disable_log_stats=False, **job["engine"])
    started = time.perf_counter() - began
    if job["alone"]:
        fcntl.flock(turn, fcntl.LOCK_EX)
        late.start()
    config = llm.llm_engine.vllm_config
    for length in {length for length, _ in job["cells"]}:
        _ask(llm, job, documents(1, length, seed=1))  # the first of a length sets things up
    if job["folder"]:
        _wait_until_written(Path(job["folder"]))  # else that is on the account of the first cells
    cells = [_first(llm, job, length, at_once) for length, at_once in job["cells"]]
    cells[0]["other"] = _ask(llm, job, [_other(cells[0])])[0]
    if job["again"]:
        for cell in cells:
            _evict(llm, job, cell)
            if job["folder"]:  # what `_evict` brought to the cpu tier and the disk is there, too
                _wait_until_written(Path(job["folder"]))
            cell["again"] = _ask(llm, job, _prompts(cell))
    sampled = _sampled(llm, job) if job["sampled"] else None
    if job["folder"]:
        _wait_until_written(Path(job["folder"]))
    return {
        "async_scheduling": bool(config.scheduler_config.async_scheduling),
        "runner": "V2" if getattr(config, "use_v2_model_runner", False) else "V1",
        "graphs": str(config.compilation_config.cudagraph_mode),
        "start_seconds": started,
        "cells": cells,
        "sampled": sampled,
    }


def _end(seconds: float) -> None:
    """End this engine with its own processes."""
    print(f"it was asked for {seconds:g} s, and is ended", flush=True)
    os.killpg(0, signal.SIGKILL)


def _prompts(cell: dict[str, Any]) -> list[list[int]]:
    """A cell's, the same for every engine."""
    return documents(cell["at_once"], cell["length"], seed=cell["length"] + cell["at_once"])


def _first(llm: Any, job: dict[str, Any], length: int, at_once: int) -> dict[str, Any]:
    cell: dict[str, Any] = {"length": length, "at_once": at_once}
    prompts = _prompts(cell)
    began = time.perf_counter()
    cell["cold"] = _ask(llm, job, prompts)
    cell["seconds"] = time.perf_counter() - began
    cell["own"] = _ask(llm, job, prompts)
    return cell


def _sampled(llm: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Seconds to the first token of prompts that nobody asked before, by median, and where this
    thread was meanwhile: the engine's, which an engine without processes of its own runs on."""
    (length, _), *_ = job["cells"]
    with Sampler(stack, threading.get_ident()) as looks:
        asked = [_ask(llm, job, [one])[0] for one in documents(job["sampled"], length, seed=4)]
    shares = [*looks.shares().items()][:STACKS]
    return {"ttft": statistics.median(one["ttft"] or 0.0 for one in asked), "stacks": dict(shares)}


def _other(cell: dict[str, Any]) -> list[int]:
    """A cell's first prompt with another beginning."""
    half = cell["length"] // 2
    return [*documents(1, half, seed=2)[0], *_prompts(cell)[0][half:]]


def _evict(llm: Any, job: dict[str, Any], cell: dict[str, Any]) -> None:
    """Let others take a cell's room in the engine's own cache, which has room for the largest cell
    and a little more: the largest first, until they are EVICTED of that."""
    sizes = {(length, at_once): length * at_once for length, at_once in job["cells"]}
    enough = EVICTED * max(sizes.values())
    del sizes[cell["length"], cell["at_once"]]
    for length, at_once in sorted(sizes, key=lambda one: -sizes[one]):
        if enough <= 0:
            return
        _ask(llm, job, _prompts({"length": length, "at_once": at_once}))
        enough -= sizes[length, at_once]


def _wait_until_written(folder: Path) -> None:
    """Return once nothing is written any more below a folder, or after WRITTEN_SECONDS."""
    late, before = time.monotonic() + WRITTEN_SECONDS, -1
    while time.monotonic() < late:
        now = sum(file.stat().st_mtime_ns for file in folder.rglob("*") if file.is_file())
        if now == before:
            return
        before = now
        time.sleep(1.0)


def _ask(llm: Any, job: dict[str, Any], prompts: Sequence[list[int]]) -> list[dict[str, Any]]:
    """Ask these at once; of each its answer, and how it came."""
    from vllm import SamplingParams, TokensPrompt

    params = SamplingParams(
        temperature=0, max_tokens=job["answer"], ignore_eos=True, detokenize=False, logprobs=4
    )
    asked = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
    return [
        {
            "answer": list(output.outputs[0].token_ids),
            "logprobs": [
                {str(token): one.logprob for token, one in place.items()}
                for place in output.outputs[0].logprobs
            ],
            "cached": output.num_cached_tokens or 0,
            "from_tiers": _of_tiers(output),
            "ttft": output.metrics.first_token_latency if output.metrics else None,
        }
        for output in llm.generate(asked, params, use_tqdm=False)
    ]


def _of_tiers(output: Any) -> dict[str, int]:
    """Tokens that each tier loaded, as the connector tells a client."""
    said = getattr(output, "kv_transfer_params", None) or {}
    found: dict[str, int] = said.get("kvtiers", {}).get("cached_tokens", {})
    return found


if __name__ == "__main__":
    given = json.load(sys.stdin)
    Path(given["result"]).write_text(json.dumps(run(given)))
