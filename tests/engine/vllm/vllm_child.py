"""Runs real vLLM engines, each in a process of its own: a job as a line of JSON on stdin, its
results to a file, its exit status as a line on stdout.

The job: `engine` (arguments of LLM), `batches` (each a list of requests that run at once; a
request is `[prompt_token_ids, max_tokens]` and perhaps more, see `Request`), `result` and
`log` (files to write), `env`, and perhaps `serves` (a socket on which the engine is then asked, in
place of batches; see `serve`), `path` (folders with more modules), `abort` (how many
requests of each batch are aborted, at random moments), `preempt` (each batch is one request: after
how many tokens of its answer it is preempted, and the engine's own cache emptied), `before` (for
the number of a batch, or `start`, the function of `damage` that is called before it, and its
arguments), `told` (for the number of a batch, the methods of LLM, `settle`, or functions of
`training` or `live_changes`, that are called before it, or with `preempt` when it is preempted, and
their arguments), `warmed` (how many blocks are loaded into host memory before the first batch),
`settled` (whether each batch begins when all that was stored before is there), `hosts` (2: see
`second_host`), `is_async` (whether the engine is an AsyncLLM) and `steps_in_flight` (2: as by
default on GPUs, see `two_steps_in_flight`).
The result:
per batch and request its tokens, the tokens that came from any cache, and the logits that its
sampling parameters ask for; the tiers' counters, and how the chain explains its requests.

A job with a `module` is a program of ours instead, see `as_program`.

What all jobs import is imported once, which takes longer than a job. Each job is a fork of that,
and so are an engine's own processes, as on GPUs; those of servers' tests are spawned, as on CPUs.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import json
import multiprocessing
import os
import random
import runpy
import signal
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypedDict

from PIL import Image

from tests.engine.vllm import live_changes, second_host, training
from tests.support import damage, packages
from tiers.control.ask_engines import NoAnswer, ask

KERNELS = "register_triton_kernel_overrides"
DIRECTIONS = os.O_RDONLY, os.O_WRONLY, os.O_WRONLY
"""Of a program's pipes."""
SLOW_START = 180.0
"""Seconds after which an engine that has not started says where it is, before its test gives up."""


class Request(TypedDict, total=False):
    """What a request may have beside its prompt's tokens and the length of its answer."""

    image: list[int]
    """The color of an image: three numbers."""
    uuid: str
    """What a client calls the image."""
    sampling: dict[str, Any]
    """More sampling parameters."""
    adapter: str
    """The folder of a LoRA adapter."""
    follows: int
    """The batch whose prompt and answer come before these tokens, in a job with `preempt`."""
    salt: str
    """Its cache salt."""
    embeddings: str
    """The model's weights, whose embeddings of the tokens are sent instead of the tokens."""
    priority: int
    """Lower ones first."""
    more: list[list[int]]
    """What an AsyncLLM is sent after its answer, in parts: each is answered."""


def main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # where some versions print when imported
    import vllm.v1.engine.core
    import vllm.v1.engine.llm_engine
    from vllm.platforms import current_platform

    if current_platform.is_cpu():  # elsewhere a device could be opened, which no fork may share
        import vllm.model_executor.models.llama
        import vllm.v1.worker.cpu_worker
        from vllm import LLM  # noqa: F401
        from vllm.model_executor.models import registry

        import tiers.engine.vllm
        import tiers.engine.vllm_offloading  # noqa: F401

        # Else a new model is looked at in a process that imports vLLM anew.
        registry._run_in_subprocess = lambda look: look()
        with suppress(ImportError):  # not all versions have it
            import vllm.model_executor.layers.quantization.online.base  # noqa: F401
        # Else each engine goes through what all modules have. A platform answers None for a name
        # that its version lacks.
        if (register := getattr(current_platform, KERNELS, None)) is not None:
            register()
            setattr(current_platform, KERNELS, lambda: None)
        with suppress(ImportError):  # else each engine does that, for hundreds of loggers
            from vllm.config.logging import LoggingConfig
            from vllm.logger import configure_logging_if_needed

            configure_logging_if_needed(LoggingConfig())
    packages.read_once()
    # Else an engine, which collects garbage several times, looks at all that each time.
    gc.freeze()
    gc.unfreeze = lambda: None

    for line in iter(sys.stdin.readline, ""):
        job = json.loads(line)
        pipes = [os.open(*one) for one in zip(job.get("pipes", ()), DIRECTIONS, strict=False)]
        if (process := os.fork()) == 0:
            if "module" in job:
                as_program(job, *pipes)
                return
            log = os.open(job["log"], os.O_WRONLY | os.O_CREAT, 0o600)
            for stream in (sys.stdout, sys.stderr):
                os.dup2(log, stream.fileno())
            os.environ.update(job["env"])
            sys.path[:0] = job.get("path", [])
            serve(job) if "serves" in job else run(job)
            leave()
        for one in pipes:
            os.close(one)
        if "serves" in job or "module" in job:
            print(process, file=answers, flush=True)
            continue
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        print(status, file=answers, flush=True)


def leave() -> NoReturn:
    """End this process as multiprocessing ends a fork, such as an engine's on GPUs: without taking
    the modules down, for which the memory of all that is imported would be copied."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def as_program(job: dict[str, Any], stdin: int, stdout: int, status: int) -> None:
    """Run a `module` with its `arguments` as `python -m` does, in a process group of its own, which
    ends with it; `pipes`: its standard input and output, and one that its exit status comes by.
    `errors`: whether they are printed, too."""
    os.setpgid(0, 0)
    if process := os.fork():
        signal.signal(signal.SIGTERM, lambda *_: os.kill(process, signal.SIGTERM))
        os.close(stdin)
        os.close(stdout)
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        os.write(status, str(code).encode())
        os._exit(0)
    os.close(status)
    os.dup2(stdin, 0)
    os.dup2(stdout, 1)
    if job["errors"]:
        os.dup2(stdout, 2)
    sys.stdin = os.fdopen(stdin)
    os.close(stdout)
    os.environ.update(job["env"])
    sys.argv = [job["module"], *job["arguments"]]
    runpy.run_module(job["module"], run_name="__main__", alter_sys=True)


def serve(job: dict[str, Any]) -> None:
    """Answer one test until that ends: each question is a line of JSON, as each answer is.

    `ask`: a request, as of a batch. `settle`: let stores end. `metrics`: the tiers' counters, and
    `total` of others by name.
    """
    from vllm import LLM

    faulthandler.dump_traceback_later(SLOW_START)  # into its log
    llm = LLM(**job["engine"])
    faulthandler.cancel_dump_traceback_later()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(job["serves"])
        listener.listen()
        (test, _) = listener.accept()
    with test, test.makefile("rw") as lines:
        for line in lines:
            print(json.dumps(answered(llm, json.loads(line))), file=lines, flush=True)
    llm.llm_engine.engine_core.shutdown()


def answered(llm: Any, question: dict[str, Any]) -> Any:
    if "ask" in question:
        one = question["ask"]
        lora = adapter(*one)
        output = llm.generate([prompt(*one)], [params(*one)], use_tqdm=False, lora_request=lora)
        return shown(output[0])
    settle(llm, steps_first=True)
    names = question.get("total", ())
    return {"tiers": counters(llm), "total": {name: total(llm, name) for name in names}}


def run(job: dict[str, Any]) -> None:
    from vllm import LLM

    forking: Any = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda method=None: forking
    if is_ahead := job.get("steps_in_flight") == 2:
        two_steps_in_flight()
    before = job.get("before", {})
    if change := before.get("start"):
        (getattr(damage, change[0], None) or getattr(training, change[0]))(*change[1:])
    if job.get("hosts") == 2:
        job["engine"] = second_host.join(job["engine"])
    llm: Any = training.Async(**job["engine"]) if job.get("is_async") else LLM(**job["engine"])
    assert bool(llm.llm_engine.vllm_config.scheduler_config.async_scheduling) == is_ahead
    if "warmed" in job:
        settle(llm, job["warmed"])
    batches = []
    spoken: list[list[int]] = []
    for number, batch in enumerate(job["batches"]):
        if number and job.get("settled"):
            settle(llm)
        if change := before.get(str(number)):
            settle(llm)
            getattr(damage, change[0])(*change[1:])
        told = [partial(tell, llm, *one) for one in job.get("told", {}).get(str(number), ())]
        if told and not job.get("preempt"):
            settle(llm)
            for step in told:
                step()
        batch = [(whole(spoken, *one), *one[1:]) for one in batch]
        requests = [(prompt(*one), params(*one)) for one in batch]
        if job.get("abort"):
            ranks = [one[2]["priority"] if len(one) > 2 else 0 for one in batch]
            batches.append(with_aborts(llm.llm_engine, requests, job["abort"], ranks))
            continue
        if job.get("preempt"):
            (request,) = requests
            batches.append([preempted(llm.llm_engine, *request, job["preempt"], told)])
            spoken.append([*batch[0][0], *batches[-1][0]["tokens"]])
            continue
        prompts, sampling = zip(*requests, strict=True)
        lora = [adapter(*one) for one in batch]
        outputs = llm.generate(
            list(prompts),
            list(sampling),
            use_tqdm=False,
            lora_request=lora if any(lora) else None,
        )
        batches.append([shown(output) for output in outputs])
    settle(llm)
    result = {
        "batches": batches,
        "tiers": counters(llm),
        "preemptions": total(llm, "vllm:num_preemptions"),
        "external_hits": total(llm, "vllm:external_prefix_cache_hits"),
        "drafts": total(llm, "vllm:spec_decode_num_draft_tokens"),
        "drafts_accepted": total(llm, "vllm:spec_decode_num_accepted_tokens"),
        "explained": asked(job, "explain", {"last": 1000}) or [],
        "status": asked(job, "status", {}) or {},
        "running": asked(job, "chain", {}) or {},
    }
    llm.llm_engine.engine_core.shutdown()
    Path(job["result"]).write_text(json.dumps(result))


def two_steps_in_flight() -> None:
    """Let an engine here schedule a step before the last one's output has come, as vLLM does by
    default on GPUs: the CPU's platform takes that back, and this puts it in again."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def checked(config: Any) -> None:
        default = config.scheduler_config.async_scheduling
        check(config)
        config.scheduler_config.async_scheduling = default

    CpuPlatform.check_and_update_config = staticmethod(checked)


def tell(llm: Any, method: str, arguments: dict[str, Any]) -> None:
    """Call a method of LLM, `settle`, or a function of `training` or `live_changes`."""
    steps = {**vars(live_changes), **vars(training), "settle": settle}
    called = partial(steps[method], llm) if method in steps else getattr(llm, method)
    assert called(**arguments) is not False, method


def whole(
    spoken: list[list[int]], tokens: list[int], max_tokens: int, more: Request | None = None
) -> list[int]:
    """All tokens of a prompt, after what was `spoken` in each batch of one request."""
    follows = (more or {}).get("follows")
    return tokens if follows is None else spoken[follows] + tokens


def prompt(tokens: list[int], max_tokens: int, more: Request | None = None) -> Any:
    """What vLLM is asked: tokens, perhaps with an image, or embeddings."""
    from vllm import TokensPrompt
    from vllm.inputs import EmbedsPrompt

    more = more or {}
    if "embeddings" in more:
        from safetensors.torch import load_file

        table = load_file(more["embeddings"])["model.embed_tokens.weight"]
        return EmbedsPrompt(prompt_embeds=table[tokens])
    asked = TokensPrompt(prompt_token_ids=tokens)
    if "image" in more:
        picture = Image.new("RGB", (28, 28), tuple(more["image"]))
        asked["multi_modal_data"] = {"image": picture}
    if "salt" in more:
        asked["cache_salt"] = more["salt"]
    if "uuid" in more:
        asked["multi_modal_uuids"] = {"image": [more["uuid"]]}
    if "more" in more:
        return [asked, *(TokensPrompt(prompt_token_ids=part) for part in more["more"])]
    return asked


def params(tokens: list[int], max_tokens: int, more: Request | None = None) -> Any:
    from vllm import SamplingParams

    sampling = (more or {}).get("sampling", {})
    fixed = {"temperature": 0, "detokenize": False, "ignore_eos": True}
    return SamplingParams(max_tokens=max_tokens, **fixed, **sampling)


def adapter(tokens: list[int], max_tokens: int, more: Request | None = None) -> Any:
    from vllm.lora.request import LoRARequest

    folder = (more or {}).get("adapter")
    number = zlib.crc32(str(folder).encode()) % (1 << 30) + 1
    return LoRARequest(Path(folder).name, number, folder) if folder else None


def settle(llm: Any, warmed: int = 0, opened: str = "", steps_first: bool = False) -> None:
    """Let stores end, each at its tier's deadline: counters come with steps, and a busy machine's
    last stores end after the last request's. Of two steps in flight the second begins some, behind
    that request's answer: then, or with `steps_first`, there is one more. And wait for this many
    `warmed` blocks, and until the tier `opened` is open."""
    from vllm import SamplingParams, TokensPrompt

    late = time.monotonic() + (60 if opened else 30)
    nothing = SamplingParams(max_tokens=1, detokenize=False, ignore_eos=True)
    steps_first |= llm.llm_engine.vllm_config.scheduler_config.async_scheduling
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)  # where it is in this process
    connector = getattr(getattr(core, "scheduler", None), "connector", None)
    is_copying = getattr(connector, "has_pending_push_work", bool)  # vLLM's own connector says so

    def is_over() -> bool:
        tiers = counters(llm).values()
        loaded = sum(tier.get("warmed_blocks", 0) for tier in tiers)
        is_there = loaded >= warmed and (not opened or state(llm, opened) == "open")
        return is_there and not (is_copying() or any(tier.get("storing_jobs") for tier in tiers))

    pause = 0.0
    while time.monotonic() < late and (steps_first or not is_over()):
        steps_first = False
        time.sleep(pause)
        pause = min(0.1, pause + 0.002)  # an engine remembers the last 1,000 requests
        llm.generate([TokensPrompt(prompt_token_ids=[3])], [nothing], use_tqdm=False)


def asked(job: dict[str, Any], verb: str, parameters: dict[str, Any]) -> Any:
    """What this engine answers on its socket; None where its chain has none."""
    try:
        return ask(Path(job["control"]), verb, parameters)[0].content if "control" in job else None
    except NoAnswer:
        return None


def shown(output: Any) -> dict[str, Any]:
    stats = output.metrics
    said = output.outputs[0]
    return {
        "tokens": list(said.token_ids),
        "logits": [[step[token].logprob for token in sorted(step)] for step in said.logprobs or ()],
        "cached": output.num_cached_tokens,
        "params": output.kv_transfer_params,
        "ttft": 0.0 if stats is None else stats.first_token_latency,
    }


def with_aborts(
    engine: Any, requests: list[Any], aborts: int, priorities: Sequence[int]
) -> list[dict[str, Any]]:
    """Add requests while others run, and abort some; an aborted one shows what it had said."""
    rng = random.Random(0)
    results: dict[str, dict[str, Any]] = {}
    names: dict[str, str] = {}
    doomed = {str(i) for i in rng.sample(range(len(requests)), aborts)}
    waiting = list(enumerate(requests))
    while waiting or engine.has_unfinished_requests():
        for _ in range(rng.randrange(4)):
            if waiting:
                number, request = waiting.pop(0)
                name, rank = str(number), priorities[number]
                names[name] = engine.add_request(name, *request, priority=rank) or name
        for output in engine.step():
            results[output.request_id] = shown(output)
        for name in [n for n in doomed & names.keys() if rng.random() < 0.1]:
            doomed.discard(name)
            engine.abort_request([name])
    nothing: dict[str, Any] = {"tokens": [], "cached": 0, "ttft": 0.0}
    return [results.get(str(number), nothing) for number in range(len(requests))]


def preempted(
    engine: Any, prompt: Any, params: Any, after: int, told: Sequence[Callable[[], None]] = ()
) -> dict[str, Any]:
    """Run a request alone, which is preempted once, just after what is `told` then."""
    chunks = watched(engine.engine_core.engine_core.scheduler)
    engine.add_request("0", prompt, params)
    result: dict[str, Any] = {"tokens": []}
    due = True
    while engine.has_unfinished_requests():
        for output in engine.step():
            result = shown(output)
        if due and len(result["tokens"]) >= after:
            due = False
            for step in told:
                step()
            assert engine.reset_prefix_cache(reset_running_requests=True)
    return {**result, "chunks": chunks}


def watched(scheduler: Any) -> list[tuple[int, int]]:
    """What a scheduler computes from now on of the only request: first token and end of each chunk
    of more than a token."""
    chunks: list[tuple[int, int]] = []
    schedule = type(scheduler).schedule

    def noting(*args: Any, **more: Any) -> Any:
        output = schedule(scheduler, *args, **more)
        for name, count in output.num_scheduled_tokens.items():
            # Computed tokens are counted on as soon as a step is scheduled.
            end = scheduler.requests[name].num_computed_tokens
            if count > 1:
                chunks.append((end - count, end))
        return output

    scheduler.schedule = noting
    return chunks


def counters(llm: Any) -> dict[str, dict[str, float]]:
    """The chain's counters as vLLM's metrics show them: `{tier: {counter: value}}`."""
    prefix = "vllm:kvtiers_"
    tiers: dict[str, dict[str, float]] = {}
    for metric in llm.get_metrics():
        if metric.name.startswith(prefix) and hasattr(metric, "value"):
            name = metric.name.removeprefix(prefix)
            if "state" in metric.labels:
                name += f" {metric.labels['state']}"
            entry = metric.labels.get("tier") or "tenant " + metric.labels["tenant"]
            tiers.setdefault(entry, {})[name] = metric.value
    return tiers


def state(llm: Any, tier: str) -> str:
    """That of a tier, as the metrics show it; empty before they do."""
    states = (one for one in llm.get_metrics() if one.name == "vllm:kvtiers_tier_state")
    found = [one.labels["state"] for one in states if one.labels["tier"] == tier and one.value]
    return found[0] if found else ""


def total(llm: Any, name: str) -> float:
    """One of the engine's own counters, or the sum of a histogram."""
    found = [metric for metric in llm.get_metrics() if metric.name == name]
    return sum(float(one.value if hasattr(one, "value") else one.sum) for one in found)


if __name__ == "__main__":
    main()
