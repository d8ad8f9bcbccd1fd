"""What may a request ask for itself? Limits of loads and stores, and hints for its blocks."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tiers.concurrency.repeated_log import RepeatedLog
from tiers.contract.protocols import Request

logger = logging.getLogger(__name__)

KEY = "kvtiers"
"""Our entry of `kv_transfer_params`; other entries belong to other connectors."""
HINTS = "hints"
"""The entry in it that has the hints: a mapping from action to payload."""
VERSION = "1"
"""Of our actions, where an engine's envelope names one for each."""
MAX_TTL = 86_400.0
"""Seconds: a day. Who still wants the blocks then says so again."""
MAX_ACTIONS = 16
"""Actions that are read of one request; a longer list is nobody's plan."""
INSTEAD = {"prefetch": "send the prompt with max_tokens 1, which loads and promotes its blocks"}
"""Actions that others know and a chain does not obey, and what has their effect."""


class _Action(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Retain(_Action):
    """Keep the prompt's blocks from eviction."""

    ttl: float = Field(
        gt=0,
        le=MAX_TTL,
        allow_inf_nan=False,
        description="Seconds, counted from the end of the request.",
    )


class Demote(_Action):
    """Let the prompt's blocks be the next to go, and retain them no more."""


ACTIONS: Mapping[str, type[_Action]] = {"retain": Retain, "demote": Demote}


class Hints(NamedTuple):
    """What one request says; the default is nothing. `retain` counts where both are said."""

    retain: Retain | None = None
    demote: Demote | None = None


NO_HINTS = Hints()


class _Said(NamedTuple):
    """An action as it came: its name, its payload, and its version where it has one."""

    action: object
    payload: object
    version: object = VERSION


class HintReader:
    """Reads the hints of a chain's requests, and counts those it ignores.

    A hint that is malformed or unknown never matters to the request or to its other hints.
    """

    def __init__(self) -> None:
        self.ignored = 0
        """Hints, so far."""
        self._log = RepeatedLog(logger, "chain", "hints were ignored")

    def read(self, request: Request) -> Hints:
        """The hints of a request: those in its `kv_transfer_params`, then those that the engine
        passes on beside these; the last of an action counts."""
        hints = NO_HINTS
        for number, said in enumerate(_all_said(request)):
            found = "too many actions" if number >= MAX_ACTIONS else _read(said)
            if isinstance(found, str):
                self.ignored += 1
                self._log.log("request %s: a hint is ignored: %.300r", request.request_id, found)
            else:
                hints = hints._replace(**found)
        return hints


def entry_of(request: Request) -> Any:
    """Our entry of a request's `kv_transfer_params`; None: there is none."""
    params = getattr(request, "kv_transfer_params", None)
    return params.get(KEY) if isinstance(params, Mapping) else None


def _all_said(request: Request) -> Iterator[_Said]:
    """What a request says, as vLLM's API takes it; one more than is read at most."""
    entry, envelope = entry_of(request), getattr(request, "kv_hints", None)
    if entry is None and envelope is None:  # as of nearly all requests
        return
    own = entry.get(HINTS) if isinstance(entry, Mapping) else None
    if isinstance(own, Mapping):
        yield from islice((_Said(*item) for item in own.items()), MAX_ACTIONS + 1)
    elif own is not None:
        yield _Said(HINTS, own)
    # vLLM's KvHintsEnvelope (`vllm/v1/kv_hints/protocol.py`, since 0.32), not imported here.
    actions = getattr(envelope, "actions", None)
    for one in islice(actions if isinstance(actions, list | tuple) else (), MAX_ACTIONS + 1):
        names = ("action_type", "payload", "action_version")
        yield _Said(*(getattr(one, name, None) for name in names))


def _read(said: _Said) -> dict[str, Any] | str:
    """The field of `Hints` that an action is, or why it is none."""
    action, payload, version = said
    if not isinstance(action, str) or action not in ACTIONS:
        instead = INSTEAD.get(action) if isinstance(action, str) else None
        return f"{action!r:.80} is unknown; {instead or 'use ' + ' or '.join(ACTIONS)}"
    if version != VERSION:
        return f"{action} of version {version!r:.80} is unknown; use {VERSION!r}"
    try:
        return {action: ACTIONS[action].model_validate(payload)}
    except ValidationError as error:
        return "; ".join(
            f"{'.'.join(map(str, (action, *one['loc'])))}: {one['msg']}"
            for one in error.errors(include_url=False)
        )


class RequestLimits(BaseModel):
    """Limits of one request; the default is none."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    max_load_tokens: int | None = Field(
        default=None, ge=0, description="Load at most this many tokens, in whole blocks."
    )
    tiers: Annotated[tuple[str, ...] | None, Field(strict=False)] = Field(
        default=None, description="Load from these tiers only; a name no tier has matches none."
    )
    store: Literal["prompt"] | bool | None = Field(
        default=None,
        description="Whether the request's blocks are stored: true, all of them; prompt, those of "
        "its prompt; false, none. Left out: as the chain says.",
    )

    def may_load(self, tier: str) -> bool:
        """Whether any block may come from a tier."""
        return self.max_load_tokens != 0 and (self.tiers is None or tier in self.tiers)


UNLIMITED = RequestLimits()
NOTHING_LOADED = {"max_load_tokens": 0}


def read_limits(request: Request) -> tuple[RequestLimits, str | None]:
    """A request's limits, and what is wrong with them: then they are as if there were none.

    A request that may not use its engine's own cached prefixes (prompt log-probabilities need
    every token computed) loads none either.
    """
    limits, problem = _said(request)
    if getattr(request, "skip_reading_prefix_cache", False):
        limits = limits.model_copy(update=NOTHING_LOADED)
    return limits, problem


def _said(request: Request) -> tuple[RequestLimits, str | None]:
    found = entry_of(request)
    if found is None:
        return UNLIMITED, None
    if isinstance(found, dict):
        found = {key: value for key, value in found.items() if key != HINTS}
    try:
        return RequestLimits.model_validate(found), None
    except ValidationError as error:
        problems = [
            f"{'.'.join(map(str, (KEY, *problem['loc'])))}: {problem['msg']}"
            for problem in error.errors(include_url=False)
        ]
        return UNLIMITED, "; ".join(problems)


class LimitsReader:
    """Reads the limits of a chain's requests, and says once in the log that some are ignored."""

    def __init__(self) -> None:
        self._ignored = RepeatedLog(logger, "chain", "requests had limits that are ignored")

    def read(self, request: Request) -> RequestLimits:
        """A request's limits; see `read_limits`."""
        limits, problem = read_limits(request)
        if problem is not None:
            ignored = "request %s has limits that are ignored: %.300r"
            self._ignored.log(ignored, request.request_id, problem)
        return limits
