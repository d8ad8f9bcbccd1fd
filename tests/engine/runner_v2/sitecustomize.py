"""Python runs this first where its folder is on PYTHONPATH: vLLM has Model Runner V2 on the CPU.

V2 is vLLM's default on GPUs. Its kernels are Triton's, which has no compiler for CPUs but an
interpreter. vLLM asks whether Triton has a backend for the CPU, and here it has one by name.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace


class NoDriver:
    """What kernels ask where they run."""

    @staticmethod
    def is_active() -> bool:
        return True

    def get_current_target(self) -> SimpleNamespace:
        return SimpleNamespace(backend="cpu", arch="cpu", warp_size=1)


class WithCpu(MetaPathFinder):
    """Adds a backend to those of Triton when these are imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "triton.backends":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_add(module: ModuleType) -> None:
                load(module)
                module.backends["cpu"] = SimpleNamespace(driver=NoDriver, compiler=None)

            spec.loader.exec_module = load_and_add  # type: ignore[method-assign]
        return spec


os.environ |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
os.environ["TORCHDYNAMO_DISABLE"] = "1"  # what PyTorch compiles would be Triton's, too
sys.meta_path.insert(0, WithCpu())
