"""One vLLM engine: a job as JSON on stdin, its results to the file that it names.

The job: `engine` (arguments of LLM), `prompts`, `tokens` of each, `answer` tokens, `at_once` (how
many more are asked together), `loads` (whether requests may load from tiers) and `result`. The
result: of each prompt, asked alone and once more when the others have taken its room, the answer,
the tokens that came from a cache, and seconds to the first token; and tokens a second of those that
are asked at once, none of which was asked before.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LOWEST, HIGHEST = 3, 1000
"""Of a prompt's tokens."""


def documents(count: int, length: int, seed: int) -> list[list[int]]:
    """Prompts of random tokens, the same for every engine."""
    rng = random.Random(seed)
    return [[rng.randrange(LOWEST, HIGHEST) for _ in range(length)] for _ in range(count)]


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Start the engine, ask it, and return the results."""
    from vllm import LLM

    llm = LLM(skip_tokenizer_init=True, disable_log_stats=False, **job["engine"])
    config = llm.llm_engine.vllm_config
    prompts = documents(job["prompts"], job["tokens"], seed=0)
    _ask(llm, job, documents(1, job["tokens"], seed=1))  # the first of all sets things up
    rounds = [[_ask(llm, job, [prompt])[0] for prompt in prompts] for _ in range(2)]
    crowd = documents(job["at_once"], job["tokens"], seed=2)
    began = time.perf_counter()
    together = _ask(llm, job, crowd)
    seconds = time.perf_counter() - began
    return {
        "async_scheduling": bool(config.scheduler_config.async_scheduling),
        "runner": "V2" if getattr(config, "use_v2_model_runner", False) else "V1",
        "rounds": rounds,
        "together": [one["answer"] for one in together],
        "tokens_per_second": len(crowd) * (job["tokens"] + job["answer"]) / seconds,
    }


def _ask(llm: Any, job: dict[str, Any], prompts: Sequence[list[int]]) -> list[dict[str, Any]]:
    """Ask these at once; of each its answer, and how it came."""
    from vllm import SamplingParams, TokensPrompt

    extra = {} if job["loads"] else {"kv_transfer_params": {"kvtiers": {"max_load_tokens": 0}}}
    params = SamplingParams(
        temperature=0,
        max_tokens=job["answer"],
        ignore_eos=True,
        detokenize=False,
        extra_args=extra or None,
    )
    asked = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
    return [
        {
            "answer": list(output.outputs[0].token_ids),
            "cached": output.num_cached_tokens or 0,
            "ttft": output.metrics.first_token_latency if output.metrics else None,
        }
        for output in llm.generate(asked, params, use_tqdm=False)
    ]


if __name__ == "__main__":
    given = json.load(sys.stdin)
    Path(given["result"]).write_text(json.dumps(run(given)))
