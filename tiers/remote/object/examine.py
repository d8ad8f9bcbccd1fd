"""The object tier's findings before an engine starts: what it is allowed to do there, and how fast.

What is stored to try it has keys that no engine has, and is deleted.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress

from spec.fields import format_size
from spec.findings import DoctorFinding
from tiers.errors import TierError, TierRefused, TierUnavailable
from tiers.remote.object.obstore_bucket import LISTED_AT_ONCE, ObstoreBucket
from tiers.remote.object.upkeep import PACE, ObjectTerms
from tiers.remote.packs.lease import Count, Lease
from tiers.remote.packs.pack import PACK_BYTES, name_of
from tiers.remote.packs.pack_store import PackStore
from tiers.remote.trial import judged, look_up, move

PACKS = 4
SLOW_LOOKUP = 0.1
_REMEDIES = {
    "Skew": "set this host's clock, by NTP",
    "403": "correct secrets, and let them get, put, delete and list objects there",
    "401": "correct secrets",
    "NoSuchBucket": "make the bucket, or correct url",
    "not there": "make the bucket, or correct url",
    "501": "use a server that has conditional puts (If-None-Match)",
}


def examine(
    store: PackStore, bucket: ObstoreBucket, capacity: int | None
) -> Iterator[DoctorFinding]:
    """Findings about a store that was opened for blocks of `PACK_BYTES`, and its bucket; `capacity`
    in bytes."""
    keys = [os.urandom(48) for _ in range(PACKS)]
    try:
        yield from _look_up(store)
        yield from _claim(bucket, name_of(keys[0]))
        yield from _look_beside(bucket) if capacity is None else _keep(bucket, capacity)
        yield from _move(store, keys)
    except (TierUnavailable, OSError) as error:
        change = next((what for word, what in _REMEDIES.items() if word in str(error)), "")
        yield DoctorFinding(
            "error",
            str(error),
            change or "see whether endpoint and url are right, and the server answers",
            "nothing in the engine: until then blocks there are misses",
        )
    finally:
        with suppress(TierError, OSError):
            store.drop(keys)


def _look_up(store: PackStore) -> Iterator[DoctorFinding]:
    middle, took = look_up(store.reach)
    yield judged(
        f"a question takes {took}",
        middle >= SLOW_LOOKUP,
        "a look-up takes some of them",
        "use a bucket in this region",
        "requests wait longer before they are loaded or computed",
    )


def _claim(bucket: ObstoreBucket, name: str) -> Iterator[DoctorFinding]:
    bucket.put(name, [b"first"])
    if not bucket.put(name, [b"second"]):
        yield DoctorFinding("fine", "it takes a name once (conditional puts)")
    else:
        yield DoctorFinding(
            "error",
            "it lets the second of two engines replace what the first has put",
            "use a server that has conditional puts (If-None-Match)",
            "blocks of prompts that part are lost again and again",
        )
    bucket.delete([name])


def _keep(bucket: ObstoreBucket, capacity: int) -> Iterator[DoctorFinding]:
    """Do what an evictor does, but for its deletes, which `_claim` has tried."""

    def refused(error: TierRefused) -> None:
        raise error

    listed = next(bucket.list(refused), ())
    count, ours = _last_count(bucket), format_size(capacity)
    if not count.round:
        some = "more than " * (len(listed) == LISTED_AT_ONCE) + f"{len(listed):,} packs"
        yield DoctorFinding("fine", f"it may list and delete; {some} there, not counted yet")
    elif count.capacity == capacity:
        used = format_size(count.used)
        yield DoctorFinding("fine", f"it may list and delete; {used} of {ours} when last counted")
    else:
        yield _others(f"capacity {ours}", count)


def _look_beside(bucket: ObstoreBucket) -> Iterator[DoctorFinding]:
    """Whether others have a capacity there. Who has none need not be allowed to list."""
    with suppress(TierError, OSError):
        if (count := _last_count(bucket)).round:
            yield _others("no capacity", count)


def _last_count(bucket: ObstoreBucket) -> Count:
    return Lease(ObjectTerms(bucket), PACE.beat).last_count()


def _others(ours: str, count: Count) -> DoctorFinding:
    return DoctorFinding(
        "warning",
        f"{ours}, and an engine with {format_size(count.capacity)} evicts for all",
        "let all engines say the same",
        "what the others count on is evicted, or finds no room",
    )


def _move(store: PackStore, keys: Sequence[bytes]) -> Iterator[DoctorFinding]:
    _, loaded, is_slow, rates = move(store, keys, PACK_BYTES, at_once=PACKS)
    if not all(loaded):
        yield DoctorFinding("error", "what was stored was not there at once", "see its log")
        return
    yield judged(rates, is_slow, "requests would time out", "a faster link", "what it costs")
