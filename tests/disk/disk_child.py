"""A process that uses a disk tier until it is killed, or for so many rounds."""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

from disk_audit import get, key, open_disk, put

from tiers.disk.slab import slot_bytes

PAYLOADS = (60_000, 9_000)
NUMBERS = 120


def payload_of_number(number: int) -> int:
    return PAYLOADS[number % 2]


def churn(path: Path, seed: int, rounds: int) -> None:
    """Put, get, touch and drop at random, with both payload lengths."""
    chance = random.Random(seed)
    store = open_disk(path, slots=16)
    print("ready", flush=True)
    for _ in range(rounds):
        odd = chance.randrange(2)
        some = [key(2 * n + odd) for n in chance.sample(range(NUMBERS // 2), 6)]
        put(store, some, PAYLOADS[odd])
        get(store, some[:4], PAYLOADS[odd])
        store.touch(some[4:])
        if chance.random() < 0.2:
            store.drop(some[:2])
    store.close()


def reserve(path: Path) -> None:
    """Take slots and never settle them: what a process killed while it writes leaves."""
    store = open_disk(path)
    store._vault.reserve({key(900): slot_bytes(60_000), key(901): slot_bytes(60_000)})
    print("ready", flush=True)
    time.sleep(600)


if __name__ == "__main__":
    if sys.argv[1] == "churn":
        churn(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    else:
        reserve(Path(sys.argv[2]))
