"""A real vLLM engine in a process of its own, for the suite e2e: `python -m bench.serve`.

Reads arguments of `vllm.LLM` as one line of JSON, then one command a line: a list of prompts (token
ids) to answer at once, how many tokens each, whether to empty the prefix cache before, which tiers
may serve them, whether they are stored, and the connector, of an engine that has several
(`bench.swapped`), and transfer parameters. Answers each with a line: seconds it took, seconds to
the first token, the mean of the prompts, tokens that were not computed but cached, by the engine or
below it, the seconds of each step but the first, of the last that ended, its tokens and the
transfer parameters that come with it, the bytes that NIXL has pulled since the engine began, and,
where a connector was named, the seconds of its scheduler hooks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
}

SOON = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
"""The environment of an engine that starts soon, which is all that a smoke run is about, and whose
scheduler and worker are in one process."""
SWAPPED: dict[str, Any] = {
    "scheduler_cls": "bench.swapped.SwappedScheduler",
    "worker_extension_cls": "bench.swapped.SwappedWorker",
}
"""Arguments of an engine whose connector each request names."""


class Answered(NamedTuple):
    """How long a batch of prompts took."""

    seconds: float
    first_token_seconds: float
    cached_tokens: int
    step_seconds: list[float]
    tokens: list[int]
    transfer: dict[str, Any] | None
    pulled_bytes: float
    hook_seconds: dict[str, float]
    """By scheduler hook, of the connector that was named."""


def _binding() -> str:
    """All cores but one compute. By itself, vLLM for CPU leaves one core more to the rest where
    there is a connector, and none where that would be all: engines could not be compared."""
    cores = sorted(os.sched_getaffinity(0))
    return ",".join(map(str, cores[: max(1, len(cores) - 1)]))


class Engine:
    """The other end: starts an engine and asks it. Its log is dropped."""

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
        connector: str = "",
        transfer: Mapping[str, Any] | None = None,
    ) -> Answered:
        """Answer prompts at once. `forget`: empty the engine's own prefix cache first. `tiers`:
        those that may serve them; None: all. `store`: in the tiers. `connector`: of an engine
        with `SWAPPED`, which. `transfer`: parameters for the connectors.

        Raises RuntimeError when the engine has ended.
        """
        limits = {"tiers": tiers, "store": store}
        self._tell(
            {
                "prompts": prompts,
                "max_tokens": max_tokens,
                "forget": forget,
                "limits": limits,
                "connector": connector,
                "transfer": dict(transfer or {}),
            }
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


def _answer(engine: Any, prompts: Sequence[Any], params: Any) -> tuple[list[Any], list[float]]:
    """Answer prompts at once: what vLLM says of each at its end, and when each step ended."""
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
    outputs: list[Any] = []
    ends: list[float] = []
    while engine.has_unfinished_requests():
        outputs += [output for output in engine.step() if output.finished]
        ends.append(time.perf_counter())
    return outputs, ends


def _pulled(llm: Any) -> float:
    name = "vllm:nixl_bytes_transferred"
    return float(sum(metric.sum for metric in llm.get_metrics() if metric.name == name))


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
                extra_args={
                    "kv_transfer_params": {"kvtiers": job["limits"], **job["transfer"]},
                    "connector": job["connector"],
                },
            )
            if job["connector"]:
                llm.collective_rpc("use_connector", args=(job["connector"],))
            while job["forget"] and not llm.reset_prefix_cache():
                time.sleep(0.01)
            began = time.perf_counter()
            outputs, ends = _answer(llm.llm_engine, job["prompts"], params)
            first = [output.metrics.first_token_latency for output in outputs]
            cached = sum(output.num_cached_tokens or 0 for output in outputs)
            steps = [after - before for before, after in pairwise(ends)]
            last = list(outputs[-1].outputs[0].token_ids), outputs[-1].kv_transfer_params
            hooks = llm.collective_rpc("take_hook_times")[0] if job["connector"] else {}
            means = ends[-1] - began, sum(first) / len(first)
            answers.write(json.dumps((*means, cached, steps, *last, _pulled(llm), hooks)) + "\n")
            answers.flush()
        llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
