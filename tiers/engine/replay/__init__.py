"""A small engine that drives connectors as vLLM does, with a model whose every answer shows its KV.

Continuous batching, chunked prefill, its own prefix cache, preemption, loads beside the steps and
recomputation of failed ones, over paged torch tensors; workers in this process or in their own.
"""

from tiers.engine.replay.engine import ReplayEngine
from tiers.engine.replay.model import ReplayModel, answer

__all__ = ["ReplayEngine", "ReplayModel", "answer"]
