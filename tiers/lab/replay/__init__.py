"""A small engine that drives connectors as vLLM does.

`ReplayEngine` computes, with a model whose every answer shows its KV: continuous batching, chunked
prefill, its own prefix cache, loads beside the steps and recomputation of failed ones, over paged
torch tensors. `TimedEngine` is the same engine for a trace (see `replay_trace.py`): it computes by
waiting, in the time of a clock. Tests extend it by what else engines do: they preempt, and have
windows or several ranks.
"""
