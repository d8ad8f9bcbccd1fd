"""The phases that a chain can show, what the replica shares with the first engine, and prompts."""

from __future__ import annotations

from pathlib import Path

import yaml

from bench.demo.demo_plan import default_chain, load_prompts, make_plan
from spec.load import load_chain
from tiers.disk.spec import DiskSpec

CPU = {"type": "cpu", "capacity": "1GiB"}
REDIS = {"type": "redis", "url": "redis://127.0.0.1:1/0", "ttl": "1h"}


def disk(tmp_path: Path, **more: str) -> dict[str, str]:
    return {"type": "disk", "capacity": "1GiB", "path": str(tmp_path / "blocks"), **more}


def write(tmp_path: Path, *tiers: dict[str, str]) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({"version": 1, "tiers": list(tiers)}))
    return path


def test_the_demos_own_chain_shows_every_phase(tmp_path: Path) -> None:
    plan = make_plan(default_chain(tmp_path, "redis://127.0.0.1:1/0"), tmp_path)
    assert [run.phases for run in plan.runs] == [("cold", "cpu"), ("disk",), ("remote",)]
    assert plan.serving == {"cpu": {"cpu"}, "disk": {"disk"}, "remote": {"redis"}}
    assert plan.skipped == {}


def test_a_replica_shares_redis_and_not_the_disk(tmp_path: Path) -> None:
    mine = write(tmp_path, CPU, disk(tmp_path), REDIS)
    plan = make_plan(mine, tmp_path)
    (first, _, replica) = (load_chain(run.chain) for run in plan.runs)
    assert first.tiers[0] == replica.tiers[0] and first.tiers[2] == replica.tiers[2]
    one, other = first.tiers[1], replica.tiers[1]
    assert isinstance(one, DiskSpec) and isinstance(other, DiskSpec)
    assert one.path != other.path


def test_phases_without_a_tier_to_show_are_left_out_and_said(tmp_path: Path) -> None:
    plan = make_plan(write(tmp_path, CPU, REDIS), tmp_path)
    assert [run.phases for run in plan.runs] == [("cold", "cpu"), ("remote",)]
    assert plan.skipped == {"disk": "the chain has no disk tier"}


def test_a_tier_that_another_would_hide_is_left_out(tmp_path: Path) -> None:
    plan = make_plan(write(tmp_path, REDIS, disk(tmp_path, name="nvme")), tmp_path)
    assert [run.phases for run in plan.runs] == [("cold",), ("remote",)]
    assert "redis tier comes before the disk tier" in plan.skipped["disk"]


def test_tiers_of_one_type_serve_a_phase_together(tmp_path: Path) -> None:
    spare = disk(tmp_path / "spare", name="spare")
    plan = make_plan(write(tmp_path, disk(tmp_path, name="nvme"), spare), tmp_path)
    assert plan.serving == {"disk": {"nvme", "spare"}}


def test_conversations_are_long_multi_turn_chats_that_end_with_a_question() -> None:
    for conversation in load_prompts()[1]:
        roles = [message["role"] for message in conversation.messages]
        assert roles == ["user", "assistant", "user"]
        assert len(conversation.messages[0]["content"].split()) > 500
        assert conversation.messages[-1]["content"].endswith("?")


def test_no_two_conversations_share_a_beginning() -> None:
    warm_up, measured = load_prompts()
    beginnings = {c.messages[0]["content"][:20] for c in [*measured, warm_up]}
    assert len(beginnings) == len(measured) + 1
