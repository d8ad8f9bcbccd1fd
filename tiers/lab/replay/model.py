"""The replay engine's model: its KV is a function of the whole prefix, its answers of all KV.

A token's KV is mixed from the KV of the token before it, as the paged memory holds it, and an
answer from every byte of KV of its request. So a block that is loaded wrong, or not at all,
changes the answer, as it would in a real model, only always and not just mostly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

VOCABULARY = 50_000
_PRIME = 1_000_003
_MASK = (1 << 31) - 1


@dataclass(frozen=True)
class ReplayModel:
    """Shape of the KV: int64, per layer `(num_blocks, block_tokens, width)`."""

    layers: int = 2
    width: int = 8
    block_tokens: int = 4

    @property
    def payload_bytes(self) -> int:
        return self.layers * self.block_tokens * self.width * 8

    def allocate(self, num_blocks: int) -> dict[str, torch.Tensor]:
        """Paged KV for one rank."""
        shape = (num_blocks, self.block_tokens, self.width)
        return {
            f"layers.{i}.attn": torch.zeros(shape, dtype=torch.int64) for i in range(self.layers)
        }


def states(tokens: Sequence[int], before: int = 0) -> list[int]:
    """The model's state after each token, starting from the state `before` them."""
    return list(accumulate(tokens, lambda s, t: (s * _PRIME + t + 1) & _MASK, initial=before))[1:]


def kv_of(model: ReplayModel, token_states: Sequence[int], layer: int) -> torch.Tensor:
    """KV of tokens with these states: int64 (tokens, width); column 0 is the state itself."""
    state = torch.tensor(token_states, dtype=torch.int64).unsqueeze(1)
    columns = torch.arange(model.width, dtype=torch.int64)
    return state + columns * (state % 8191 + layer * 131)


def answer(model: ReplayModel, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """The model's answer, computed without an engine: every engine must give it."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        known = states(tokens)
        total = sum(int(kv_of(model, known, layer).sum()) for layer in range(model.layers))
        tokens.append(total % VOCABULARY)
    return tokens[len(prompt) :]
