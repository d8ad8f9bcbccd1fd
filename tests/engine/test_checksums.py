"""A block is checksummed once, behind its gather, and what changes it after that is seen."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import xxhash

from tests.support.replay import ReplayEngine, answer
from tests.support.replay_chains import MODEL, chain_of, cpu, disk, encryption, measured
from tiers.block import digest
from tiers.connector.worker import checksums
from tiers.store import Block

PROMPT = list(range(100, 141))
LOADED, STORED = 10, 11
"""Blocks of the prompt, and with the answer."""


@pytest.mark.fault
@pytest.mark.parametrize("encrypted", [False, True])
def test_a_bit_that_flips_before_the_write_is_a_miss(
    engine: Callable[..., ReplayEngine],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    encrypted: bool,
) -> None:
    more = encryption(tmp_path) if encrypted else {}
    made = engine(chain_of(disk(tmp_path / "disk", **more)), prefix_caching=False)
    worker: Any = made.workers[0]
    store = worker.connector.children[0]._store
    original = type(store).put

    def put(self: Any, blocks: Sequence[Block]) -> list[bool]:
        for block in blocks:
            block.payload[7] ^= 0x40
        answers: list[bool] = original(self, blocks)
        return answers

    right = answer(MODEL, PROMPT, 4, 1)
    with monkeypatch.context() as patch:
        patch.setattr(type(store), "put", put)
        assert made.generate(PROMPT, 4).output == right
        made.settle()
    assert made.generate(PROMPT, 4).output == right
    assert measured(made, "damaged_blocks", "disk") == LOADED
    assert measured(made, "loaded_tokens", "disk") == 0


def test_one_checksum_serves_all_tiers(
    engine: Callable[..., ReplayEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    original = xxhash.xxh3_128_digest

    def digest(data: Any) -> bytes:
        lengths.append(len(data))
        return original(data)

    tiers = [disk(tmp_path / name, name=name) for name in ("near", "far")]
    made = engine(chain_of(cpu(verify="always"), *tiers), prefix_caching=False)
    worker: Any = made.workers[0]
    size = worker.connector.children[0]._host.payload_bytes
    monkeypatch.setattr(xxhash, "xxh3_128_digest", digest)
    made.generate(PROMPT, 4)
    made.settle()
    assert measured(made, "stored_blocks", "near") == STORED
    assert measured(made, "stored_blocks", "far") == STORED
    assert lengths.count(size) == STORED


def test_the_first_batch_of_a_long_prompt_waits_for_its_own_checksums_alone(
    engine: Callable[..., ReplayEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tail, of 200 blocks, is put first."""
    batches: list[int] = []
    numbers, is_put = itertools.count(1), threading.Event()
    waited = list[bool]()

    def slowly(payload: Any) -> bytes:
        if next(numbers) == 65:
            waited.append(is_put.wait(10))
        return digest(payload)

    monkeypatch.setattr(checksums, "digest", slowly)
    chain = chain_of(disk(tmp_path, "16MiB", max_inflight="2MiB"), staging="2MiB")
    made = engine(chain, num_blocks=300, batch_tokens=1000, prefix_caching=False)
    worker: Any = made.workers[0]
    store = worker.connector.children[0]._store
    original = type(store).put

    def put(self: Any, blocks: Sequence[Block]) -> list[bool]:
        batches.append(len(blocks))
        is_put.set()
        answers: list[bool] = original(self, blocks)
        return answers

    monkeypatch.setattr(type(store), "put", put)
    made.generate(range(800), 1)
    made.settle()
    assert waited == [True] and batches == [8, 64, 64, 64]
    assert measured(made, "stored_blocks", "disk") == 200
