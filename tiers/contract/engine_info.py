"""What a connector must know of its engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from tiers.contract.marks import NO_ADAPTERS, LoadedAdapters, MediaMarks, RequestMarks
from tiers.contract.protocols import Describe, describe_nothing
from tiers.contract.weight_reports import Weights


class KVGroup(NamedTuple):
    """Layers that share a block table: one KV cache group of the engine.

    `tokens`: per paged block. `window`: how many tokens attention looks back, its own included;
    None: all. The engine keeps what a window reaches, and no more. `is_state`: its paged blocks
    hold the state of a recurrent layer after their last token, of which a prefix needs the last
    alone. They do not lie where the block table says; the engine hands over where they do.
    """

    tokens: int
    window: int | None = None
    is_state: bool = False


MOMENT = 0.2
"""Seconds that a start waits for late facts: tiers of small models are there from the beginning."""

ALONE = "alone: "
"""The fact `weights` begins so where nobody else has the same, nor this engine once it is started
again."""

OF_BYTES = (
    "ParallelConfig.",
    "KVTransferConfig.",
    "CacheConfig.kv_cache_layout",
    "attention",
    "device",
)
"""Facts begin so that tell how a block's bytes lie or are spread, not what is computed: engines
that send each other KV see to that themselves."""


class LateFacts(Protocol):
    """Facts of a worker that are not there when it is made."""

    def known(self, seconds: float = 0.0) -> Mapping[str, str] | None:
        """The facts; None: they are not known yet, also after waiting for `seconds`.

        Asked by one thread, for the first time when the paged KV is registered.
        """


@dataclass(frozen=True)
class EngineInfo:
    """What a connector must know of its engine.

    `facts`: everything but layout and rank that makes KV interchangeable (see `namespace`).
    `block_tokens`: tokens per block, whole in every group. `hash_tokens`: tokens per entry of
    `Request.block_hashes`. `num_blocks`: blocks in each worker's paged KV. `rank`: of this worker,
    0 in the scheduler. `kv_events`: whether the engine takes events; none are kept for one that
    does not. `describe`: what events say of a request's blocks. `caches_prefixes`: whether requests
    find in its paged KV what others computed or loaded. `drops_last`: whether it computes the last
    block of a prefix that it finds, for a drafter that needs what computing leaves behind.
    `groups`: its KV cache groups; none named: one, of full attention. `marks`: what a request's KV
    depends on beside its block hashes and its media. `media`: marks of
    requests with images and the like, which block hashes have by names only. `adapters`: those
    that a worker's engine has loaded. `step_tokens`: what
    one step computes at most; 0: not known. `lookahead_tokens`: behind those, which it wants room
    for, so that it can draft. `weights_change`: whether it is made to take other
    weights while it runs, so that its facts do not name them. `late_facts`: more facts, on a
    worker; a tier whose blocks others may find opens once they are known. `host`: where this
    process is, by a name that tells hosts, and containers with file systems of their own, apart;
    empty: not known. `ranks_here`: ranks that share this host's memory, those of the engine's
    replicas too; 0: all of this engine. `replicated`: whether all ranks have the same KV, so
    that one of them may store it for all. `weights`: what a worker sees of its weights.
    `model`: what its operator calls the model. `overwrites_early`: whether a step may overwrite
    paged blocks, move states or zero pages before it calls `handle_preemptions`.
    `window_interval`: after how many tokens of prompts it keeps what windows reach, beside where
    prompts end and where they part; 0: nowhere else; None: everywhere.
    `is_alone`: whether no connector of it, beside the chain, can take KV from other nodes; False:
    one may. `goes_on_right`: whether what it computes of a request that goes on after its answer is
    of the tokens that block hashes say.
    """

    facts: Mapping[str, str]
    block_tokens: int
    hash_tokens: int
    num_blocks: int
    rank: int = 0
    world_size: int = 1
    kv_events: bool = False
    describe: Describe = describe_nothing
    caches_prefixes: bool = True
    drops_last: bool = False
    groups: tuple[KVGroup, ...] = ()
    step_tokens: int = 0
    lookahead_tokens: int = 0
    weights_change: bool = False
    media: MediaMarks = MediaMarks()  # noqa: RUF009 - it has no state
    marks: RequestMarks = RequestMarks()  # noqa: RUF009 - it has no state
    adapters: LoadedAdapters = NO_ADAPTERS
    late_facts: LateFacts | None = None
    host: str = ""
    ranks_here: int = 0
    replicated: bool = False
    weights: Weights = Weights()  # noqa: RUF009 - it has no state
    model: str = ""
    overwrites_early: bool = False
    window_interval: int | None = None
    is_alone: bool = False
    goes_on_right: bool = True

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        """Its groups, one at least."""
        return self.groups or (KVGroup(self.block_tokens),)

    @property
    def all_or_nothing_loads(self) -> bool:
        """Whether a load that fails in part is of no use at all.

        An engine can't tell which request a paged block is of where it has several groups. And
        what precedes a block that failed can't end a prefix where attention has a window, since
        its own window was not loaded.
        """
        return len(self.kv_groups) > 1 or any(g.window is not None for g in self.kv_groups)
