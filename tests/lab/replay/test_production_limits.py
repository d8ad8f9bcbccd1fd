"""Disk and Redis with the limits that a chain has in production: no time limit is patched here."""

from __future__ import annotations

import secrets
from pathlib import Path

from tests.support.replay import ReplayEngine
from tests.support.replay_chains import MODEL, chain_of, close, disk, drive, measured, redis
from tests.support.servers import RedisServer
from tiers.connector.policy import request_state
from tiers.remote.spec import RedisSpec

ROUNDS = 20
"""A busy machine makes misses of some hits, and not of all hits of so many rounds."""


def test_disk_and_redis_load_within_the_default_limits(
    tmp_path: Path, shared_server: RedisServer
) -> None:
    assert request_state.LOOKUP_SECONDS <= 1, "somebody patched it"
    default = RedisSpec.model_fields["timeout"].default
    small = disk(tmp_path, "64KiB")
    server = redis(shared_server, secrets.token_hex(8), timeout=f"{default}s")
    engine = ReplayEngine(chain_of(small, server), MODEL, prefix_caching=False)
    try:
        for _ in range(ROUNDS):
            drive(engine, seed=1)
            engine.settle()
            if all(measured(engine, "loaded_tokens", tier) for tier in ("disk", "redis")):
                break
        assert measured(engine, "loaded_tokens", "disk") > 0
        assert measured(engine, "loaded_tokens", "redis") > 0
    finally:
        close(engine)
