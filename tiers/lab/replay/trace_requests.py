"""The replay's requests, as connectors see them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from tiers.lab.replay.requests import Status
from tiers.traces.trace import TraceRequest


@dataclass(eq=False)
class TracedRequest:
    """A request of a trace. Tokens are counts alone; its blocks are the trace's ids. Those of its
    answer, where they were recorded, are `answer_ids` until the answer ends.

    `pages`: its blocks of the paged KV, the last of which may be partial. `own`: tokens that the
    engine had itself; `external`: those that tiers were to load; `lost`: those of them that did
    not arrive. `on_gpu`: whether a step computes some of it now. `loaded_by`: tokens of each tier.
    """

    request_id: str
    arrival: float
    num_tokens: int
    answer_tokens: int
    ids: list[int]
    block_hashes: list[bytes]
    cache_salt: str
    counts: bool
    num_computed_tokens: int = 0
    pages: list[int] = field(default_factory=list)
    answer_ids: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    status: Status = Status.WAITING
    on_gpu: bool = False
    has_run: bool = False
    own: int = 0
    external: int = 0
    lost: int = 0
    loaded_by: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, number: int, request: TraceRequest, counts: bool) -> TracedRequest:
        """Make a request. `counts`: whether the report counts it."""
        ids, tokens = list(request.blocks), max(1, request.input_length)
        return cls(
            f"request-{number}",
            request.timestamp / 1000,
            tokens,
            request.output_length,
            ids,
            _hashes(ids),
            request.salt or "",
            counts,
            answer_ids=list(request.answer_blocks),
            prompt_tokens=tokens,
        )

    @property
    def num_prompt_tokens(self) -> int:
        """Those of the prompt, while the others may be the answer's."""
        return self.prompt_tokens

    @property
    def computed(self) -> int:
        """Prompt tokens that GPUs compute."""
        return self.num_tokens - self.own - self.external + self.lost

    def more_pages(self, block_tokens: int, answered: int = 0) -> int:
        """How many pages it needs beside those that it has, when so much of its answer is there."""
        return -(-(self.num_tokens + answered) // block_tokens) - len(self.pages)

    def answer(self, pages: list[int]) -> range:
        """The answer has ended, in these pages beside the prompt's: its tokens are known, and all
        but the last are computed. The blocks that it filled."""
        filled = range(len(self.ids), len(self.ids) + len(self.answer_ids))
        self.pages += pages
        self.ids += self.answer_ids
        self.block_hashes += _hashes(self.answer_ids)
        self.num_tokens += self.answer_tokens
        self.num_computed_tokens = self.num_tokens - 1
        return filled

    def get_block_ids(self) -> tuple[list[int], ...]:
        """Its block table, as connectors ask for it."""
        return (list(self.pages),)

    def loading(self, block_tokens: int) -> range:
        """The blocks that it loads, or has loaded."""
        return range(self.own // block_tokens, self.num_computed_tokens // block_tokens)

    def cut(self, bad_pages: set[int], all_bad: bool, block_tokens: int) -> None:
        """Blocks of its load did not arrive: they and those behind them are computed."""
        blocks = self.loading(block_tokens)
        bad = [block for block in blocks if all_bad or self.pages[block] in bad_pages]
        if bad:
            self.num_computed_tokens = bad[0] * block_tokens
            self.lost = self.own + self.external - self.num_computed_tokens

    def forget_lost(self) -> None:
        """What did not arrive is no tier's: the last blocks of the load, whoever had them."""
        lost = self.lost
        for tier in reversed(list(self.loaded_by)):
            taken = min(lost, self.loaded_by[tier])
            self.loaded_by[tier] -= taken
            lost -= taken


def _hashes(ids: list[int]) -> list[bytes]:
    return [hashlib.blake2b(b"%d" % one, digest_size=32).digest() for one in ids]
