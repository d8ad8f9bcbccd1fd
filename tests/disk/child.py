"""What another process does with a disk tier, until it is killed, dies at a point, or is done."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

from tests.disk.audit import Other, folder_of, get, key, open_disk, put
from tiers.disk import slab
from tiers.disk.folder import clean_close
from tiers.disk.index.edit import Edit
from tiers.disk.slab import slot_bytes
from tiers.errors import TierFull, TierNotOpen

PAYLOADS = (60_000, 9_000)
NUMBERS = 120


def started(work: str, path: Path, *args: object) -> Other:
    """A process at one of the functions below, which has opened the tier."""
    child = running(work, path, *args)
    assert child.hear() == "ready"
    return child


def running(work: str, path: Path, *args: object) -> Other:
    return Other(f"from tests.disk.child import {work}; {work}(path, *{args})", path)


def payload_of_number(number: int) -> int:
    return PAYLOADS[number % 2]


def churn(path: Path, seed: int, rounds: int) -> None:
    """Put, get, touch and drop at random, with both payload lengths."""
    chance, store = random.Random(seed), None
    while store is None:
        with suppress(TierNotOpen):  # others write all the time; an engine opens it later, too
            store = open_disk(path, slots=16)
    print("ready", flush=True)
    for _ in range(rounds):
        odd = chance.randrange(2)
        some = [key(2 * n + odd) for n in chance.sample(range(NUMBERS // 2), 6)]
        with suppress(TierFull):  # others may have every slot reserved just now
            put(store, some, PAYLOADS[odd])
        get(store, some[:4], PAYLOADS[odd])
        store.touch(some[4:])
        if chance.random() < 0.2:
            store.drop(some[:2])
    store.close()


POINTS = {
    "slab write": (os, "pwritev"),
    "allocation": (os, "posix_fallocate"),
    "punch": (slab, "punch"),
    "eviction": (Edit, "retire"),
    "freeing": (Edit, "vacate"),
    "claim": (Edit, "claim"),
    "publish": (Edit, "publish"),
    "commit": (Edit, "save_state"),
    "digest": (clean_close, "record"),
    "digest written": (Path, "rename"),
}
"""Where `die` ends a process: a name and what holds it."""


def die(path: Path, point: str, count: int) -> None:
    """Die halfway through the `count`th call at a point, or the first if it is at the close."""
    where, name = POINTS[point]
    original = getattr(where, name)
    left = count if where not in (clean_close, Path) else 1

    def dying(*args: object) -> object:
        nonlocal left
        left -= 1
        if left == 0:
            if name == "pwritev":
                half = args[1][-1]  # type: ignore[index]
                original(args[0], [*args[1][:-1], half[: len(half) // 2]], args[2])  # type: ignore[index]
            elif count % 2 and where not in (clean_close,):
                original(*args)
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args)

    setattr(where, name, dying)
    churn(path, count, 40)


def shrink(path: Path, seed: int) -> None:
    """Drop blocks and shrink the tier, again and again."""
    chance = random.Random(seed)
    store = open_disk(path, slots=800)
    whole = store.usage().capacity or 0
    print("ready", flush=True)
    while True:
        put(store, [key(number) for number in range(800)], 9_000)
        for _ in range(4):
            store.drop([key(number) for number in chance.sample(range(800), 100)])
        folder_of(store).resize(store.usage().used // 2)
        folder_of(store).resize(whole)


def reserve(path: Path) -> None:
    """Reserve slots and never commit them: what a process killed while it writes leaves."""
    store = open_disk(path)
    folder_of(store).reserve({key(900): slot_bytes(60_000), key(901): slot_bytes(60_000)})
    print("ready", flush=True)
    time.sleep(600)
