"""`kvtiers check`: the kit on a tier type, from the outside."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from typer.testing import CliRunner

from tests.cli.conftest import Ran
from tests.support.plugin_packages import Install
from tiers.cli.main import app
from tiers.testing.check import Result

Run = Callable[..., Ran]

FORGETS = """
from typing import ClassVar, Literal
from spec.offloading import StoreSpec
from tiers.testing import MemoryStore

class Forgets(MemoryStore):
    def get(self, blocks):
        return super().get(blocks)[:32] + [False] * len(blocks[32:])

    def drop(self, keys):
        if len(keys) > 100:
            raise ValueError("broken\\nand a page of details")
        super().drop(keys)

STORE = Forgets()

class BoxSpec(StoreSpec):
    type: Literal["box"] = "box"

    def open(self, site):
        return STORE

    def scratch(self, folder):
        return self

class FixedSpec(BoxSpec):
    type: Literal["fixed"] = "fixed"

    def scratch(self, folder):
        return None
"""


def test_what_fails_is_named_and_the_rest_is_tried(plugin: Install) -> None:
    plugin("boxes", FORGETS, box="BoxSpec", fixed="FixedSpec")
    said = CliRunner().invoke(app, ["check", "box", "--limit", "60"])
    lines = said.output.splitlines()
    assert said.exit_code == 1, said.output
    assert any(line.startswith("failed   a whole batch") for line in lines), said.output
    line = next(line for line in lines if line.startswith("failed   a drop of many keys"))
    assert "ValueError: broken (" in line and "boxes.py:" in line and line.endswith(")")
    assert "details" not in line, "an error is one line with its place"
    assert "passed   what was put is got" in lines
    assert any(
        line.startswith("skipped  puts are counted: Forgets has no Counts") for line in lines
    )
    assert "failed" in lines[-1] and "passed" in lines[-1]


LEAVES = """
import sys
from typing import Literal
from spec.offloading import StoreSpec
from tiers.testing import MemoryStore

class Leaves(MemoryStore):
    def put(self, blocks):
        HOW

class LeavesSpec(StoreSpec):
    type: Literal["leaves"] = "leaves"

    def open(self, site):
        return Leaves()

    def scratch(self, folder):
        return self
"""


@pytest.mark.parametrize(
    ("module", "how", "says"),
    [
        ("leaving", "sys.exit('no server')", "SystemExit: no server ("),
        ("panics", "raise type('Panic', (BaseException,), {})('no server')", "Panic: no server ("),
    ],
)
def test_a_store_that_ends_the_process_fails(
    module: str, how: str, says: str, plugin: Install, kvtiers: Run
) -> None:
    plugin(module, LEAVES.replace("HOW", how), leaves="LeavesSpec")
    said = kvtiers("check", "leaves")
    lines = said.out.splitlines()
    assert said.status == 1, said
    failed = [line for line in lines if line.startswith("failed   what was put is got: ")]
    assert says in failed[0] and f"{module}.py:" in failed[0]
    assert "failed" in lines[-1] and "passed" in lines[-1]


def test_a_store_that_does_not_answer_does_not_keep_the_process(
    kvtiers: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    hung = Result("what was put is got", "failed", "it has not ended", is_endless=True)
    left: list[int] = []
    monkeypatch.setattr(os, "_exit", left.append)
    monkeypatch.setattr("tiers.testing.check.check", lambda place, limit: iter([hung]))
    said = kvtiers("check", "disk", "--settings", "capacity=64MiB")
    assert said.out.splitlines()[1:] == ["1 failed"]
    assert left == [1]


def test_what_can_not_be_tried_apart_is_refused(plugin: Install, kvtiers: Run) -> None:
    plugin("boxes", FORGETS, box="BoxSpec", fixed="FixedSpec")
    for words, why in (
        (["fixed"], "does not say how it is moved"),
        (["cpu"], "host memory"),
        (["dsik"], "did you mean disk"),
        (["box", "--settings", "colour=red"], "colour"),
        (["disk", "--settings", "capacity=2030-13-45"], "month must be in 1..12"),
    ):
        said = kvtiers("check", *words)
        assert said.status in (1, 2) and why in said.err, said
        assert (said.out + said.err).count(why) == 1, "it is said once, not by each test"
