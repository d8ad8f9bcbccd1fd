"""Runs a real vLLM engine in a process of its own: a job as JSON on stdin, its results to a file.

The job: `engine` (arguments of LLM), `batches` (each a list of requests that run at once; a
request is `[prompt_token_ids, max_tokens]`), `result` (where to write). The result: per batch and
request its tokens and the tokens that came from any cache, and the tiers' counters at the end.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    job = json.load(sys.stdin)
    from vllm import LLM, SamplingParams, TokensPrompt

    llm = LLM(**job["engine"])
    batches = []
    for batch in job["batches"]:
        params = [
            SamplingParams(
                max_tokens=max_tokens,
                temperature=0,
                detokenize=False,
                ignore_eos=True,
                logprobs=0,
            )
            for _, max_tokens in batch
        ]
        prompts = [TokensPrompt(prompt_token_ids=tokens) for tokens, _ in batch]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        batches.append(
            [
                {"tokens": list(o.outputs[0].token_ids), "cached": o.num_cached_tokens}
                for o in outputs
            ]
        )
    result = {"batches": batches, "tiers": counters(llm), "preemptions": preemptions(llm)}
    llm.llm_engine.engine_core.shutdown()
    Path(job["result"]).write_text(json.dumps(result))


def counters(llm: Any) -> dict[str, dict[str, float]]:
    """The chain's counters as vLLM's metrics show them: `{tier: {counter: value}}`."""
    prefix = "vllm:kvtiers_"
    tiers: dict[str, dict[str, float]] = {}
    for metric in llm.get_metrics():
        if metric.name.startswith(prefix):
            name = metric.name.removeprefix(prefix)
            tiers.setdefault(metric.labels["tier"], {})[name] = metric.value
    return tiers


def preemptions(llm: Any) -> float:
    """How often the engine preempted a request."""
    return sum(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions")


if __name__ == "__main__":
    main()
