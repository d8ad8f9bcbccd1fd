"""Whose weights computed the KV that nodes send each other, by names that go with the requests."""

from __future__ import annotations

import hashlib
import logging
import math
import secrets
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tiers.concurrency.repeated_log import RepeatedLog
from tiers.connector.policy.request_params import KEY, MAX_NAME, WEIGHTS, entry_of
from tiers.connector.policy.request_state import RequestState
from tiers.contract.engine_info import EngineInfo
from tiers.contract.generation import Generation
from tiers.contract.protocols import Request
from tiers.recent import RecentDict

logger = logging.getLogger(__name__)

MOST_NODES = 4096
"""Of other nodes and their adapters, so many are known by what names their weights."""


class NodeWeights:
    """What names the weights of this node, and those of others that send it KV; used by the
    scheduler's thread alone."""

    def __init__(
        self, engine: EngineInfo, generation: Generation, now: Callable[[], float]
    ) -> None:
        """`generation`: of the keys. `now`: seconds, never going back."""
        self._engine = engine
        self._generation = generation
        self._ours: str | None = None
        self._here = secrets.token_bytes(16)
        self._named = RecentDict[str, str](MOST_NODES, math.inf, now)
        """By what stands for another node, with an adapter: the first name of those weights."""
        self._log = RepeatedLog(logger, "chain", "requests came with KV of other weights")
        self.refused = 0
        """Requests of which nothing is stored, since KV of other weights came for them."""

    def know(self, weights: str) -> bool:
        """A shared tier's workers know what names the engine's weights; empty: not yet. Whether
        that is news."""
        before, self._ours = self._ours, weights or self._ours or ""
        return self._ours != before

    def of(self, request: Request) -> str | None:
        """What names the weights of this generation and of the request's adapter to other nodes;
        empty: not known yet; None: no tier is shared."""
        weights, mark = self._ours, self._engine.marks.of(request)
        if weights and mark.shared:
            return weights + self._generation.tag.hex() + mark.content.hex()
        return weights and ""

    def entry(self, request: Request) -> dict[str, Any]:
        """What to tell another node, which takes KV of a request, of the weights that computed it.
        It stores what it computes behind that. An empty name, of weights that are not known yet,
        is none of its own; this node, with an adapter from one place, names them later."""
        weights, adapter = self.of(request), getattr(request, "lora_request", None)
        if weights is None:
            return {}
        place = "" if adapter is None else f"{adapter.lora_name}\0{adapter.lora_path}"
        node = hashlib.blake2b(place.encode(), key=self._here, digest_size=16).hexdigest()
        return {WEIGHTS: f"{weights}@{node}"}

    def sent(self, request: Request) -> Iterator[str]:
        """What names the weights of KV that another node sends for a request; for weights that it
        did not know yet, what stands for them until it does."""
        entry, params = entry_of(request), getattr(request, "kv_transfer_params", {})
        if self._engine.is_alone or not isinstance(entry, Mapping) or WEIGHTS not in entry:
            return
        if params.keys() == {KEY}:  # so a client asks nobody to send anything
            return
        name = entry[WEIGHTS]
        is_ours = isinstance(name, str) and len(name) <= MAX_NAME
        weights, _, node = name.partition("@") if is_ours else ("", "", "")
        named = self._named.get(node)
        if weights and node and named is None:
            self._named.update({node: weights})
        # What has no name any more, as an adapter loaded anew in its place, is not what had one.
        yield weights or (node if named is None else "")

    def judge(self, request_state: RequestState) -> set[str]:
        """Store nothing of a request unless what is computed for it is of its own weights alone, as
        far as the nodes say that sent a part of its KV. Return what names others, or those of which
        nobody knows yet."""
        if not request_state.sent:
            return set()
        ours = self.of(request_state.request)
        named = {one: self._named.get(one) or one for one in request_state.sent}
        others = {one for one, name in named.items() if not name or name != ours}
        request_state.awaits_weights = ours == ""
        if ours and others and request_state.may_store:
            line = (
                "request %s: nothing of it is stored, since another node sent KV of other weights, "
                "or of another version of vLLM or kvtiers"
            )
            self._log.log(line, request_state.request.request_id)
            self.refused += 1
            request_state.may_store = False
        return others
