"""A real vLLM engine in a process of its own, for the suite e2e: `python -m bench.serve`.

Reads arguments of `vllm.LLM` as one line of JSON, then one command a line: a list of prompts (token
ids) to answer at once, how many tokens each, whether to empty the prefix cache before, which tiers
may serve them, and whether they are stored. Answers each with a line: seconds it took, seconds to
the first token, the mean of the prompts, and tokens that were not computed but cached, by the
engine or below it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn",
}


class Answered(NamedTuple):
    """How long a batch of prompts took."""

    seconds: float
    first_token_seconds: float
    cached_tokens: int


def _binding() -> str:
    """All cores but one compute. By itself, vLLM for CPU leaves one core more to the rest where
    there is a connector, and none where that would be all: engines could not be compared."""
    cores = sorted(os.sched_getaffinity(0))
    return ",".join(map(str, cores[: max(1, len(cores) - 1)]))


class Engine:
    """The other end: starts an engine and asks it. Its log goes to standard error."""

    def __init__(self, environment: dict[str, str], **engine_args: Any) -> None:
        """`environment`: of the engine's process, where the caller's own does not say more."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={
                **_ENVIRONMENT,
                "VLLM_CPU_OMP_THREADS_BIND": _binding(),
                **environment,
                **os.environ,
            },
            text=True,
        )
        self._tell(engine_args)

    def ask(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        forget: bool = False,
        tiers: Sequence[str] | None = None,
        store: bool = True,
    ) -> Answered:
        """Answer prompts at once. `forget`: empty the engine's own prefix cache first. `tiers`:
        those that may serve them; None: all. `store`: in the tiers.

        Raises RuntimeError when the engine has ended.
        """
        limits = {"tiers": tiers, "store": store}
        self._tell(
            {"prompts": prompts, "max_tokens": max_tokens, "forget": forget, "limits": limits}
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the engine ended; run `python -m bench.serve` by hand to see why")
        return Answered(*json.loads(line))

    def _tell(self, what: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """End the engine."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()


def main() -> None:
    """Serve until standard input ends."""
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        from vllm import LLM, SamplingParams

        llm = LLM(**json.loads(sys.stdin.readline()), disable_log_stats=False)
        for line in sys.stdin:
            job = json.loads(line)
            params = SamplingParams(
                temperature=0.0,
                max_tokens=job["max_tokens"],
                ignore_eos=True,
                detokenize=False,
                extra_args={"kv_transfer_params": {"kvtiers": job["limits"]}},
            )
            while job["forget"] and not llm.reset_prefix_cache():
                time.sleep(0.01)
            prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
            began = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - began
            first = [output.metrics.first_token_latency for output in outputs]
            cached = sum(output.num_cached_tokens or 0 for output in outputs)
            answers.write(json.dumps([seconds, sum(first) / len(first), cached]) + "\n")
            answers.flush()
        llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
