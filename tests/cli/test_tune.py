"""`kvtiers tune`: its exit status for each kind of end, and that nothing is left half written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.traffic import main as make_traffic
from spec.load import load_chain
from tests.cli.conftest import Ran
from tiers.cli import arguments as writing
from tiers.cli import tune as command
from tiers.errors import TraceError
from tiers.traces.recorded import FileHeader, encode_header, encode_request
from tiers.traces.trace import TraceRequest
from tiers.tuning.search import tune as searching

Kvtiers = Callable[..., Ran]
BUDGET = """
media:
  - {type: cpu, limit: 8GB}
machine:
  kv_bytes_per_token: 131072
  engine_cache: 4GB
  prefill_rate: 40000
  tiers:
    cpu: {load_bandwidth: 20GB/s, store_bandwidth: 20GB/s, price_per_gb_month: 3}
"""


@pytest.fixture
def given(tmp_path: Path) -> Path:
    """A folder with a trace and a budget."""
    make_traffic([str(tmp_path / "trace.jsonl"), "--requests", "60"])
    (tmp_path / "budget.yaml").write_text(BUDGET)
    return tmp_path


def arguments(folder: Path, **files: str) -> list[object]:
    named = [part for key, name in files.items() for part in (f"--{key}", folder / name)]
    budget = ["--budget", folder / "budget.yaml", "--chains", 20, "--processes", 1]
    return ["tune", folder / "trace.jsonl", *budget, *named]


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_trace_may_have_any_name(kvtiers: Kvtiers, given: Path) -> None:
    trace = given / os.fsdecode(b"\xff\nversion: 2.jsonl")
    (given / "trace.jsonl").rename(trace)
    name, _, *rest = arguments(given, out="chain.yaml", json="all.json")
    assert kvtiers(name, trace, *rest).status == 0
    assert kvtiers("validate", given / "chain.yaml").status == 0
    assert r"as in \udcff\nversion: 2.jsonl and" in (given / "chain.yaml").read_text()
    assert json.loads((given / "all.json").read_text())["trace"] == r"\udcff\nversion: 2.jsonl"


def test_which_tiers_other_engines_use_is_said(kvtiers: Kvtiers, given: Path) -> None:
    """A recording is of one engine: it had the whole room of what several share."""
    server = "{type: redis, limit: 1GB, settings: {url: 'redis://cache.internal'}}"
    link = "redis: {load_bandwidth: 1GB/s, store_bandwidth: 1GB/s, price_per_gb_month: 1}"
    text = BUDGET.replace("machine:", f"  - {server}\nmachine:") + f"    {link}\n"
    (given / "budget.yaml").write_text(text)
    assert kvtiers(*arguments(given)).err.startswith("redis: taken to have the traffic of this")


def test_what_is_found_is_written_whole(kvtiers: Kvtiers, given: Path) -> None:
    ran = kvtiers(*arguments(given, out="chain.yaml", json="all.json"))
    assert ran.status == 0
    assert f"The chain is in {given / 'chain.yaml'}." in ran.out
    assert kvtiers("validate", given / "chain.yaml").status == 0
    assert json.loads((given / "all.json").read_text())["tried"] > 5
    assert files(given) == ["all.json", "budget.yaml", "chain.yaml", "trace.jsonl"]


@pytest.mark.parametrize(
    ("objective", "said"),
    [
        ("objective: saved_seconds\n", "Against no tiers (TTFT mean"),
        ("objective: cost\nconstraints: {mean_ttft: 1h}\n", "is left out: the best chain with it"),
    ],
)
def test_an_objective_may_be_0_of_some_chains(
    kvtiers: Kvtiers, given: Path, objective: str, said: str
) -> None:
    """No tiers save nothing, and cost nothing. After the search there was a traceback."""
    (given / "budget.yaml").write_text(objective + BUDGET)
    ran = kvtiers(*arguments(given, json="all.json"))
    assert ran.status == 0 and said in ran.out and "+inf% ±?" in ran.out
    found = json.loads((given / "all.json").read_text(), parse_constant=pytest.fail)
    assert found["objective"] in objective


def test_minutes_are_minutes(
    kvtiers: Kvtiers, given: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = []

    def searched(*of: Any) -> None:
        seconds.append(of[4].seconds)
        raise TraceError("enough")

    monkeypatch.setattr(command, "searched", searched)
    for more in ((), ("--minutes", 2)):
        assert kvtiers(*arguments(given), *more).err == "enough\n"
    assert seconds == [None, 120.0]


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (BUDGET.replace("limit:", "limmit:"), "did you mean limit?"),
        (BUDGET.replace("type: cpu", "type: tape"), "tape"),
        (BUDGET.replace("    cpu: {", "    disk: {"), "add a profile of cpu to tiers"),
        ("media: [", "budget.yaml"),
        (None, "budget.yaml"),
    ],
)
def test_a_bad_budget(kvtiers: Kvtiers, given: Path, wrong: str | None, why: str) -> None:
    (given / "budget.yaml").unlink()
    if wrong is not None:
        (given / "budget.yaml").write_text(wrong)
    ran = kvtiers(*arguments(given, out="chain.yaml"))
    assert (ran.status, ran.out) == (2, "")
    assert why in ran.err
    assert not (given / "chain.yaml").exists()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "trace.jsonl"),
        ("", "trace.jsonl"),
        ('{"timestamp": 1}\n', "trace.jsonl:1"),
        (
            '{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}\n',
            "1 requests",
        ),
    ],
)
def test_a_bad_trace(kvtiers: Kvtiers, given: Path, text: str | None, why: str) -> None:
    (given / "trace.jsonl").unlink()
    if text is not None:
        (given / "trace.jsonl").write_text(text)
    ran = kvtiers(*arguments(given, out="chain.yaml"))
    assert (ran.status, ran.out) == (2, "")
    assert why in ran.err
    assert not (given / "chain.yaml").exists()


def test_a_trace_of_two_engines_is_refused(kvtiers: Kvtiers, given: Path) -> None:
    """Such users as of two engines' would share one engine's cache and its tiers."""
    (given / "trace.jsonl").unlink()
    (given / "trace.jsonl").mkdir()
    for writer in ("one", "other"):
        requests = (TraceRequest(1e3 * at, 600, 1, [2 * at, 2 * at + 1]) for at in range(60))
        lines = [encode_header(FileHeader(256, 0.0, writer)), *map(encode_request, requests)]
        (given / "trace.jsonl" / f"{writer}.jsonl").write_bytes(b"".join(lines))
    ran = kvtiers(*arguments(given))
    assert (ran.status, ran.out) == (2, "") and ran.err.startswith(
        "2 engines recorded at the same time"
    )
    (given / "trace.jsonl" / "other.jsonl").unlink()
    assert kvtiers(*arguments(given)).status == 0


def test_what_no_search_chooses_of_the_present_chain_is_named(
    kvtiers: Kvtiers, given: Path
) -> None:
    """A chain that was taken as it is lost its salt, its tenants and a tier's own keys."""
    (given / "present.yaml").write_text(
        "version: 1\nload_policy: first\nmax_wait: 3s\nsalt: ours\ntenants: {a: {quota: 1GB}}\n"
        "tiers: [{type: cpu, name: ram, capacity: 1GB, eviction: arc, verify: always}]\n"
    )
    ran = kvtiers(*arguments(given, out="chain.yaml", chain="present.yaml"))
    keys = "max_wait, tenants, salt, verify of ram"
    said = f"The present chain has more, which no search chooses: {keys}. Add it"
    assert (ran.status, ran.err) == (0, "")
    assert f"{said} there.\n" in ran.out
    written = (given / "chain.yaml").read_text()
    assert f"{said} here." in " ".join(written.replace("\n#", "").split())
    assert kvtiers("validate", given / "chain.yaml").status == 0
    (given / "present.yaml").write_text("version: 1\ntiers: [{type: cpu, capacity: 1GB}]\n")
    ran = kvtiers(*arguments(given, out="chain.yaml", chain="present.yaml"))
    assert "no search chooses" not in ran.out + (given / "chain.yaml").read_text()


@pytest.mark.parametrize(
    "tiers",
    [
        "{type: cpu, capacity: 64GB}",
        "{type: disk, capacity: 64GB, path: /a}, {type: disk, name: b, capacity: 64GB, path: /b}",
        "{type: redis, maxmemory: 64GB, url: 'redis://127.0.0.1'}",
    ],
)
def test_a_present_chain_beyond_the_budget_is_judged_and_not_chosen(
    kvtiers: Kvtiers, given: Path, tiers: str
) -> None:
    """It serves more than what the budget allows. It was written as the chosen chain, two disks
    with one path; or there was a traceback for a tier that is not among the media."""
    (given / "budget.yaml").write_text(
        BUDGET.replace("8GB}", "6GB}\n  - {type: disk, limit: 6GB, settings: {path: /new}}")
        + "    disk: {load_bandwidth: 20GB/s, store_bandwidth: 20GB/s}\n"
        + "    redis: {load_bandwidth: 20GB/s, store_bandwidth: 20GB/s}\n"
    )
    (given / "present.yaml").write_text(f"version: 1\ntiers: [{tiers}]\n")
    ran = kvtiers(*arguments(given, chain="present.yaml", out="chain.yaml", json="all.json"))
    assert ran.status == 0 and "\npresent " in ran.out
    found = json.loads((given / "all.json").read_text())
    assert found["present"]["objective"] < found["chosen"]["objective"]
    sizes = {tier.type: tier.capacity_bytes for tier in load_chain(given / "chain.yaml").tiers}
    assert sizes.keys() <= {"cpu", "disk"} and max(sizes.values()) <= 6 * 10**9
    assert kvtiers("validate", given / "chain.yaml").status == 0


@pytest.mark.parametrize(
    ("more", "chosen"),
    [
        (", verify: always", 48),
        ("", 64),
        (", verify: always}, {type: cpu, name: b, capacity: 1GB, verify: always", 64),
    ],
)
def test_a_present_chain_within_the_budget_may_be_chosen(
    kvtiers: Kvtiers, given: Path, more: str, chosen: int
) -> None:
    """If its tiers have what the budget sets, and differ in type. It was a quarter cheaper
    than the chosen chain."""
    make_traffic([str(given / "trace.jsonl"), "--requests", "400"])
    (given / "budget.yaml").write_text(
        "objective: cost\nconstraints: {mean_ttft: 560ms}"
        + BUDGET.replace("8GB}", "64GB, settings: {verify: always}}")
    )
    tiers = f"[{{type: cpu, capacity: 48GB, eviction: arc{more}}}]"
    (given / "present.yaml").write_text(f"version: 1\ntiers: {tiers}\n")
    ran = kvtiers(*arguments(given, chain="present.yaml", out="chain.yaml"))
    assert (ran.status, ran.err) == (0, "")
    (tier,) = load_chain(given / "chain.yaml").tiers
    assert tier.capacity_bytes == chosen * 10**9


def test_a_bad_present_chain(kvtiers: Kvtiers, given: Path) -> None:
    (given / "present.yaml").write_text("version: 1\ntiers: [{type: disk, capacity: 1GB}]\n")
    ran = kvtiers(*arguments(given, chain="present.yaml"))
    assert (ran.status, ran.out) == (2, "")
    assert "present.yaml:2: tiers[0].path" in ran.err


def test_no_chain_keeps_the_constraints(kvtiers: Kvtiers, given: Path) -> None:
    """What comes nearest is told and written, and the status says that it does not suffice."""
    (given / "budget.yaml").write_text(f"{BUDGET}constraints: {{mean_ttft: 1ms}}\n")
    ran = kvtiers(*arguments(given, out="chain.yaml"))
    assert ran.status == 1
    assert "No chain that was tried keeps all constraints: mean_ttft is" in ran.out
    assert (given / "chain.yaml").exists()


def test_no_tier_pays(kvtiers: Kvtiers, given: Path) -> None:
    slow = BUDGET.replace("load_bandwidth: 20GB/s", "load_bandwidth: 20MB/s")
    (given / "budget.yaml").write_text(slow.replace("store_", "load_latency: 30s, store_"))
    (given / "chain.yaml").write_text("before")
    ran = kvtiers(*arguments(given, out="chain.yaml"))
    assert ran.status == 0
    assert "The search counted 24 requests, too few to tell chains apart: record 160" in ran.out
    assert "No tier pays, as far as so little traffic tells: there is no chain to" in ran.out
    assert (given / "chain.yaml").read_text() == "before"
    lines = [
        {"timestamp": at, "input_length": 600, "output_length": 1, "hash_ids": [2 * at, 2 * at + 1]}
        for at in range(500)
    ]
    (given / "trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    ran = kvtiers(*arguments(given, out="chain.yaml"))
    assert "No tier pays: there is no chain to write." in ran.out


@pytest.mark.parametrize("option", ["out", "json"])
def test_a_place_that_can_t_be_written_to_is_said_before_the_search(
    kvtiers: Kvtiers, given: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    monkeypatch.setattr(searching, "tune", lambda *_, **__: pytest.fail("it searched"))
    ran = kvtiers(*arguments(given, **{option: "none/such.file"}))
    assert (ran.status, ran.out) == (2, "")
    assert "none/such.file: its folder is not there" in ran.err


@pytest.mark.parametrize("option", ["out", "json"])
def test_an_interrupt_while_writing_leaves_what_was_there(
    kvtiers: Kvtiers, given: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    (given / "result").write_text("before")

    def interrupted(file: int, *_: Any, **__: Any) -> None:
        os.write(file, b"half")
        os.close(file)
        raise KeyboardInterrupt

    monkeypatch.setattr(writing, "open", interrupted, raising=False)
    assert kvtiers(*arguments(given, **{option: "result"})).status == 130
    assert (given / "result").read_text() == "before"
    assert files(given) == ["budget.yaml", "result", "trace.jsonl"]


def test_an_interrupt_while_searching_ends_all_processes_and_writes_nothing(given: Path) -> None:
    names = arguments(given, out="chain.yaml", json="all.json")
    # The search goes on until it is interrupted.
    code = (
        "import sys, time\n"
        "from tiers.tuning.search import processes\n"
        "processes.simulate = lambda *_, **__: time.sleep(600)\n"
        "from tiers.cli.main import main; main()\n"
    )
    command = [sys.executable, "-c", code, *map(str, names)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        late = time.monotonic() + 120
        while not (found := children.read_text().split()):
            assert process.poll() is None and time.monotonic() < late
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, out) == (130, b"")
    assert not any(Path(f"/proc/{child}").exists() for child in found)
    assert files(given) == ["budget.yaml", "trace.jsonl"]


@pytest.mark.parametrize(
    "where",
    [
        "os.register_at_fork(after_in_parent=interrupt)",
        "Connection.__del__ = interrupt",
    ],
)
def test_an_interrupt_is_not_lost_where_python_swallows_it(given: Path, where: str) -> None:
    code = (
        "import os, signal, time\n"
        "from multiprocessing.connection import Connection\n"
        "from tiers.tuning.search import processes\n"
        "processes.simulate = lambda *_, **__: time.sleep(600)\n"
        "own, sent = os.getpid(), []\n"
        "def interrupt(*_):\n"
        "    if os.getpid() == own and not sent:\n"
        "        sent.append(os.kill(own, signal.SIGINT))\n"
        f"{where}\n"
        "from tiers.cli.main import main; main()\n"
    )
    names = arguments(given, out="chain.yaml", json="all.json")
    command = [sys.executable, "-c", code, *map(str, names)]
    ended = subprocess.run(command, capture_output=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (130, b"")
    assert files(given) == ["budget.yaml", "trace.jsonl"]


def test_an_interrupt_keeps_the_best_so_far(given: Path) -> None:
    """It ended in a second and kept nothing."""
    code = (
        "import pathlib, sys, time\n"
        "from tiers.tuning.search import processes\n"
        "simulate, done = processes.simulate, []\n"
        "def slow(*args, **more):\n"
        "    done.append(args)\n"
        "    if len(done) > 6:\n"
        f"        pathlib.Path({str(given / 'begun')!r}).touch()\n"
        "        time.sleep(600)\n"
        "    return simulate(*args, **more)\n"
        "processes.simulate = slow\n"
        "from tiers.cli.main import main; main()\n"
    )
    names = arguments(given, out="chain.yaml", json="all.json")
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, names)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        late = time.monotonic() + 120
        while not (given / "begun").exists():
            assert process.poll() is None and time.monotonic() < late
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, err) == (130, "")
    assert out.startswith("The search was interrupted. The best so far, on requests 13 to 36:")
    assert "6 chains were simulated" in out and "The chain is in" in out
    assert load_chain(given / "chain.yaml").tiers
    assert json.loads((given / "all.json").read_text())["interrupted"]


def test_another_trace_judges_and_time_is_bounded(kvtiers: Kvtiers, given: Path) -> None:
    make_traffic([str(given / "other.jsonl"), "--requests", "100", "--seed", "3"])
    more = ["--judge", given / "other.jsonl", "--minutes", 0.5]
    ran = kvtiers(*arguments(given, out="chain.yaml"), *more)
    assert (ran.status, ran.err) == (0, "")
    assert ran.out.startswith("Judged on other.jsonl, of which a part warms, and which no choice ")
    assert "both on requests 13 to 60, by" in (given / "chain.yaml").read_text().replace(
        "\n# ", " "
    )
    header = encode_header(FileHeader(16, 0.0))
    one = encode_request(TraceRequest(0.0, 70, 1, [0, 1, 2, 3]))
    (given / "other.jsonl").write_bytes(header + one * 20)
    ran = kvtiers(*arguments(given, out="chain.yaml"), *more)
    assert (ran.status, ran.out) == (2, "")
    assert (
        "other.jsonl: found blocks of 16 tokens, and the trace that is searched has 512" in ran.err
    )
