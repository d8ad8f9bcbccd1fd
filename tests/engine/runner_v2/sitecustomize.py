"""Python runs this first where its folder is on PYTHONPATH: vLLM has Model Runner V2 on the CPU.

V2 is vLLM's default on GPUs. Its kernels are Triton's, which has no compiler for CPUs but an
interpreter. vLLM asks whether Triton has a backend for the CPU, and here it has one by name.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any


class NoDriver:
    """What kernels ask where they run."""

    @staticmethod
    def is_active() -> bool:
        return True

    def get_current_target(self) -> SimpleNamespace:
        return SimpleNamespace(backend="cpu", arch="cpu", warp_size=1)


def name_cpu(module: ModuleType) -> None:
    module.backends["cpu"] = SimpleNamespace(driver=NoDriver, compiler=None)


def take_any_mask(module: ModuleType) -> None:
    """As on devices, where a mask may be of integers."""

    def as_bools(moved: Callable[..., object], place: int) -> Callable[..., object]:
        def with_bools(*args: Any) -> object:
            mask = args[place]
            return moved(*args[:place], type(mask)(mask.data != 0, mask.dtype), *args[place + 1 :])

        return with_bools

    builder = module.InterpreterBuilder
    builder.create_masked_load = as_bools(builder.create_masked_load, 2)
    builder.create_masked_store = as_bools(builder.create_masked_store, 3)


def take_triton(module: ModuleType) -> None:
    """Who asks for the attention of GPUs gets it."""
    choose = module.CpuPlatform.get_attn_backend_cls

    def chosen(cls: type, backend: Any, *args: Any, **kwargs: Any) -> str:
        is_triton = backend is not None and backend.name == "TRITON_ATTN"
        path: str = backend.get_path() if is_triton else choose(backend, *args, **kwargs)
        return path

    module.CpuPlatform.get_attn_backend_cls = classmethod(chosen)


def size_tiles(module: ModuleType) -> None:
    """It asks what device it has, for the size of its tiles alone."""
    module.torch.cuda.get_device_capability = lambda device=None: (9, 0)


CHANGES = {
    "triton.backends": name_cpu,
    "triton.runtime.interpreter": take_any_mask,
    "vllm.platforms.cpu": take_triton,
    "vllm.v1.attention.ops.triton_reshape_and_cache_flash": size_tiles,
}


class Changed(MetaPathFinder):
    """Changes modules of Triton when they are imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if (change := CHANGES.pop(name, None)) is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_change(module: ModuleType) -> None:
                load(module)
                change(module)

            spec.loader.exec_module = load_and_change  # type: ignore[method-assign]
        return spec


os.environ |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
os.environ["TORCHDYNAMO_DISABLE"] = "1"  # what PyTorch compiles would be Triton's, too
sys.meta_path.insert(0, Changed())
