"""An engine's requests, blocks and steps, as little of each as a connector reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class FakeRequest:
    """A request that has computed nothing, all of whose tokens are prompt."""

    request_id: str = "r"
    num_tokens: int = 40
    block_hashes: list[bytes] = field(default_factory=list)
    kv_transfer_params: Any = None
    num_computed_tokens: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        return self.num_tokens


class Pulled(dict[str, Any]):
    """Parameters of a request whose KV another node has: a connector of the engine takes that up
    as soon as ours have seen that it may, and turns the flag off."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **{"do_remote_prefill": True, **more})

    def get(self, key: str, default: Any = None) -> Any:
        found = super().get(key, default)
        if key == "do_remote_prefill":
            self[key] = False
        return found


class FakeBlocks:
    """An empty block table."""

    def get_block_ids(self) -> tuple[list[int], ...]:
        return ([],)


BLOCKS = FakeBlocks()


@dataclass
class FakeNewRequest:
    """A request in the first step that runs it."""

    req_id: str
    num_computed_tokens: int
    block_ids: tuple[list[int], ...] = ([],)


class FakeCachedRequests:
    """No request that ran before."""

    req_ids: tuple[str, ...] = ()
    resumed_req_ids: set[str] = set()  # noqa: RUF012 - stays empty
    new_block_ids: tuple[None, ...] = ()
    num_computed_tokens: tuple[int, ...] = ()


class FakeStep:
    """A step that runs `scheduled_new_reqs`, with the given number of tokens each."""

    def __init__(self, num_scheduled_tokens: dict[str, int], *new: FakeNewRequest) -> None:
        self.num_scheduled_tokens = num_scheduled_tokens
        self.scheduled_new_reqs = new
        self.scheduled_cached_reqs = FakeCachedRequests()


IDLE_STEP = FakeStep({})
"""A step that runs nobody."""


def first_step(request_id: str, computed: int, tokens: int) -> FakeStep:
    """The first step of a request: it computes `tokens` after the `computed` ones."""
    return FakeStep({request_id: tokens}, FakeNewRequest(request_id, computed))
