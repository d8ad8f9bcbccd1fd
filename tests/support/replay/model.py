"""Models of several KV cache groups and ranks, and their answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tests.support.replay.tables import STATE
from tiers.contract.engine_info import EngineInfo, KVGroup
from tiers.contract.protocols import Origin
from tiers.lab.replay import model as plain
from tiers.lab.replay.model import VOCABULARY, states


@dataclass(frozen=True)
class ReplayModel(plain.ReplayModel):
    """Models of different `weights` have different KV, and so answers, for the same tokens.
    `windows`: of each KV cache group, STATE for one of recurrent layers. A group has `layers`
    layers, and all groups share the tensors. `replicated`: all ranks have the same KV. `device`:
    where the tensors are, as PyTorch names it. `window_interval`: see `EngineInfo`.
    """

    weights: int = 0
    windows: tuple[int | None, ...] = (None,)
    replicated: bool = False
    device: str = "cpu"
    window_interval: int | None = None

    def engine_info(self, num_blocks: int) -> EngineInfo:
        """A connector's facts about an engine that serves this model."""
        size = self.block_tokens
        groups = tuple(
            KVGroup(size, size, is_state=True) if window == STATE else KVGroup(size, window)
            for window in self.windows
        )
        return EngineInfo(
            {},
            size,
            size,
            num_blocks,
            groups=groups,
            describe=_describe,
            replicated=self.replicated,
            window_interval=self.window_interval,
        )

    def allocate(self, num_blocks: int) -> dict[str, torch.Tensor]:
        return {name: kv.to(self.device) for name, kv in super().allocate(num_blocks).items()}


def _describe(request: Any, first: int, size: int, blocks: int) -> Origin:
    salt = [(request.cache_salt,)] * blocks if request.cache_salt else None
    return Origin(request.tokens[first : first + size * blocks], extra_keys=salt)


def kv_of(model: ReplayModel, token_states: Sequence[int], layer: int, rank: int) -> torch.Tensor:
    """As the plain model's, of this rank's share."""
    share = 0 if model.replicated else rank
    columns = torch.arange(model.width, dtype=torch.int64)
    return plain.kv_of(model, token_states, layer) + columns * (share * 17 + model.weights)


def answer(
    model: ReplayModel, prompt: Sequence[int], max_tokens: int, world_size: int = 1
) -> list[int]:
    """The model's answer, computed without an engine: every engine must give it."""
    tokens = list(prompt)
    past: list[int] = []
    sums = [0] * len(model.windows)
    for _ in range(max_tokens):
        fresh = states(tokens[len(past) :], past[-1] if past else 0)
        past += fresh
        for group, window in enumerate(model.windows):
            seen = fresh if window is None else past[-max(window, 1) :]
            before = sums[group] if window is None else 0
            sums[group] = before + _sum_of(model, seen, group, world_size)
        tokens.append(sum(sums) % VOCABULARY)
    return tokens[len(prompt) :]


def _sum_of(model: ReplayModel, token_states: Sequence[int], group: int, world_size: int) -> int:
    layers = range(group * model.layers, (group + 1) * model.layers)
    return sum(
        int(kv_of(model, token_states, layer, rank).sum())
        for rank in range(world_size)
        for layer in layers
    )
