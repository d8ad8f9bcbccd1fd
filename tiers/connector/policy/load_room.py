"""May one more request load? Where attention has windows, if all can be computed behind.

vLLM lets a request load while others do if enough blocks stay free for the rest of their prompts.
Of layers with windows it counts what it has given back as held, and keeps none free (0.29 to 0.33).
Its requests run in order: one that finds no room for its next step holds up those behind, who have
loaded and hold that room, and nothing would ever run again. So one waits to load until the room for
its blocks is there, and behind them that for the next step of any that loads.
"""

from __future__ import annotations

from collections.abc import Callable

from tiers.connector.policy.request_state import RequestState
from tiers.contract.engine_info import EngineInfo, KVGroup


class LoadRoom:
    """The requests that load, or have loaded and not run since; used by the scheduler's thread."""

    def __init__(self, engine: EngineInfo) -> None:
        self._groups = engine.kv_groups
        self._step_tokens = engine.step_tokens
        self.free_blocks: Callable[[], int] | None = None
        """Blocks that the engine has free, those included that it would evict; None: not known."""
        self._steps: dict[RequestState, int] = {}
        """Blocks that the next step of each needs."""
        self._is_short = False

    def step_begins(self) -> None:
        """All may ask again, in the engine's order."""
        self._is_short = False

    def fits(self, request_state: RequestState, end: int) -> bool:
        """Whether a request may load what it has not computed of its first `end` tokens. Where it
        may not, none behind it may before the next step: else they might pass it for ever."""
        self._steps.pop(request_state, None)
        if self._steps and self.free_blocks is not None and not self._is_short:
            steps = max(*self._steps.values(), self._next_step(request_state, end))
            self._is_short = self.free_blocks() < self._held(end) + steps
        return not self._steps or not self._is_short

    def begins(self, request_state: RequestState, end: int) -> None:
        """The engine has given it the blocks of its first `end` tokens, into which it loads."""
        if any(group.window is not None and not group.is_state for group in self._groups):
            self._steps[request_state] = self._next_step(request_state, end)

    def ends(self, request_state: RequestState) -> None:
        """It runs, or has finished."""
        self._steps.pop(request_state, None)

    def _held(self, tokens: int) -> int:
        """Blocks that a request of so many computed tokens holds at most."""
        return sum(
            min(_blocks(group, tokens), 1 + _blocks(group, group.window or tokens))
            for group in self._groups
        )

    def _next_step(self, request_state: RequestState, computed: int) -> int:
        """Blocks that the engine wants free before a step, one more of each group for drafts:
        without windows for all of the prompt, with them for what the step computes."""
        stop = request_state.request.num_tokens
        step = min(stop, computed + (self._step_tokens or stop))
        ends = (step if group.window is not None else stop for group in self._groups)
        return sum(
            1 + _blocks(group, end) - computed // group.tokens
            for group, end in zip(self._groups, ends, strict=True)
        )


def _blocks(group: KVGroup, tokens: int) -> int:
    return -(-tokens // group.tokens)
