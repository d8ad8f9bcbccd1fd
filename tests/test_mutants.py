"""The kit's own test: mutants of stores. `python -m tests.mutants` tries all of them."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Sequence

import pytest

from tests.mutants.mutant import ROOT
from tests.mutants.table import MUTANTS, SAMPLE
from tiers.store import Block, TierStore
from tiers.testing import MemoryStore, StoreContract


def test_each_mutant_is_one_and_compiles() -> None:
    for mutant in MUTANTS:
        source = mutant.source()
        compile(source, mutant.file, "exec")
        assert source != (ROOT / mutant.file).read_text(), mutant.what


def test_there_are_enough_and_no_two_of_one_name() -> None:
    names = Counter((mutant.store, mutant.what) for mutant in MUTANTS)
    assert set(names.values()) == {1} and len(MUTANTS) >= 100
    stores = {"template", "disk", "redis", "object", "shared", "upkeep", "capacity"}
    assert {mutant.store for mutant in MUTANTS} == stores | {"lru", "arc", "admission"}


def test_the_kit_catches_a_sample() -> None:
    """In a process that has imported no store."""
    command = [sys.executable, "-m", "tests.mutants", "--sample"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"all: {len(SAMPLE)} of {len(SAMPLE)}, and 0 equivalent" in done.stdout, done.stdout


def test_a_verb_that_never_ends_fails_its_test_alone() -> None:
    ends = threading.Event()

    class Hangs(MemoryStore):
        def get(self, blocks: Sequence[Block]) -> list[bool]:
            ends.wait()
            return super().get(blocks)

    class Kit(StoreContract):
        limit_seconds = 0.2

        def open_store(self, payload_bytes: int) -> TierStore:
            return Hangs()

    try:
        with pytest.raises(AssertionError, match=r"not ended after 0.2 s; .*\n(.*\n)*.*in get"):
            Kit().test_what_was_put_is_got()
    finally:
        ends.set()
