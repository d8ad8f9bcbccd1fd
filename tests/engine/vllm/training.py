"""What training loops do to a running vLLM engine, in the process of a job of `vllm_child`."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.support.damage import plain_linears, replace


def checkpoint(path: str) -> dict[str, torch.Tensor]:
    """The weights in a model's folder."""
    return load_file(Path(path) / "model.safetensors")


def train_in_place(llm: Any, path: str) -> None:
    """Load new weights as a trainer in the engine's own process does: one parameter at a time."""
    model = llm.llm_engine.model_executor.driver_worker.model_runner.model
    for name, weights in checkpoint(path).items():
        model.load_weights([(name, weights)])


def copy_in_place(llm: Any, path: str) -> None:
    """Copy new weights over those of an engine of this process, and tell nobody."""
    copy_parameters(llm.llm_engine.model_executor.driver_worker, path)


def copy_parameters(worker: Any, path: str) -> None:
    """On a worker: write what loading gives another model of the class into each parameter."""
    from vllm.model_executor.model_loader import get_model_loader

    model = worker.get_model()
    before = {name: one.data for name, one in model.named_parameters()}
    for one in model.parameters():
        one.data = one.data.clone()  # so that loading leaves the engine's own memory as it is
    loader = get_model_loader(worker.vllm_config.load_config)
    type(model).load_weights(model, checkpoint(path).items())
    del loader
    for name, one in model.named_parameters():
        before[name].copy_(one.data)
        one.data = before[name]


def transfer(llm: Any, path: str) -> None:
    """Update the weights as vLLM's own weight transfer does, which resets nothing."""
    llm.init_weight_transfer_engine({"init_info": {}})
    llm.start_weight_update()
    llm.update_weights({"update_info": {"path": path}})
    llm.finish_weight_update()


def transfer_from_folders() -> None:
    """Let this process have a backend of weight transfer that needs no GPU: `folders`."""
    plain_linears()
    from dataclasses import dataclass

    from vllm.distributed.weight_transfer import base
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    @dataclass
    class Init(base.WeightTransferInitInfo):  # type: ignore[misc]
        pass

    @dataclass
    class Update(base.WeightTransferUpdateInfo):  # type: ignore[misc]
        path: str

    class Folders(base.WeightTransferEngine):  # type: ignore[misc]
        init_info_cls, update_info_cls = Init, Update

        def init_transfer_engine(self, init_info: Any) -> None: ...

        def start_weight_update(self) -> None: ...

        def finish_weight_update(self) -> None: ...

        def shutdown(self) -> None: ...

        def update_weights(self, update_info: dict[str, Any]) -> None:
            self.receive_weights(self.parse_update_info(update_info))

        def receive_weights(self, update_info: Any) -> None:
            self.model.load_weights(checkpoint(update_info.path).items())

    WeightTransferEngineFactory.register_engine("folders", Folders)


def turn(worker: Any) -> None:
    """On a worker: change what no look at the weights sees, the table of rotary embeddings."""
    for name, buffer in worker.get_model().named_buffers():
        if name.endswith("cos_sin_cache"):
            buffer.copy_(buffer.flip(0))


def turn_in_place(llm: Any) -> None:
    """Change an engine of this process so that nothing but a reset can tell."""
    llm.collective_rpc(turn)


def change_under_a_request(llm: Any, asked: list[int], path: str = "", **more: bool) -> bool:
    """Change the weights while a request runs, so that the reset that follows is refused; the
    request then runs on to its end. Without a `path` they stay as they are, and the reset may find
    the request without blocks."""
    from vllm import SamplingParams, TokensPrompt

    params = SamplingParams(max_tokens=40, temperature=0, detokenize=False, ignore_eos=True)
    engine = llm.llm_engine
    engine.add_request("runs on", TokensPrompt(prompt_token_ids=asked), params)
    for _ in range(8):
        engine.step()
    if path:
        train_in_place(llm, path)
    was_reset = llm.reset_prefix_cache(**more)
    while engine.has_unfinished_requests():
        engine.step()
    return not (path and was_reset)


def sleep_under_a_load(llm: Any, asked: list[int]) -> bool:
    """Have the worker of an engine of this process sleep, as trainers do that call it themselves,
    while a load is about to copy; False: it copies after that."""
    from vllm import SamplingParams, TokensPrompt
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from tiers.connector.worker.loading import Loading

    loading: Any = Loading
    load, begun, awake = loading._load_items, threading.Event(), threading.Event()

    def later(*args: Any) -> None:
        begun.set()
        assert awake.wait(60)
        load(*args)

    loading._load_items = later
    engine = llm.llm_engine
    params = SamplingParams(max_tokens=8, temperature=0, detokenize=False, ignore_eos=True)
    engine.add_request("sleeps", TokensPrompt(prompt_token_ids=asked), params)
    engine.step()
    assert begun.wait(60), "it loads nothing"
    llm.collective_rpc("sleep", kwargs={"level": 1})
    paged = engine.model_executor.driver_worker.model_runner.kv_caches
    before = [one.clone() for one in paged]
    awake.set()
    for tier in get_kv_transfer_group().children:
        for _, future in tier._loading._loads:
            future.result()
    pairs = zip(before, paged, strict=True)
    is_untouched = all(
        torch.equal(then.view(torch.int32), now.view(torch.int32)) for then, now in pairs
    )
    loading._load_items = load
    while engine.has_unfinished_requests():
        engine.step()
    return is_untouched


def lose(worker: Any) -> None:
    """On a worker: what the memory of paged KV that was taken away is when it is given back."""
    for layer in worker.model_runner.kv_caches:
        layer.zero_()


def sleep_past(llm: Any) -> None:
    """Have the workers sleep and wake past the engine, which keeps its cache of what is gone. The
    CPU's worker ignores it."""
    llm.collective_rpc("sleep", kwargs={"level": 1})
    llm.collective_rpc(lose)
    llm.collective_rpc("wake_up")


def raise_under_a_load(llm: Any, asked: list[int]) -> bool:
    """Have a step raise that orders a load, before the worker has it, and go on with the engine;
    False: the request never ends."""
    engine = llm.llm_engine
    executor = engine.model_executor
    execute = executor.execute_model

    def execute_model(*args: Any, **kwargs: Any) -> Any:
        executor.execute_model = execute
        raise MemoryError("there is none for the step")

    ask(engine, "waits", asked, 8)
    executor.execute_model = execute_model
    with suppress(MemoryError):
        engine.step()
    assert executor.execute_model is execute, "no step has raised"
    end(engine)
    return not engine.has_unfinished_requests()


def raise_behind_a_load(llm: Any, asked: list[int], where: str) -> bool:
    """Have a step raise whose end says that a load has ended (`where`: logits), or that begins one
    (forward), on the worker of this process, and go on with the engine; False: the request that
    loads never ends."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    engine, connector = llm.llm_engine, get_kv_transfer_group()
    runner = engine.model_executor.driver_worker.model_runner
    owner, name = runner.model, "forward"
    if where == "logits":
        # Model Runner V2 asks for what has ended behind the logits, and last of all.
        behind = getattr(runner, "kv_connector", None)
        owner, name = (behind, "post_forward") if behind else (runner.model, "compute_logits")
    call, results = getattr(owner, name), connector.get_transfer_results
    has_ended, has_raised = threading.Event(), threading.Event()

    def noted(*args: Any) -> Any:
        found = results(*args)
        if found.finished_recving:
            has_ended.set()
        return found

    def loads() -> bool:
        orders = getattr(connector._metadata, "metadata", ())
        return any(part.reqs_to_load for part in orders)

    def raising(*args: Any, **more: Any) -> Any:
        found = call(*args, **more)
        if not has_raised.is_set() and (has_ended.is_set() if where == "logits" else loads()):
            has_raised.set()
            raise MemoryError("there is none for the step")
        return found

    connector.get_transfer_results = noted
    setattr(owner, name, raising)
    ask(engine, "runs", asked[:20][::-1], 200)
    engine.step()
    ask(engine, "waits", asked, 8)
    with suppress(MemoryError):
        while engine.has_unfinished_requests():
            engine.step()
    assert has_raised.is_set(), "no step has raised"
    engine.abort_request(["runs"])  # what its step computed is lost to it
    end(engine)
    setattr(owner, name, call)
    connector.get_transfer_results = results
    return not engine.has_unfinished_requests()


def lose_an_end(llm: Any, asked: list[int]) -> bool:
    """As `raise_behind_a_load`, for workers of other processes: each step raises behind its end,
    until one has said that the load has ended."""
    engine = llm.llm_engine
    executor = engine.model_executor
    execute, ended = executor.execute_model, list[bool]()

    def execute_model(*args: Any, **kwargs: Any) -> Any:
        output = execute(*args, **{**kwargs, "non_block": False})
        of_connector = getattr(output, "kv_connector_output", None)
        ended.append(bool(getattr(of_connector, "finished_recving", None)))
        raise MemoryError("there is none for the step")

    ask(engine, "waits", asked, 8)
    executor.execute_model = execute_model
    late = time.monotonic() + 20
    while not any(ended) and time.monotonic() < late:
        with suppress(MemoryError):
            engine.step()
    executor.execute_model = execute
    assert any(ended), "no load has ended"
    end(engine)
    return not engine.has_unfinished_requests()


def ask(engine: Any, name: str, prompt: list[int], tokens: int) -> None:
    from vllm import SamplingParams, TokensPrompt

    params = SamplingParams(max_tokens=tokens, temperature=0, detokenize=False, ignore_eos=True)
    engine.add_request(name, TokensPrompt(prompt_token_ids=prompt), params)


def end(engine: Any) -> None:
    """Step until all requests have ended, or should have."""
    late = time.monotonic() + 20
    while engine.has_unfinished_requests() and time.monotonic() < late:
        engine.step()


class Trained:
    """A worker extension, as trainers in processes of their own bring."""

    def turn(self) -> None:
        """As `turn`."""
        turn(self)

    def update_weight(self, path: str) -> None:
        """Load new weights one by one."""
        worker: Any = self
        for name, weights in checkpoint(path).items():
            worker.model_runner.model.load_weights(weights=[(name, weights)])


def end_in_fork(llm: Any) -> None:
    """Let a fork of this process end an engine of it, as what Python runs when it exits does."""
    if (process := os.fork()) == 0:
        with suppress(BaseException):
            core = llm.llm_engine.engine_core.engine_core
            core.scheduler.connector.shutdown()
        os._exit(0)
    os.waitpid(process, 0)


def start_another(llm: Any) -> bool:
    """Start another engine in this process, with more blocks; False: it starts, and would be served
    by the first one's connector."""
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    config = llm.llm_engine.vllm_config
    engine = EngineArgs(
        model=config.model_config.model,
        skip_tokenizer_init=True,
        dtype="float32",
        block_size=config.cache_config.block_size,
        max_model_len=config.model_config.max_model_len,
        num_gpu_blocks_override=2 * config.cache_config.num_gpu_blocks,
        enforce_eager=True,
        kv_transfer_config=config.kv_transfer_config,
    )
    try:
        LLMEngine.from_engine_args(engine)
    except ValueError as error:
        if "this process has another engine" in str(error):
            return True
        raise
    return False


class Async:
    """An AsyncLLM, whose methods are called without `await`."""

    def __init__(self, **engine: Any) -> None:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._loop = asyncio.new_event_loop()
        self._count = 0

        async def make() -> Any:
            return AsyncLLM.from_engine_args(AsyncEngineArgs(**engine))

        self._engine = self._loop.run_until_complete(make())
        self.llm_engine = self.engine_core = self
        self.vllm_config = self._engine.vllm_config

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._loop.run_until_complete(getattr(self._engine, name)(*args, **kwargs))

        return call

    def generate(self, prompts: Sequence[Any], sampling: Sequence[Any], **_: Any) -> list[Any]:
        """As LLM's: the outputs of requests that run at once. A list of prompts is one request,
        whose next part comes when the one before is answered."""

        async def one(prompt: Any, params: Any) -> Any:
            self._count += 1
            answered: asyncio.Queue[None] = asyncio.Queue()
            is_list = isinstance(prompt, list)
            asked = parts(prompt, params, answered) if is_list else prompt
            async for output in self._engine.generate(asked, params, str(self._count)):
                last = output
                tokens, stops = output.outputs[0].token_ids, params.stop_token_ids or ()
                if len(tokens) % params.max_tokens == 0 or tokens[-1] in stops:
                    answered.put_nowait(None)
            return last

        async def parts(prompts: list[Any], params: Any, answered: Any) -> AsyncIterator[Any]:
            from vllm.engine.protocol import StreamingInput

            for prompt in prompts:
                yield StreamingInput(prompt=prompt, sampling_params=params)
                await answered.get()

        async def everything() -> list[Any]:
            return await asyncio.gather(*map(one, prompts, sampling))

        return self._loop.run_until_complete(everything())

    def get_metrics(self) -> list[Any]:
        """As LLM's."""
        from vllm.v1.metrics.reader import get_metrics_snapshot

        return list(get_metrics_snapshot())

    def shutdown(self) -> None:
        """End the engine."""
        self._engine.shutdown()


def add_lora(llm: Any, folder: str, load_inplace: bool = False) -> Any:
    """Load an adapter as the server does, before any request needs it."""
    from tests.engine.vllm.vllm_child import adapter

    lora = adapter([], 0, {"adapter": folder})
    lora.load_inplace = load_inplace
    return llm.llm_engine.add_lora(lora)


def reload_lora(llm: Any, folder: str, other: str) -> Any:
    """Write the files of another adapter over those of a folder, and load it in place."""
    replace(folder, other)
    return add_lora(llm, folder, load_inplace=True)
