"""One engine of the demo, in a process of its own: `python -m bench.demo.demo_engine`.

Reads an `EngineJob` as JSON from standard input and writes JSON events to standard output, one a
line: `ready` once the engine is warm, `answered` for each measured prompt, `closed` when the engine
is shut down and its tiers have stored the blocks that they took. All other output of the engine
is on standard error.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from typing import IO, Any, TypedDict

LOADED_TOKENS = "vllm:kvtiers_loaded_tokens"
SHUTDOWN_SECONDS = 60
"""How long the engine may take to shut down; its tiers use it to finish their stores."""


class EngineJob(TypedDict):
    """The work of one engine.

    `engine_args`: of `vllm.LLM`. `salt`: part of every block's key, so that a run never meets
    blocks of another. Every phase asks all `conversations`, each a list of chat messages.
    """

    engine_args: dict[str, Any]
    salt: str
    max_tokens: int
    warm_up: list[dict[str, str]]
    conversations: list[list[dict[str, str]]]
    phases: list[str]


class Answered(TypedDict):
    """One measured request. `by_tier`: prompt tokens loaded from each tier; `local_tokens`: those
    found in the engine's own cache; `ttft_s`: seconds to the first token; `tokens`: the answer."""

    phase: str
    prompt_tokens: int
    local_tokens: int
    by_tier: dict[str, int]
    ttft_s: float
    tokens: list[int]


class DemoEngine:
    """A vLLM engine that answers one chat at a time, greedily."""

    def __init__(self, job: EngineJob) -> None:
        from vllm import LLM, SamplingParams

        self._llm = LLM(**job["engine_args"], disable_log_stats=False)
        self._tokenizer = self._llm.get_tokenizer()
        self._sampling = SamplingParams(temperature=0.0, max_tokens=job["max_tokens"])
        self._salt = job["salt"]

    def ask(self, phase: str, messages: list[dict[str, str]]) -> Answered:
        """Answer one chat, with nothing else going on."""
        prompt = {"prompt_token_ids": self._tokenize(messages), "cache_salt": self._salt}
        before = self._loaded()
        (output,) = self._llm.generate([prompt], self._sampling, use_tqdm=False)
        by_tier = dict(self._loaded() - before)
        return Answered(
            phase=phase,
            prompt_tokens=len(output.prompt_token_ids),
            local_tokens=output.num_cached_tokens - sum(by_tier.values()),
            by_tier=by_tier,
            ttft_s=output.metrics.first_token_latency,
            tokens=list(output.outputs[0].token_ids),
        )

    def close(self) -> None:
        """Shut the engine down as a server does, so that its tiers drain their queues."""
        self._llm.llm_engine.engine_core.shutdown(timeout=SHUTDOWN_SECONDS)

    def _tokenize(self, messages: list[dict[str, str]]) -> list[int]:
        if self._tokenizer.chat_template is None:
            text = "\n\n".join(message["content"] for message in messages)
            return list(self._tokenizer.encode(text))
        text = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _loaded(self) -> Counter[str]:
        loaded: Counter[str] = Counter()
        for metric in self._llm.get_metrics():
            if metric.name == LOADED_TOKENS:
                loaded[metric.labels["tier"]] += metric.value
        return loaded


def work(job: EngineJob, events: IO[str]) -> None:
    """Run one engine through its phases."""

    def report(event: str, **fields: Any) -> None:
        events.write(json.dumps({"event": event, **fields}) + "\n")
        events.flush()

    engine = DemoEngine(job)
    engine.ask("warm-up", job["warm_up"])
    report("ready")
    for phase in job["phases"]:
        for messages in job["conversations"]:
            report("answered", **engine.ask(phase, messages))
    engine.close()
    report("closed")


def main() -> None:
    """Take standard output for events before an engine can print to it."""
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as events:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        work(json.load(sys.stdin), events)


if __name__ == "__main__":
    main()
