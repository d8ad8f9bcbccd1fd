"""What training loops do to a running vLLM engine, in the process of a job of `vllm_child`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file


def checkpoint(path: str) -> dict[str, torch.Tensor]:
    """The weights in a model's folder."""
    return load_file(Path(path) / "model.safetensors")


def train_in_place(llm: Any, path: str) -> None:
    """Load new weights as a trainer in the engine's own process does: one parameter at a time."""
    model = llm.llm_engine.model_executor.driver_worker.model_runner.model
    for name, weights in checkpoint(path).items():
        model.load_weights([(name, weights)])


def copy_in_place(llm: Any, path: str) -> None:
    """Copy new weights over those of the engine, and tell nobody."""
    llm.collective_rpc(copy_parameters, args=(path,))


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


class Trained:
    """A worker extension, as trainers in processes of their own bring."""

    def update_weight(self, path: str) -> None:
        """Load new weights one by one."""
        worker: Any = self
        for name, weights in checkpoint(path).items():
            worker.model_runner.model.load_weights(weights=[(name, weights)])


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

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._loop.run_until_complete(getattr(self._engine, name)(*args, **kwargs))

        return call

    def generate(self, prompts: Sequence[Any], sampling: Sequence[Any], **_: Any) -> list[Any]:
        """As LLM's: the outputs of requests that run at once."""

        async def one(prompt: Any, params: Any) -> Any:
            self._count += 1
            async for output in self._engine.generate(prompt, params, str(self._count)):
                last = output
            return last

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


def add_lora(llm: Any, folder: str) -> Any:
    """Load an adapter as the server does, before any request needs it."""
    from tests.support.vllm_child import adapter

    return llm.llm_engine.add_lora(adapter([], 0, {"adapter": folder}))
