"""What may a request ask for itself? Limits of loads and stores, and hints for its blocks."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sized
from itertools import islice
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, Field, ValidationError

from spec.chain import StoreScope
from tiers.concurrency.repeated_log import RepeatedLog
from tiers.contract.protocols import Request

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=BaseModel)

KEY = "kvtiers"
"""Our entry of `kv_transfer_params`; other entries belong to other connectors."""
HINTS = "hints"
"""The entry in it that has the hints: a mapping from action to payload."""
CACHED = "cached_tokens"
"""The entry that a response has in it: tokens of the prompt that each tier loaded, by its name. A
proxy may send a response's entries on as a request's."""
WEIGHTS = "weights"
"""The entry of a response whose KV another node takes, and of that node's request: what names the
weights that computed it, an @, and what stands for the node from its start on."""
MAX_NAME = 512
"""Characters of it that are read; ours has fewer."""
NO_LIMITS = (HINTS, CACHED, WEIGHTS)
KV_HINT = "kv_hint"
"""The entry of `kv_transfer_params` in which Dynamo passes its envelope on to an engine."""
MEASURING = "__bench_", "__kvwarm_"
"""How Dynamo's `--benchmark-mode` names its requests: some begin with KV that nobody computed."""
VERSION = "1"
"""Of our actions, where an engine's envelope names one for each."""
MAX_TTL = 86_400.0
"""Seconds: a day. A client that still wants the blocks then repeats its hint."""
MAX_ACTIONS = 16
"""Actions that are read of one request; a longer list is nobody's plan."""
MAX_ITEMS = 32
"""Items that are read of one list or mapping. Of each wrong one pydantic makes an error, in 2.5 us
of the engine's thread: a client's million of them would be a step of seconds for everybody."""
INSTEAD = {
    "prefetch": "send the prompt with max_tokens 1, which loads and promotes its blocks",
    "kv.fetch": "tiers are looked up for each request; list the connector that fetches beside them",
}
"""Actions that others know and a chain does not obey, and what has their effect."""


class Retain(BaseModel, frozen=True, extra="forbid", strict=True):
    """Keep the prompt's blocks from eviction."""

    ttl: float = Field(
        gt=0,
        le=MAX_TTL,
        allow_inf_nan=False,
        description="Seconds, counted from the end of the request.",
    )


class Demote(BaseModel, frozen=True, extra="forbid", strict=True):
    """Let the prompt's blocks be evicted next, and retain them no more."""


ACTIONS: Mapping[str, type[BaseModel]] = {"retain": Retain, "demote": Demote}


class Hints(NamedTuple):
    """The hints of one request; the default is none. `retain` counts where both are given."""

    retain: Retain | None = None
    demote: Demote | None = None


NO_HINTS = Hints()


def entry_of(request: Request, key: str = KEY) -> Any:
    """An entry of a request's `kv_transfer_params`, which is ours; None: there is none."""
    params = getattr(request, "kv_transfer_params", None)
    return params.get(key) if isinstance(params, Mapping) else None


def _actions(request: Request) -> Iterator[tuple[object, object, object]]:
    """Name, payload and version of each action, as vLLM's API takes it; one more than is read at
    most."""
    entry, envelope = entry_of(request), getattr(request, "kv_hints", None)
    routed = entry_of(request, KV_HINT)
    if entry is None and envelope is None and routed is None:  # as of nearly all requests
        return
    hints = entry.get(HINTS) if isinstance(entry, Mapping) else None
    if isinstance(hints, Mapping):
        yield from islice(((*item, VERSION) for item in hints.items()), MAX_ACTIONS + 1)
    elif hints is not None:
        yield HINTS, hints, VERSION
    if isinstance(routed, Mapping) and isinstance(routed.get("actions"), list):
        for one in islice(routed["actions"], MAX_ACTIONS + 1):
            fields = one if isinstance(one, Mapping) else {}
            yield fields.get("action_type"), fields.get("payload"), fields.get("action_version")
    elif routed is not None:
        yield KV_HINT, routed, VERSION
    # vLLM's KvHintsEnvelope (`vllm/v1/kv_hints/protocol.py`, since 0.32), not imported here.
    actions = getattr(envelope, "actions", None)
    for action in islice(actions if isinstance(actions, list | tuple) else (), MAX_ACTIONS + 1):
        name, payload = getattr(action, "action_type", None), getattr(action, "payload", None)
        yield name, payload, getattr(action, "action_version", None)


def _read(action: object, payload: object, version: object) -> dict[str, Any] | str:
    """The field of `Hints` that an action is, or why it is none."""
    if not isinstance(action, str) or action not in ACTIONS:
        instead = INSTEAD.get(action) if isinstance(action, str) else None
        return f"{_shown(action)} is unknown; {instead or 'use ' + ' or '.join(ACTIONS)}"
    if version != VERSION:
        return f"{action} of version {_shown(version)} is unknown; use {VERSION!r}"
    found = _validated(ACTIONS[action], payload, action)
    return found if isinstance(found, str) else {action: found}


def _validated(kind: type[M], said: object, name: str) -> M | str:
    """What a request says under a name, or what is wrong with it, in 300 characters at most."""
    if _is_long(said):
        return f"{name}: more than {MAX_ITEMS} items"
    try:
        return kind.model_validate(said)
    except ValidationError as error:
        problems = (
            f"{'.'.join(map(str, (name, *problem['loc'])))}: {problem['msg']}"
            for problem in error.errors(include_url=False)
        )
        return "; ".join(problems)[:300]


def _is_long(said: object) -> bool:
    """Whether it, or a value in it, has more items than are read."""
    some = [said]
    if isinstance(said, Mapping) and len(said) <= MAX_ITEMS:
        some += said.values()
    return any(
        isinstance(one, Sized) and not isinstance(one, str) and len(one) > MAX_ITEMS for one in some
    )


def _shown(value: object) -> str:
    """A value in a few words, whose rest is not looked at."""
    if isinstance(value, str):
        return repr(value[:80])
    return repr(value) if value is None or isinstance(value, int) else f"a {type(value).__name__}"


class RequestLimits(BaseModel, frozen=True, extra="forbid", strict=True):
    """Limits of one request; the default is none."""

    max_load_tokens: int | None = Field(
        default=None, ge=0, description="Load at most this many tokens, in whole blocks."
    )
    tiers: Annotated[tuple[str, ...] | None, Field(strict=False)] = Field(
        default=None, description="Load from these tiers only; a name no tier has matches none."
    )
    store: Literal["prompt", "computed"] | bool | None = Field(
        default=None,
        description="Whether the request's blocks are stored: true, all of them; prompt, those of "
        "its prompt; computed, those that the engine computes; false, none. Left out: as the chain "
        "says.",
    )

    def scope(self, of_chain: StoreScope) -> StoreScope:
        """What may be stored of the request, where its chain says that."""
        if isinstance(self.store, str):
            return self.store
        return of_chain if self.store is None else "all"

    def may_load(self, tier: str) -> bool:
        """Whether any block may come from a tier."""
        return self.max_load_tokens != 0 and (self.tiers is None or tier in self.tiers)


UNLIMITED = RequestLimits()
NOTHING = RequestLimits(max_load_tokens=0, store=False)


class RequestReader:
    """Reads what a chain's requests ask for. What is malformed or unknown is logged, and never
    matters to the request or to what else it asks for."""

    def __init__(self) -> None:
        self.ignored = 0
        """Hints, since they were last counted."""
        self._log = RepeatedLog(logger, "chain", "hints were ignored")
        self._limits_log = RepeatedLog(logger, "chain", "requests had limits that are ignored")

    def hints(self, request: Request) -> Hints:
        """The hints of a request: those in its `kv_transfer_params`, ours and then those of a
        router, then those that the engine passes on beside these; the last of an action counts."""
        hints = NO_HINTS
        for number, action in enumerate(_actions(request)):
            found = "too many actions" if number >= MAX_ACTIONS else _read(*action)
            if isinstance(found, str):
                self.ignored += 1
                self._log.log("request %s: a hint is ignored: %r", request.request_id, found)
            else:
                hints = hints._replace(**found)
        return hints

    def limits(self, request: Request) -> RequestLimits:
        """A request's limits; of malformed ones all are as if there were none, but `store: false`.

        A request that may not use its engine's own cached prefixes (prompt log-probabilities need
        every token computed) loads none either.
        """
        if request.request_id.startswith(MEASURING):
            return NOTHING
        entry, limits = entry_of(request), UNLIMITED
        if isinstance(entry, dict) and len(entry) <= MAX_ITEMS:
            entry = {key: value for key, value in entry.items() if key not in NO_LIMITS}
        if entry is not None:
            found = _validated(RequestLimits, entry, KEY)
            if isinstance(found, str):
                ignored = "request %s: all of its limits are ignored, but store: false: %r"
                self._limits_log.log(ignored, request.request_id, found)
                if isinstance(entry, Mapping) and entry.get("store") is False:
                    limits = RequestLimits(store=False)
            else:
                limits = found
        if getattr(request, "skip_reading_prefix_cache", False):
            limits = limits.model_copy(update={"max_load_tokens": 0})
        return limits
