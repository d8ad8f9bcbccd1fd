"""`kvtiers replay`: what it prints and writes, and what it says of input that is none."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.cli.conftest import Ran
from tiers.traces.recorded import FileHeader, encode_header, encode_request
from tiers.traces.trace import TraceRequest

CHAIN = """
version: 1
load_policy: first  # under stitched both tiers share a load by their speed
tiers:
  - {type: cpu, capacity: 20GiB}
  - {type: disk, capacity: 64GiB, path: /nowhere}
"""
PROFILE = """
kv_bytes_per_token: 131072
engine_cache: 2GiB
prefill_rate: 20000
tiers:
  cpu: {load_bandwidth: 20GB/s, store_bandwidth: 20GB/s}
  disk: {load_bandwidth: 5GB/s, store_bandwidth: 3GB/s, endurance: 600TB}
"""


@pytest.fixture
def arguments(tmp_path: Path) -> list[object]:
    """A trace in which the second half repeats the first, a chain and a profile."""
    lines = [
        {
            "timestamp": 1000 * number,
            "input_length": 5 * 512 + 7,
            "output_length": 10,
            "hash_ids": [5 * (number % 50) + block for block in range(6)],
        }
        for number in range(100)
    ]
    files = {
        "trace.jsonl": "".join(json.dumps(line) + "\n" for line in lines),
        "chain.yaml": CHAIN,
        "profile.yaml": PROFILE,
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    trace, chain, profile = (tmp_path / name for name in files)
    return [trace, "--chain", chain, "--profile", profile]


@pytest.mark.parametrize("how", [[], ["--real"]], ids=["simulated", "real"])
def test_the_report_is_printed_and_written(
    kvtiers: Callable[..., Ran], arguments: list[object], tmp_path: Path, how: list[str]
) -> None:
    ran = kvtiers("replay", *arguments, *how, "--warm", 0.5, "--json", tmp_path / "r.json")
    assert (ran.status, ran.err.strip()) == (0, "")
    assert "SSD life" in ran.out
    assert ("8 bytes of KV a token in place of 131072" in ran.out) is bool(how)
    said = json.loads((tmp_path / "r.json").read_text())
    assert said["requests"] == 50
    # All of the second half was stored in the first; 20 GiB hold it all.
    cpu, disk = (tier["hit_tokens"] for tier in said["tiers"])
    assert cpu + disk == 50 * 5 * 512
    assert disk < 0.1 * cpu, "probes"
    assert said["computed_tokens"] == 50 * 7
    kvtiers("replay", *arguments, *how, "--requests", 3, "--json", tmp_path / "r.json")
    assert json.loads((tmp_path / "r.json").read_text())["requests"] == 3


def test_without_a_profile_it_says_what_makes_one(
    kvtiers: Callable[..., Ran], arguments: list[object]
) -> None:
    """It named kvtiers bench alone, which names the keys to write, of which it writes `tiers`."""
    ran = kvtiers("replay", *arguments[:3])
    written, _, then = ran.err.partition(", then ")
    assert ran.status == 2 and then.startswith("kvtiers bench --chain")
    assert "write kv_bytes_per_token, engine_cache and prefill_rate: " in written


def test_what_is_wrong_is_said(
    kvtiers: Callable[..., Ran], arguments: list[object], tmp_path: Path
) -> None:
    (tmp_path / "profile.yaml").write_text(PROFILE.replace("disk:", "disc:"))
    ran = kvtiers("replay", *arguments)
    assert ran.status == 2 and "add disk: {load_bandwidth" in ran.err
    (tmp_path / "profile.yaml").write_text(PROFILE.replace("engine_cache", "engine_cash"))
    ran = kvtiers("replay", *arguments)
    assert ran.status == 2 and "did you mean engine_cache?" in ran.err
    (tmp_path / "profile.yaml").write_text(PROFILE)
    (tmp_path / "trace.jsonl").write_text("{}\n")
    ran = kvtiers("replay", *arguments)
    assert ran.status == 2 and "trace.jsonl:1" in ran.err


def test_prompts_that_no_engine_serves_are_said(
    kvtiers: Callable[..., Ran], arguments: list[object], tmp_path: Path
) -> None:
    """A replay for real refuses them; the simulation waited for room, and gave its times."""
    profile = tmp_path / "profile.yaml"
    for cache, warned in (("64MB", True), (0, False), ("2GiB", False)):
        profile.write_text(yaml.safe_dump(yaml.safe_load(PROFILE) | {"engine_cache": cache}))
        ran = kvtiers("replay", *arguments)
        assert ran.status == 0
        assert ("100 prompts are longer than the engine's cache" in ran.out) is warned, cache


def test_rules_that_are_not_replayed_are_said(
    kvtiers: Callable[..., Ran], arguments: list[object], tmp_path: Path
) -> None:
    chain = tmp_path / "chain.yaml"
    chain.write_text(chain.read_text() + "tenants: {a: {quota: 1MiB}}\n")
    ran = kvtiers("replay", *arguments)
    assert ran.status == 0
    assert ran.err == "rules of tenants are not replayed: a trace has no names of tenants\n"


@pytest.mark.parametrize("how", [[], ["--real"]])
def test_that_ghosts_are_not_replayed_is_said(
    kvtiers: Callable[..., Ran], arguments: list[object], tmp_path: Path, how: list[str]
) -> None:
    chain = tmp_path / "chain.yaml"
    chain.write_text(chain.read_text() + "ghosts: [{tier: cpu, capacity: 0.1x}]\n")
    ran = kvtiers("replay", *arguments, *how)
    assert (ran.status, ran.err) == (0, "ghosts are not replayed: curve is exact\n")
    assert "ghost" not in ran.out


@pytest.mark.parametrize("how", [[], ["--real"]])
def test_a_replay_says_who_shares_a_tier_and_a_real_one_that_nothing_expires(
    kvtiers: Callable[..., Ran], arguments: list[object], tmp_path: Path, how: list[str]
) -> None:
    """It served what a ttl of the trace's time had ended long before."""
    chain, profile = tmp_path / "chain.yaml", tmp_path / "profile.yaml"
    chain.write_text(
        "{version: 1, tiers: [{type: redis, url: 'redis://nowhere', ttl: 1m, maxmemory: 9GB}]}"
    )
    profile.write_text(PROFILE + "  redis: {load_bandwidth: 5GB/s, store_bandwidth: 3GB/s}\n")
    ran = kvtiers("replay", *arguments, *how)
    told = [
        "redis: taken to have the traffic of this trace alone; where other engines use the same "
        "place, they take a part of its room and link",
        "nothing expires with --real: a ttl passes in this machine's time",
        "redis evicts worse with --real: it tells ages apart by its seconds",
    ]
    assert (ran.status, ran.err.splitlines()) == (0, told[: 1 + 2 * len(how)])


def test_what_this_machine_cannot_do_is_said(
    kvtiers: Callable[..., Ran], arguments: list[object], tmp_path: Path
) -> None:
    for folder in (tmp_path / "none", tmp_path / "trace.jsonl"):
        ran = kvtiers("replay", *arguments, "--real", "--folder", folder)
        assert (ran.status, ran.out) == (2, "")
        assert ran.err.startswith(f"{folder}: it is no folder that can be written to")
    ran = kvtiers("replay", *arguments, "--real", "--scale", 10**9)
    assert (ran.status, ran.out) == (2, "")
    assert "no memory for the engine's cache" in ran.err and "--scale" in ran.err


def test_a_real_replay_uses_the_folder_named_and_leaves_nothing(
    kvtiers: Callable[..., Ran], arguments: list[object], tmp_path: Path
) -> None:
    folder = tmp_path / "fast"
    folder.mkdir()
    os.utime(folder, (0, 0))
    ran = kvtiers("replay", *arguments, "--real", "--requests", 3, "--folder", folder)
    assert (ran.status, ran.err.strip()) == (0, "")
    assert folder.stat().st_mtime > 0 and not [*folder.iterdir()]


def test_a_trace_of_another_model_is_said(
    kvtiers: Callable[..., Ran], arguments: list[object], tmp_path: Path
) -> None:
    trace = tmp_path / "recorded.jsonl"
    told = []
    for token_bytes in (23_040, 131_072, None):
        header = encode_header(FileHeader(512, 0.0, kv_bytes_per_token=token_bytes))
        trace.write_bytes(header + encode_request(TraceRequest(0.0, 1024, 1, [1, 2])))
        ran = kvtiers("replay", trace, *arguments[1:])
        assert ran.status == 0
        told.append(ran.err)
    assert told[1:] == ["", ""]
    assert told[0].startswith(
        "the profile says 131,072 KV bytes a token, and the engine that recorded the trace had "
        "23,040: "
    )


@pytest.mark.parametrize("how", [[], ["--real"]])
def test_a_server_is_as_large_as_the_chain_says(
    kvtiers: Callable[..., Ran], arguments: list[object], tmp_path: Path, how: list[str]
) -> None:
    """It was a comment, "Give it 1 GB at the server", that no replay read."""
    link = {"load_bandwidth": "5GB/s", "store_bandwidth": "3GB/s"}
    profile = yaml.safe_load(PROFILE) | {"tiers": {"redis": link}}
    (tmp_path / "profile.yaml").write_text(yaml.safe_dump(profile))
    chain = "version: 1\ntiers:\n- {type: redis, url: 'redis://127.0.0.1:1'%s}\n"
    hits = []
    for size in ("", ", maxmemory: 1GB"):
        (tmp_path / "chain.yaml").write_text(chain % size)
        ran = kvtiers("replay", *arguments, *how, "--json", tmp_path / "r.json")
        assert ran.status == 0 and "alone" not in ran.err, ran.err
        hits.append(json.loads((tmp_path / "r.json").read_text())["tiers"][0]["hit_tokens"])
    # The engine, which is left nothing to compute, may be measured by a block.
    assert hits[0] in (50 * 5 * 512, 50 * 5 * 512 - 512) and hits[1] < hits[0] / 5
