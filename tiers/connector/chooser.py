"""Chooser: asks the children of a chain what they have of a request, and chooses who loads it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

from spec.chain import LoadPolicy
from tiers.connector.base import Request
from tiers.connector.contract import BlockLoader, Connector
from tiers.connector.limits import RequestLimits, read_limits
from tiers.connector.policy import LATER, NOBODY, Choice, first, longest, stitched

logger = logging.getLogger(__name__)


class _Question(NamedTuple):
    """What is asked for a request: at most `loadable` tokens, in whole blocks, from `computed`."""

    request: Request
    computed: int
    loadable: int
    limits: RequestLimits


class Chooser:
    """The load policy of a chain, within the limits that a request sets itself.

    A child that is no `BlockLoader` (another connector of the engine) loads the whole prefix it
    reports or nothing. So it never shares a request: `stitched` gives it one alone where it has
    more than our tiers together, and one with more than `max_load_tokens` does not serve.
    """

    def __init__(
        self,
        children: Sequence[Connector],
        names: Sequence[str],
        load: LoadPolicy,
        block_tokens: int,
    ) -> None:
        self._children = tuple(zip(names, children, strict=True))
        self._load = load
        self._block_tokens = block_tokens
        self._limits: dict[str, RequestLimits] = {}

    def choose(self, request: Request, num_computed_tokens: int) -> Choice:
        """Who loads what of the tokens beyond the computed ones."""
        limits = self._limits_of(request)
        loadable = request.num_tokens - num_computed_tokens
        if limits.max_load_tokens is not None:
            loadable = min(loadable, limits.max_load_tokens)
        loadable -= loadable % self._block_tokens
        question = _Question(request, num_computed_tokens, loadable, limits)
        if limits.max_load_tokens is not None and loadable <= 0:
            return NOBODY
        if self._load == "first":
            return first(self._answers(question))
        if self._load == "longest":
            return longest(self._answers(question), loadable)
        return self._stitch(question)

    def forget(self, request_id: str) -> None:
        """Drop what is kept for a request."""
        self._limits.pop(request_id, None)

    def _limits_of(self, request: Request) -> RequestLimits:
        limits = self._limits.get(request.request_id)
        if limits is None:
            limits, problem = read_limits(request)
            self._limits[request.request_id] = limits
            if problem is not None:
                logger.warning(
                    "request %s has limits that are ignored: %.300r", request.request_id, problem
                )
        return limits

    def _answers(
        self, question: _Question, but: Sequence[int] = ()
    ) -> Iterator[tuple[int | None, bool]]:
        """What each child has, asked one by one; those that may not load, or in `but`: nothing."""
        tiers = question.limits.tiers
        for index, (name, child) in enumerate(self._children):
            # A chain within this one knows its own tiers.
            may_load = tiers is None or name in tiers or getattr(child, "limits_requests", False)
            yield self._ask(child, question) if may_load and index not in but else (0, False)

    def _ask(self, child: Connector, question: _Question) -> tuple[int | None, bool]:
        request, computed, loadable, limits = question
        tokens, is_async = child.get_num_new_matched_tokens(request, computed)
        if tokens is None or limits.max_load_tokens is None or tokens <= loadable:
            return tokens, is_async
        return (loadable, is_async) if isinstance(child, BlockLoader) else (0, False)

    def _stitch(self, question: _Question) -> Choice:
        size = self._block_tokens
        start, rest = divmod(question.computed, size)
        blocks = range(start, start + (0 if rest else question.loadable // size))
        tiers = question.limits.tiers
        loaders = {
            index: child
            for index, (name, child) in enumerate(self._children)
            if isinstance(child, BlockLoader) and (tiers is None or name in tiers)
        }
        found = stitched(
            {index: partial(child.holds, question.request) for index, child in loaders.items()},
            blocks,
        )
        tokens = (found.stop - start) * size
        if tokens < question.loadable:
            ours = [i for i, (_, c) in enumerate(self._children) if isinstance(c, BlockLoader)]
            alone = longest(self._answers(question, but=ours), question.loadable)
            if alone.tokens is None or (found.looking and alone.tokens < question.loadable):
                return LATER
            if alone.tokens > tokens:
                return alone
        for index, hit in found.hits.items():
            loaders[index].count_lookup(hit)
        return Choice(None, tokens, True, found.shares) if tokens else NOBODY
