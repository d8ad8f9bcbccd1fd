"""A chain's YAML becomes another chain's, and keeps what nobody changed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from spec.load import parse_chain
from tests.tuning.search.test_search import budget
from tiers.tuning.search.chain_edit import CannotEdit, edited
from tiers.tuning.simulation.sim_chain import SimChain

GIVEN = budget({"cpu": (1000, {}), "disk": (1000, {}), "redis": (1000, {})})
BLOCK = """\
version: 1   # ours
salt: "x: y"
tiers:       # fastest first
  # memory
  - type: cpu
    capacity: 1GiB   # half

  # the NVMe
  - {type: disk, path: /kv, capacity: 20GB}
record:
  path: /trace  # kept
"""
OUTSIDE = BLOCK.replace("  -", "-").replace("    capa", "  capa")
FLOW = (
    "{version: 1, tiers: [{type: cpu, capacity: 1GiB}, "
    "{type: disk, path: /kv, capacity: 20GB}], promote: false}"
)


def changed(text: str, order: str = "cpu disk", **keys: Any) -> str:
    """`keys`: those of the cpu tier, or of the chain."""
    present = parse_chain(text)
    now = SimChain.of(present)
    tiers = {tier.type: tier for tier in now.tiers}
    of_tier = {key: value for key, value in keys.items() if key in tiers["cpu"].__dict__}
    tiers["cpu"] = replace(tiers["cpu"], **of_tier)
    tiers["redis"] = replace(tiers["disk"], name="redis", type="redis", capacity=10**9)
    of_chain = {key: value for key, value in keys.items() if key not in of_tier}
    new = replace(now, tiers=tuple(tiers[kind] for kind in order.split()), **of_chain)
    return edited(text, present, new, GIVEN)


def test_a_value_is_exchanged_in_its_place() -> None:
    assert changed(BLOCK, capacity=3 << 30) == BLOCK.replace("1GiB ", "3GiB ")
    assert changed(FLOW, promote=True) == FLOW.replace("false", "true")


def test_a_key_is_added_where_its_mapping_is() -> None:
    both = changed(BLOCK, eviction="arc", load_policy="first")
    assert both == BLOCK.replace("# ours\n", "# ours\nload_policy: first\n").replace(
        "- type: cpu\n", "- type: cpu\n    eviction: arc\n"
    )
    text = changed(FLOW, store_threshold=2, load_when="always")
    assert "{type: cpu, store_threshold: 2, capacity: 1GiB}" in text
    assert text.startswith("{version: 1, load_when: always, tiers:")


@pytest.mark.parametrize(
    "text", [BLOCK, BLOCK.replace("  -", "-").replace("   capa", " capa"), FLOW]
)
@pytest.mark.parametrize("order", ["disk cpu", "disk", "cpu", "redis cpu disk", "disk redis"])
def test_tiers_come_leave_and_change_places(text: str, order: str) -> None:
    found = changed(text, order)
    assert [tier.type for tier in parse_chain(found).tiers] == order.split()
    for kept in ('salt: "x: y"\n', "record:\n  path: /trace  # kept\n", "# fastest first"):
        assert kept in found or text == FLOW
    assert ("half" in found) == ("cpu" in order and text != FLOW)
    assert ("the NVMe" in found) == ("disk" in order and text != FLOW)


GHOSTS = """\
ghosts:  # what else
  - {tier: cpu, capacity: 2x}  # more memory
  - tier: disk
    store_threshold: 2
  - {tier: redis, capacity: 1GB, load_rate: 1GB/s}
explain: {}
"""


@pytest.mark.parametrize(
    ("order", "kept"),
    [("disk", "disk redis"), ("cpu redis", "cpu"), ("redis", ""), ("disk cpu", "cpu disk redis")],
)
def test_ghosts_leave_with_their_tiers_and_where_what_they_stand_for_comes(
    order: str, kept: str
) -> None:
    flow = (
        ", ghosts: [{tier: cpu, capacity: 2x}, {tier: disk, store_threshold: 2}, "
        "{tier: redis, capacity: 1GB, load_rate: 1GB/s}]}"
    )
    for text in (BLOCK + GHOSTS, FLOW[:-1] + flow):
        found = changed(text, order)
        chain = parse_chain(found)
        assert [ghost.tier for ghost in chain.ghosts] == kept.split()
        assert [tier.type for tier in chain.tiers] == order.split()
        assert ("# more memory" in found) == ("cpu" in kept and text[0] == "v")
        assert found.endswith("explain: {}\n") or text[0] == "{"


def test_what_refers_to_a_tier_that_leaves_is_named() -> None:
    with pytest.raises(CannotEdit, match=r"tenants.*cpu.*change it by hand"):
        changed(BLOCK + "tenants: {acme: {tiers: [cpu]}}\n", "disk")


def test_what_can_t_be_edited_is_refused() -> None:
    """An anchor makes two values one."""
    text = "version: 1\npromote: &a false\nreport_cached_tokens: *a\n"
    text += "tiers: [{type: cpu, capacity: 1GiB}, {type: disk, path: /kv, capacity: 20GB}]\n"
    with pytest.raises(CannotEdit, match="by hand"):
        changed(text, promote=True)
    keys = "version: 1\ntiers:\n  - ? type\n    : cpu\n    ? capacity\n    : 1GiB\n"
    with pytest.raises(CannotEdit, match="by hand"):
        changed(
            keys + "  - {type: disk, path: /kv, capacity: 20GB}\n",
            eviction="arc",
            store_threshold=2,
        )
