"""What may a request ask for itself? Tiers, tokens to load, and blocks to store."""

from __future__ import annotations

import logging
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tiers.concurrency.repeated_log import RepeatedLog
from tiers.connector.policy.request_hints import HINTS, KEY, entry_of
from tiers.contract.protocols import Request

logger = logging.getLogger(__name__)


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
