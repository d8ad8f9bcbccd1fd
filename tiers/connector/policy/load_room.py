"""May one more request load? Where attention has windows, if all can be computed behind.

vLLM lets a request load while others do if enough blocks stay free for the rest of their prompts.
Of layers with windows it counts what it has given back as held, and keeps none free (0.29 to 0.33).
Its requests run in order: one that finds no room for its next step holds up those behind, who have
loaded and hold that room, and nothing would ever run again. So one waits to load until the room for
its blocks is there, and behind them that for the next step of any that loads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from tiers.contract.engine_info import EngineInfo, KVGroup
from tiers.contract.protocols import Request


class LoadingRequest(Protocol):
    """A request that loads. `next_step`: blocks that it needs behind that, until that step runs."""

    next_step: int

    @property
    def request(self) -> Request: ...


class LoadRoom:
    """The requests that tiers load, or have loaded and that have not run since; used by the
    scheduler's thread."""

    def __init__(self, engine: EngineInfo) -> None:
        self._groups = engine.kv_groups
        self.has_windows = any(g.window is not None and not g.is_state for g in self._groups)
        """Whether there is anything to wait for."""
        self._step_tokens, self._lookahead = engine.step_tokens, engine.lookahead_tokens
        self.free_blocks: Callable[[], int] | None = None
        """Blocks that the engine has free, those included that it would evict; None: not known."""
        self.used: list[LoadingRequest] = []
        """In the order in which they began."""
        self.is_short = False
        """Whether one found no room in this step, so that none behind it does."""

    def step_begins(self) -> None:
        """All may ask again, in the engine's order."""
        self.is_short = False

    def fits(self, loading: LoadingRequest, end: int) -> bool:
        """Whether a request may load what it has not computed of its first `end` tokens. Where it
        may not, none behind it may before the next step: else they might pass it for ever."""
        if self.has_windows and self.used and self.free_blocks and not self.is_short:
            own = self._next_step(loading, end)
            steps = max(own, *(one.next_step for one in self.used))
            self.is_short = self.free_blocks() < self._held(end) + steps
        return not self.used or not self.is_short

    def begins(self, loading: LoadingRequest, end: int) -> None:
        """The engine has given it the blocks of its first `end` tokens, into which tiers load."""
        loading.next_step = self._next_step(loading, end)
        self.used.append(loading)

    def ends(self, loading: LoadingRequest) -> None:
        """It runs, has finished, or is asked about anew: it has no blocks then."""
        if loading.next_step:
            loading.next_step = 0
            self.used.remove(loading)

    @property
    def first(self) -> str:
        """The name of the request that began to load first; empty: there is none."""
        return self.used[0].request.request_id if self.used else ""

    def _held(self, tokens: int) -> int:
        """Blocks that a request of so many computed tokens holds at most."""
        return sum(
            min(_blocks(group, tokens), 1 + _blocks(group, group.window or tokens))
            for group in self._groups
        )

    def _next_step(self, loading: LoadingRequest, computed: int) -> int:
        """Blocks that the engine wants free before a step, those for drafts and one more of each
        group included: without windows for all of the prompt, with them for what it computes."""
        stop = loading.request.num_tokens
        step = min(stop, computed + (self._step_tokens or stop))
        ends = (step if group.window is not None else stop for group in self._groups)
        return sum(
            1 + _blocks(group, end + self._lookahead) - computed // group.tokens
            for group, end in zip(self._groups, ends, strict=True)
        )


def _blocks(group: KVGroup, tokens: int) -> int:
    return -(-tokens // group.tokens)
