"""A real vLLM server over a chain: what it shows in /metrics, its log and its events is true."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.engine.vllm.metrics import Samples
from tests.engine.vllm.tiny_vllm import BLOCK_BYTES, BLOCK_TOKENS, Run, documents
from tests.engine.vllm.vllm_server import VllmServer
from tiers.host.slots import slot_stride

pytestmark = pytest.mark.vllm

PROMPTS = documents(4, 600)
"""Of 18 full blocks each; the engine's own 40 blocks keep two of them."""
REFUSED = "everybodys"
"""A tier whose folder others may write to."""
TRAINED = "tests.engine.vllm.training.Trained"
"""A worker extension that changes weights."""
FIRST: list[Samples] = []
"""The metrics before the first request."""
REPORTED: list[Any] = []
"""The transfer parameters of the responses to prompts that the tiers have."""
PATIENCE = 60.0
"""Seconds after which what does not come is missing: protection from hanging."""


@pytest.fixture(scope="module")
def served(
    tiny_llama: Path,
    vllm_jobs: subprocess.Popen[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[VllmServer]:
    """A server that was asked for four prompts, then for one that its cpu tier still holds, and
    for one that only its disk tier does."""
    folder = tmp_path_factory.mktemp("server")
    chain = folder / "chain.yaml"
    tiers = [
        {"type": "cpu", "capacity": 3 * 18 * slot_stride(BLOCK_BYTES)},
        {"type": "disk", "capacity": "64MiB", "path": str(folder / "disk"), "name": "ssd"},
    ]
    everybodys = folder / "everybodys"
    everybodys.mkdir()
    everybodys.chmod(0o777)
    tiers += [{"type": "disk", "capacity": "64MiB", "path": str(everybodys), "name": REFUSED}]
    chain.write_text(
        yaml.safe_dump({"version": 1, "load_when": "always", "staging": "64MiB", "tiers": tiers})
    )
    options = {"worker-extension-cls": TRAINED}
    server = VllmServer(tiny_llama, chain, folder / "log", vllm_jobs, **options)
    try:
        FIRST[:] = [_opened(server)]
        answers = [server.complete(prompt, 8) for prompt in PROMPTS]
        assert len(set(map(tuple, answers))) == 4, "the prompts must matter"
        assert server.reported is None
        for number in (1, 0):
            server.settle()
            assert server.complete(PROMPTS[number], 8) == answers[number]
            REPORTED.append(server.reported)
        server.settle()
        yield server
    finally:
        server.close()


def _opened(server: VllmServer) -> Samples:
    """What is shown once the tiers have opened, before the first request."""
    deadline = time.monotonic() + PATIENCE
    while (found := Samples(server.page())).state("ssd") == "opening":
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return found


def test_how_each_tier_opened_is_shown_before_the_first_request(served: VllmServer) -> None:
    (first,) = FIRST
    states = {tier: first.state(tier) for tier in ("cpu", "ssd", REFUSED)}
    assert states == {"cpu": "open", "ssd": "open", REFUSED: "refused"}
    assert first.value("lookups_total", tier="ssd") == 0
    assert first.value("reads_up", tier="ssd") == 1 and first.value("reads_up", tier=REFUSED) == 0
    assert first.value("capacity_bytes", tier="ssd") == 64 << 20
    (line,) = [one for one in served.log.read_text().splitlines() if "is unusable" in one]
    assert REFUSED in line and "chmod it to 0700" in line


def test_metrics_agree_with_what_was_done(served: VllmServer) -> None:
    metrics = served.metrics()

    def ours(name: str) -> dict[str, float]:
        found = metrics[f"vllm:kvtiers_{name}"]
        return {tier: value for tier, value in found.items() if tier != REFUSED}

    loaded = ours("loaded_tokens_total")
    assert 0 < loaded["cpu"] <= 18 * 32 and loaded["ssd"] == 18 * 32
    assert sum(loaded.values()) == metrics["vllm:external_prefix_cache_hits_total"][""]
    assert ours("lookups_total") == {"cpu": 6, "ssd": 5}, "the cpu tier's hit ends one"
    assert ours("hits_total") == {"cpu": 1, "ssd": 1}
    assert ours("stored_blocks_total") == {"cpu": 5 * 18, "ssd": 4 * 18}, "one was promoted"
    assert ours("evictions_total")["cpu"] == 2 * 18
    assert set(ours("load_failures_total").values()) == {0}
    assert 0 < ours("load_engine_seconds")["ssd"] < PATIENCE, "beside its one load"


def test_each_response_and_tenant_has_what_the_tiers_loaded(served: VllmServer) -> None:
    from_cpu, from_disk = (reported["kvtiers"]["cached_tokens"] for reported in REPORTED)
    assert from_disk == {"ssd": 18 * 32}
    samples = Samples(served.page())
    of_tier = {tier: samples.value("loaded_tokens_total", tier=tier) for tier in ("cpu", "ssd")}
    assert of_tier == {"cpu": from_cpu["cpu"], **from_disk}
    ours = {
        name: samples.value(f"tenant_{name}_total", tenant="(other)")
        for name in ("loaded_tokens", "prefill_seconds", "load_seconds", "loaded_bytes")
    }
    assert ours["loaded_tokens"] == sum(of_tier.values())
    size = BLOCK_BYTES / BLOCK_TOKENS
    assert ours["loaded_bytes"] >= size * ours["loaded_tokens"], "and of blocks that came too late"
    rate = samples.value("prefill_tokens_per_second", tier="cpu")
    assert 0.1 < ours["prefill_seconds"] * rate / ours["loaded_tokens"] < 10, "as then measured"
    assert 0 < ours["load_seconds"] < PATIENCE


def test_histograms_agree_with_the_counters(served: VllmServer) -> None:
    metrics = served.metrics()

    def ours(name: str) -> dict[str, float]:
        found = metrics[f"vllm:kvtiers_{name}"]
        return {tier: value for tier, value in found.items() if tier != REFUSED}

    lookups = ours("lookups_total")
    assert ours("lookup_seconds_count") == ours("lookup_notice_seconds_count") == lookups
    assert ours("load_seconds_count") == ours("load_size_bytes_count") == {"cpu": 1, "ssd": 1}
    assert ours("store_seconds_count") == {"cpu": 5, "ssd": 4}
    for name in ("lookup_seconds_sum", "load_seconds_sum", "store_seconds_sum"):
        assert all(0 < seconds < PATIENCE for seconds in ours(name).values())
    for verb, past in (("load", "loaded"), ("store", "stored")):
        size = ours(f"{verb}_size_bytes_sum")
        assert size == ours(f"{past}_bytes_total")
        assert size == {t: n * BLOCK_BYTES for t, n in ours(f"{past}_blocks_total").items()}


def test_the_engines_log_line_names_the_tiers(served: VllmServer) -> None:
    expected = f"ssd: {18 * 32} tokens loaded"
    deadline = time.monotonic() + PATIENCE
    while True:
        lines = [li for li in served.log.read_text().splitlines() if "KV Transfer metrics" in li]
        if any(expected in line for line in lines):
            break
        assert time.monotonic() < deadline, lines
        time.sleep(0.2)
    assert any("blocks evicted" in line for line in lines), lines
    assert all(line.count("=") == 1 + line.count("pid=") for line in lines), lines


def test_a_subscriber_learns_which_tier_holds_what(served: VllmServer) -> None:
    deadline = time.monotonic() + PATIENCE
    removed = 0
    while removed < 2 * 18:
        assert time.monotonic() < deadline, served.events
        time.sleep(0.05)
        removed = sum(
            len(event["block_hashes"])
            for event in list(served.events)
            if event["type"] == "BlockRemoved" and event["medium"] == "CPU"
        )
    held: dict[str, set[int]] = {"GPU": set(), "CPU": set(), "STORAGE": set()}
    for event in list(served.events):
        if event["type"] == "BlockStored":
            held[event["medium"]] |= set(event["block_hashes"])
            assert event["block_size"] == 32
        elif event["type"] == "BlockRemoved":
            held[event["medium"]] -= set(event["block_hashes"])
    assert len(held["STORAGE"]) == 4 * 18 and len(held["CPU"]) == 3 * 18
    assert held["CPU"] < held["STORAGE"] > held["GPU"], "blocks have one name"


def test_our_log_lines_look_like_the_engines(served: VllmServer) -> None:
    """Level, process and time are in each, and what is below a warning is there too."""
    log = served.log.read_text().splitlines()
    lines = [line for line in log if "io is" in line]
    assert lines, "what a tier chose at start is in the log"
    opened = [line for line in log if "is open, load priority" in line]
    assert ["'cpu'" in opened[0], "'ssd'" in opened[1], len(opened)] == [True, True, 2], opened
    lines += opened + [line for line in log if "chain of 2 tier(s)" in line]
    assert all(" pid=" in line and " INFO " in line for line in lines), lines


@pytest.mark.fault
def test_a_reset_by_http(served: VllmServer, run_vllm: Callable[..., Run]) -> None:
    """The last test here: it changes what the others count."""
    old, (new,) = PROMPTS[3], documents(1, 600, seed=7)
    before = served.metrics()["vllm:kvtiers_loaded_tokens_total"]
    served.post("/collective_rpc", {"method": "turn"})
    assert served.post("/reset_prefix_cache") == {"success": True}
    answers = [[served.complete(prompt, 8)] for prompt in (old, new)]
    served.settle()
    assert served.metrics()["vllm:kvtiers_loaded_tokens_total"] == before
    disk = {"type": "disk", "capacity": "64MiB", "path": str(served.log.with_name("disk"))}
    asked: list[list[Any]] = [[(old, 8)], [(new, 8)]]
    replica = run_vllm(asked, [{**disk, "name": "ssd"}], worker_extension_cls=TRAINED)
    assert replica.cached == [[18 * 32], [0]]
    assert replica.tokens[0] != answers[0] and replica.tokens[1] != answers[1], "it must matter"
