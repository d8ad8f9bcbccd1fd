"""What a worker sees of its model's weights: real memory, without an engine."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.vllm


class Model(torch.nn.Module):
    """Weights of several types and shapes; tied, transposed, empty, and some without memory."""

    def __init__(self) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(0)
        draw = torch.randn(6, 64, 96, generator=made) * 0.02
        self.embedding = torch.nn.Parameter(draw[0].bfloat16())
        self.layers = torch.nn.ModuleList(torch.nn.Module() for _ in range(4))
        for layer, weights in zip(self.layers, draw[1:5], strict=True):
            layer.weight = torch.nn.Parameter(weights.clone().t())
        self.norm = torch.nn.Parameter(torch.ones(7, dtype=torch.bfloat16))
        self.packed = torch.nn.Parameter(
            torch.randint(0, 255, (33,), dtype=torch.uint8), requires_grad=False
        )
        self.head = self.embedding
        self.elsewhere = torch.nn.Parameter(torch.empty(0))
        self.nowhere = torch.nn.Parameter(torch.empty(8, device="meta"))
        self.register_buffer("scale", torch.ones(1))
        self.experts = torch.nn.Module()
        self.experts.weight = torch.nn.Parameter(draw[5].clone())

    def load_weights(self, weights: Any) -> None:
        """Changes nothing that could be seen."""


class Worker:
    def __init__(self, model: Any, eplb: bool = False) -> None:
        self.model = model
        self.parallel_config = SimpleNamespace(enable_eplb=eplb)

    def get_model(self) -> Any:
        return self.model

    def update_weights(self, info: int) -> int:
        return info + 1


@pytest.fixture
def worker() -> Worker:
    return Worker(Model())


def watched(worker: Worker) -> Callable[[], bool]:
    """Tells whether the weights look as they did, in every part."""
    from tiers.engine.model_weights import ModelWeights

    weights = ModelWeights(worker)
    before = [weights.look(part).seen() for part in range(weights.parts)]
    return lambda: [weights.look(part).seen() for part in range(weights.parts)] == before


def a_step_of_training(model: Model) -> None:
    for one in model.parameters():
        if one.is_floating_point() and not one.is_meta:
            one.data += torch.randn(one.shape).to(one.dtype) * 3e-6


CHANGES: dict[str, Callable[[Worker], Any]] = {
    "a small step of training": lambda worker: a_step_of_training(worker.model),
    "one layer": lambda worker: worker.model.layers[2].weight.data.mul_(1.01),
    "one that is tied": lambda worker: worker.model.head.data.neg_(),
    "a norm": lambda worker: worker.model.norm.data.add_(1),
    "one that is packed": lambda worker: worker.model.packed.data.bitwise_not_(),
    "other memory": lambda worker: setattr(
        worker.model.norm, "data", worker.model.norm.data.clone()
    ),
    "another parameter": lambda worker: setattr(
        worker.model, "norm", torch.nn.Parameter(worker.model.norm.data.clone())
    ),
    "one less": lambda worker: delattr(worker.model, "norm"),
    "another model": lambda worker: setattr(worker, "model", Model()),
    "loading": lambda worker: worker.model.load_weights([]),
    "updating": lambda worker: worker.update_weights(1),
}


@pytest.mark.parametrize("at_once", [3, 400])
@pytest.mark.parametrize("how", CHANGES)
def test_a_change_is_seen(
    worker: Worker, how: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one look, or in one of those that share a model of many parameters."""
    from tiers.engine import model_weights

    monkeypatch.setattr(model_weights, "LOOK_PARAMETERS", at_once)
    same = watched(worker)
    assert same() and same()
    CHANGES[how](worker)
    assert not same()
    assert not same(), "and not taken back"


def test_what_computing_changes_is_not_looked_at() -> None:
    worker = Worker(Model(), eplb=True)
    same = watched(worker)
    buffers: Any = worker.model
    buffers.scale.add_(1)
    worker.model.experts.weight.data.neg_()  # moved between ranks
    assert same()
    assert worker.update_weights(1) == 2, "what it is wrapped in is not noticed"


def test_layers_that_share_memory_by_turns_are_not_looked_at(worker: Worker) -> None:
    one, other = worker.model.layers[0].weight, worker.model.layers[1].weight
    one.data = other.data
    same = watched(worker)
    one.data.neg_()
    assert same()


def test_nothing_is_kept_alive(worker: Worker) -> None:
    """Weights are most of a device's memory."""
    same = watched(worker)
    gone = [weakref.ref(one) for one in (worker.model, worker.model.embedding)]
    storage = torch.multiprocessing.reductions.StorageWeakRef(
        worker.model.layers[0].weight.untyped_storage()
    )
    worker.model = Model()
    gc.collect()
    assert [one() for one in gone] == [None, None] and storage.expired()
    assert not same()


def test_the_worker_is_found_among_the_callers(worker: Worker) -> None:
    from vllm.v1.worker.worker_base import WorkerBase

    from tiers.contract.weight_reports import Weights
    from tiers.engine.model_weights import ModelWeights
    from tiers.engine.vllm_watch import worker_weights

    class Base(Worker, WorkerBase):  # type: ignore[misc]
        def initialize_from_config(self, kv_cache_config: Any) -> Any:
            return make()

    def make() -> Any:
        return worker_weights()

    assert isinstance(Base(Model()).initialize_from_config(None), ModelWeights)
    assert isinstance(make(), Weights)
