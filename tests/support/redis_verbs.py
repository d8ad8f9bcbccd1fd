"""What tests of the redis tier share: an open store, and its verbs with memory that is checked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from spec.offloading import StoreContext
from tiers.remote.redis.redis_store import RedisStore
from tiers.remote.spec import RedisSpec
from tiers.store import TierStore
from tiers.testing import Memory
from tiers.wrappers.guard import Guarded

PAYLOAD = 65536


@contextmanager
def opened(url: str, payload_bytes: int = PAYLOAD, **settings: Any) -> Iterator[RedisStore]:
    """A store on that server, which is waited for no longer than a busy machine needs."""
    spec = RedisSpec.model_validate({"url": url, "timeout": "5s", **settings})
    store = spec.open(StoreContext(payload_bytes=payload_bytes))
    try:
        yield store
    finally:
        store.close()


def put(store: TierStore, *keys: bytes, payload_bytes: int = PAYLOAD) -> list[bool]:
    """Store payloads that their keys make."""
    return store.put(Memory(keys, payload_bytes).fill().blocks)


def get(store: TierStore, *keys: bytes, payload_bytes: int = PAYLOAD) -> list[bool]:
    """Load them; every hit must be what was stored."""
    memory = Memory(keys, payload_bytes)
    hits = store.get(memory.blocks)
    assert all(memory.holds(index) for index, hit in enumerate(hits) if hit)
    return hits


def name(key: bytes) -> bytes:
    """What a key is called on a server by default."""
    return b"kvtiers:" + key


def is_up(guarded: Guarded) -> bool:
    """Whether reads and writes worked when they were last tried."""
    return guarded.health.reads_up and guarded.health.writes_up
