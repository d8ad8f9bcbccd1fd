"""The replay engine's model: its KV is a function of the whole prefix, its answers of all KV.

A token's KV is mixed from the KV of the token before it, as the paged memory holds it, and an
answer from every byte of KV of its request. So a block that is loaded wrong, or not at all,
changes the answer, as it would in a real model, only always and not just mostly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from tiers.contract.engine_info import EngineInfo, KVGroup
from tiers.contract.protocols import Origin
from tiers.lab.replay.blocks import STATE

VOCABULARY = 50_000
_PRIME = 1_000_003
_MASK = (1 << 31) - 1


@dataclass(frozen=True)
class ReplayModel:
    """Shape of the KV: int64, per layer `(num_blocks, block_tokens, width)`.

    Models of different `weights` have different KV, and so answers, for the same tokens.
    `windows`: of each KV cache group, STATE for one of recurrent layers. A group has `layers`
    layers, and all groups share the tensors.
    `forward_seconds`: added to the time that computing a token takes here. `replicated`: all
    ranks have the same KV. `device`: where the tensors are, as PyTorch names it.
    `window_interval`: see `EngineInfo`.
    """

    layers: int = 2
    width: int = 8
    block_tokens: int = 4
    weights: int = 0
    windows: tuple[int | None, ...] = (None,)
    forward_seconds: float = 0.0
    replicated: bool = False
    device: str = "cpu"
    window_interval: int | None = None

    @property
    def payload_bytes(self) -> int:
        """Bytes of one block on one rank."""
        return self.layers * self.block_tokens * self.width * 8

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
        """Paged KV for one rank."""
        shape = (num_blocks, self.block_tokens, self.width)
        return {
            f"layers.{i}.attn": torch.zeros(shape, dtype=torch.int64, device=self.device)
            for i in range(self.layers)
        }


def _describe(request: Any, first: int, size: int, blocks: int) -> Origin:
    salt = [(request.cache_salt,)] * blocks if request.cache_salt else None
    return Origin(request.tokens[first : first + size * blocks], extra_keys=salt)


def states(tokens: Sequence[int], before: int = 0) -> list[int]:
    """The model's state after each token, starting from the state `before` them."""
    return list(accumulate(tokens, lambda s, t: (s * _PRIME + t + 1) & _MASK, initial=before))[1:]


def kv_of(model: ReplayModel, token_states: Sequence[int], layer: int, rank: int) -> torch.Tensor:
    """KV of tokens with these states: int64 (tokens, width); column 0 is the state itself."""
    state = torch.tensor(token_states, dtype=torch.int64).unsqueeze(1)
    columns = torch.arange(model.width, dtype=torch.int64)
    share = 0 if model.replicated else rank
    return state + columns * (state % 8191 + layer * 131 + share * 17 + model.weights)


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
