"""The status of an engine and its tiers, and the chain that it runs, as they cross the socket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, Field


class Percentiles(BaseModel, frozen=True, extra="forbid"):
    """Of the last samples, in seconds."""

    p50: float
    p99: float
    samples: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Percentiles | None:
        if not samples:
            return None
        by_size = sorted(samples)
        last = len(by_size) - 1
        return cls(p50=by_size[last // 2], p99=by_size[round(0.99 * last)], samples=len(by_size))


class TierStatus(BaseModel, frozen=True, extra="forbid"):
    """One tier. Sums are since the engine's start, `_late` and rates over the last minute. Bytes
    are those of all ranks."""

    name: str
    type: str
    state: str = Field(description="One of opening, open, degraded, down, refused.")
    why: str = Field(description="The last error where the state is not open; else empty.")
    paused: str = Field(description="reads, writes or both, as its setting; empty: neither.")
    capacity_bytes: float = Field(description="0: no bound of ours, or it is not counted.")
    used_bytes: float
    token_share: float | None = Field(description="Part of the prompts' tokens that it loaded.")
    token_share_late: float | None
    loaded_bytes_per_second: float
    stored_bytes_per_second: float
    measured_load_bytes_per_second: float | None = Field(
        description="What it loads after its fixed time, as measured; None: not yet measured."
    )
    load_latency_seconds: float | None = Field(description="That fixed time.")
    loading_jobs: float
    storing_jobs: float
    lookup_seconds: Percentiles | None
    load_seconds: Percentiles | None
    dropped_blocks: dict[str, float] = Field(description="Blocks not stored, by reason.")
    sums: dict[str, float] = Field(description="All counters of docs/metrics.md.")


class GhostStatus(BaseModel, frozen=True, extra="forbid"):
    """What a tier would have of the prompts' blocks, with settings of its own or others."""

    tier: str
    hit_ratio: float
    error: float
    prompt_seconds: float | None = Field(
        default=None,
        description="For 1,000 tokens of a prompt that this tier alone serves, without waiting for "
        "other requests; the rest is computed. None: its rates are not measured yet.",
    )


class EngineStatus(BaseModel, frozen=True, extra="forbid"):
    """An engine's chain, its tiers in load priority."""

    version: str = Field(description="That of kvtiers.")
    load_policy: str
    chain_version: int = Field(description="1 at the start, and one more with each change.")
    up_seconds: float
    measured_seconds_ago: float | None = Field(
        description="When a step last brought counts: an engine without requests takes no steps."
    )
    window_seconds: float = Field(description="Over which rates are.")
    prompt_tokens: float
    prompt_tokens_late: float
    prefill_tokens_per_second: float | None
    tiers: list[TierStatus]
    ghosts: list[GhostStatus]


class RunningChain(BaseModel, frozen=True, extra="forbid"):
    """A chain as it runs, and facts of its engine. Sizes are over all ranks."""

    version: str = Field(description="That of kvtiers.")
    chain: dict[str, Any] = Field(description="As `kvtiers validate --json` shows it.")
    file: str | None = Field(description="From which the engine read its chain at the start.")
    host: str
    pid: int
    block_tokens: int
    kv_bytes_per_token: int | None = Field(description="None: no tier has opened.")
    cache_tokens: int = Field(description="Of the engine's own cache.")
    spare_memory_bytes: int = Field(description="What its host pool may still take.")
    store_bytes_per_second: dict[str, float] = Field(
        description="By tier, while it stores; those that stored something."
    )
