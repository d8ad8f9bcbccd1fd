"""`kvtiers recommend` beside an engine of this process, by what that engine recorded."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from spec.load import load_chain
from tests.cli.conftest import Ran
from tests.support.replay import ReplayEngine, ReplayModel
from tests.support.replay_chains import close
from tests.tuning.known_traffic import loop, mixed, once
from tiers.cli.recommend import Asked, _budget, _known, _measured, _trace
from tiers.cli.tune import searched
from tiers.control.engine_control import Control
from tiers.control.engine_status import EngineStatus, RunningChain, TierStatus
from tiers.lab.replay.model import VOCABULARY
from tiers.traces.open_trace import open_trace
from tiers.traces.recorded import FileHeader, encode_header, encode_request
from tiers.traces.trace import TraceRequest
from tiers.tuning.search.chain_edit import CannotEdit
from tiers.tuning.search.tune import TuneOptions

Kvtiers = Callable[..., Ran]
MODEL = ReplayModel(width=64)
"""Its blocks have four tokens."""
BLOCK = 4096
"""Bytes of one."""
RATES = """
machine:
  prefill_rate: 400
  tiers: {cpu: {load_bandwidth: 100MB/s, store_bandwidth: 100MB/s, price_per_gb_month: 3}}
"""
"""A token takes 2.5 ms to compute and 10 us to load."""


class Served:
    """An engine that has served documents, a second apart by its clock, and can still be asked."""

    def __init__(self, folder: Path, capacity: str, record: bool, is_real_time: bool) -> None:
        self.folder, self.seconds = folder, 0.0
        self.file = folder / "chain.yaml"
        text = f"""\
# of our group
version: 1
tiers:
  - type: cpu        # fast
    capacity: {capacity}  # half of it
load_when: always
salt: ours           # a secret
control: {{folder: {folder / "control"}}}
"""
        self.file.write_text(text + f"record: {{path: {folder / 'trace'}}}\n" * record)
        chain = load_chain(self.file)
        clock = time.monotonic if is_real_time else lambda: self.seconds
        self.engine = ReplayEngine(chain, MODEL, num_blocks=32, now=clock)
        assert self.engine.connector is not None
        self.control = Control(chain, self.engine.connector, self.file)

    def serve(self, documents: Iterable[tuple[int, int]]) -> None:
        """Serve them, until they are recorded and counted."""
        count = 0
        for document, blocks in documents:
            count += 1
            self.seconds += 1.0
            ids = range(document * 100, document * 100 + blocks)
            prompt = [(block % VOCABULARY, block // VOCABULARY, 0, 0) for block in ids]
            self.engine.generate([*(token for four in prompt for token in four), 1], max_tokens=1)
            self.engine.settle()
        until = time.monotonic() + 20
        while time.monotonic() < until and self.recorded() < count:
            time.sleep(0.05)
        self.control.board.measured({"chain": self.engine.stats})

    def recorded(self) -> float:
        if not (self.folder / "trace").exists():
            return float("inf") if "record" not in self.file.read_text() else 0
        self.engine.take_stats()
        counted = self.engine.stats.data.get("(chain)", {}).get("recorded_requests", 0.0)
        assert not isinstance(counted, list)
        return counted

    def close(self) -> None:
        self.control.close()
        close(self.engine)


Serving = Callable[..., Served]


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    made: list[Served] = []

    def serve(
        documents: Iterable[tuple[int, int]],
        capacity: str = "400KiB",
        record: bool = True,
        is_real_time: bool = False,
    ) -> Served:
        made.append(served := Served(tmp_path, capacity, record, is_real_time))
        (tmp_path / "rates.yaml").write_text(RATES)
        served.serve(documents)
        until = time.monotonic() + 10
        while not list((tmp_path / "control").glob("*.sock")) and time.monotonic() < until:
            time.sleep(0.01)
        return served

    yield serve
    for served in made:
        served.close()


def arguments(served: Served, *more: object) -> list[object]:
    budget = ["--budget", served.folder / "rates.yaml", "--chains", 24, "--processes", 1]
    return ["recommend", "--folder", served.folder / "control", *budget, *more]


def test_a_larger_tier_is_advised_where_documents_do_not_fit(
    kvtiers: Kvtiers, serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty documents in turn, of 10 blocks: an LRU of 100 blocks has none when it is asked."""
    served = serving(loop(20, 10, 420))
    served.file.chmod(0o640)
    new, all_of_it = served.folder / "new.yaml", served.folder / "all.json"
    ran = kvtiers(*arguments(served, "--output", new, "--json", all_of_it))
    assert (ran.status, ran.err) == (0, "")
    assert "Change: cpu" in ran.out and "capacity: 400KiB -> " in ran.out
    assert "Tokens from tiers, simulated and counted by the engine: cpu 0% and 0%." in ran.out
    before, after = served.file.read_text().splitlines(), new.read_text().splitlines()
    ((old, line),) = [pair for pair in zip(before, after, strict=True) if pair[0] != pair[1]]
    assert "capacity: 400KiB  # half of it" in old and line.endswith("  # half of it")
    (tier,) = load_chain(new).tiers
    assert tier.capacity_bytes >= 200 * BLOCK
    found = json.loads(all_of_it.read_text())
    assert found["verdict"] == "change" and found["change_if_rates_are_off"][1] < -0.5
    assert "ours" not in ran.out + all_of_it.read_text()
    assert "ours" in new.read_text() and new.stat().st_mode & 0o777 == 0o640
    assert found["diff"]["tiers"][0]["keys"][0]["key"] == "capacity"
    # All documents need 800 KiB, and 200 are free.
    monkeypatch.setattr("tiers.control.engine_control.spare_memory", lambda: 200 << 10)
    rates = served.folder / "rates.yaml"
    rates.write_text(f"media: [{{type: cpu, limit: 1GB}}]\n{RATES}")
    ran = kvtiers(*arguments(served, "--json", all_of_it))
    sizes = json.loads(all_of_it.read_text())["tuned"]["sizes"]["cpu"]
    assert ran.status == 0 and 400 << 10 < sizes[0] <= 600 << 10

    def refuse(*_: object) -> str:
        raise CannotEdit("by hand")

    with monkeypatch.context() as patch:
        patch.setattr("tiers.tuning.search.chain_edit.edited", refuse)
        ran = kvtiers(*arguments(served, "--output", new, "--json", all_of_it))
    found = json.loads(all_of_it.read_text())
    assert (ran.status, ran.err, found["verdict"]) == (1, "by hand\n", "change")
    assert "Change: cpu" in ran.out and "diff" not in found, "the advice of minutes was lost"
    served.file.write_text(new.read_text())
    ran = kvtiers(*arguments(served))
    assert (ran.status, ran.out) == (2, "") and "runs another chain; tiers differ" in ran.err


def trace(folder: Path, documents: Iterable[tuple[int, int]]) -> Path:
    """A recording of requests a second apart."""
    file = folder / "trace.jsonl"
    lines = [encode_header(FileHeader(4, 0.0, kv_bytes_per_token=1024))]
    for at, (document, blocks) in enumerate(documents):
        ids = [document << 16 | block for block in range(blocks)]
        lines.append(encode_request(TraceRequest(at * 1000.0, 4 * blocks + 1, 1, ids)))
    file.write_bytes(b"".join(lines))
    return file


def test_a_chain_that_serves_all_stays(kvtiers: Kvtiers, serving: Serving) -> None:
    served = serving(loop(2, 10, 4), "4MiB")
    traffic = islice(mixed((loop(8, 10, 500), 4), (once(3, 500), 1)), 420)
    new = served.folder / "new.yaml"
    ran = kvtiers(*arguments(served, trace(served.folder, traffic), "--output", new))
    assert (ran.status, ran.err) == (0, "")
    assert "\nStay: " in ran.out and not new.exists()
    assert "served no token" not in ran.out
    ran = kvtiers(*arguments(served, trace(served.folder, ((at, 10) for at in range(420)))))
    assert "is better; cpu served no token of these requests." in ran.out


def test_a_recording_that_fills_no_tier_is_too_short(kvtiers: Kvtiers, serving: Serving) -> None:
    """Ever more documents come back, all of which the tier has room for."""
    served = serving(loop(2, 10, 4), "64MiB")
    traffic = islice(((rng_place(at), 10) for at in range(420)), 420)
    ran = kvtiers(*arguments(served, trace(served.folder, traffic)))
    assert (ran.status, ran.err) == (1, "")
    assert re.search(r"^Record longer: .* fill none of the tiers", ran.out, re.M)
    assert re.search(r"Record for another \d+[mh]\.$", ran.out, re.M)


def rng_place(at: int) -> int:
    """Each second document came before, half as long ago as the recording lasts."""
    return at if at % 2 else at // 4 * 2 + 1


def test_nothing_is_told_of_too_few_requests(kvtiers: Kvtiers, serving: Serving) -> None:
    served = serving(loop(20, 10, 100))
    result = served.folder / "result.json"
    ran = kvtiers(*arguments(served, "--json", result))
    assert (ran.status, ran.err) == (1, "")
    assert json.loads(result.read_text())["verdict"] == "record longer"
    assert "Record longer: 100 requests in 99s are too few" in ran.out
    assert "Record 300 more, for about 5m" in ran.out


def test_nothing_is_told_of_rates_that_were_not_measured(
    kvtiers: Kvtiers, serving: Serving
) -> None:
    served = serving([])
    file = trace(served.folder, loop(20, 10, 420))
    ran = kvtiers("recommend", file, "--folder", served.folder / "control")
    assert (ran.status, ran.out) == (1, "")
    assert "can't tell: the engine has not measured loads from cpu and computing" in ran.err


def test_what_the_engine_has_measured_is_enough(kvtiers: Kvtiers, serving: Serving) -> None:
    traffic = [(number, 28) for number in (1, 2, 3, 1, 2, 3, 4, 3, 2, 1, 5, 1)]
    served = serving(traffic, "1MiB", is_real_time=True)
    file = trace(served.folder, loop(20, 10, 420))
    ran = kvtiers("recommend", file, "--from", "engine", "--folder", served.folder / "control")
    assert ran.status in (0, 1) and ran.err == ""
    assert re.search(r"^Rates: [\d,]+ prompt tokens/s .*; cpu loads [\d.]+[MG]/s after", ran.out)
    assert "Nothing was loaded" not in ran.out
    assert re.search(r"^(Change|Stay|Record longer): ", ran.out, re.M)


def test_a_tier_that_never_loaded_loads_as_fast_as_it_stores(
    kvtiers: Kvtiers, serving: Serving
) -> None:
    """Of a tier that is too small, or below one that has all, no load will ever be measured."""
    served = serving([(number, 28) for number in range(12)], "1MiB", is_real_time=True)
    file = trace(served.folder, loop(20, 10, 420))
    ran = kvtiers("recommend", file, "--folder", served.folder / "control")
    assert ran.status in (0, 1) and ran.err == ""
    assert re.search(r"^Rates: .*; cpu loads [\d.]+[KMG]/s after 0 ms", ran.out)
    assert "Nothing was loaded from cpu: taken to load as fast as it stores" in ran.out
    assert re.search(r"^(Change|Stay|Record longer): ", ran.out, re.M)


def test_bad_input_is_named(
    kvtiers: Kvtiers, serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serving(loop(20, 10, 3), record=False)
    other = served.folder / "other.jsonl"

    def says(*more: object) -> str:
        ran = kvtiers(*arguments(served, *more))
        assert (ran.status, ran.out) == (2, "")
        return ran.err

    assert "add record: {path: /var/lib/kvtiers-trace}, and" in says()
    other.write_bytes(encode_header(FileHeader(16, 0.0)))
    error = says(other)
    assert "other.jsonl: found block_tokens of 16, and the engine has 4" in error
    other.write_bytes(encode_header(FileHeader(4, 0.0, kv_bytes_per_token=7)))
    assert "found kv_bytes_per_token of 7, and the engine has 1,024" in says(other)
    other.write_bytes(encode_header(FileHeader(4, 0.0)))
    assert "other.jsonl: found no request" in says(other)
    both = served.folder / "both"
    both.mkdir()
    for writer in ("one", "two"):
        text = trace(both, loop(20, 10, 420)).read_bytes()
        header = encode_header(FileHeader(4, 0.0, writer, 1024))
        (both / f"{writer}.jsonl").write_bytes(header + text.split(b"\n", 1)[1])
    (both / "trace.jsonl").unlink()
    assert says(both).startswith("2 engines recorded at the same time")
    monkeypatch.setattr("tiers.control.engine_control.version", lambda name: "0.0.1")
    assert "runs kvtiers 0.0.1, and this is" in says()
    ran = kvtiers("recommend", other, "--chain", served.file)
    assert (ran.status, ran.out) == (2, "") and "found no request" in ran.err


def status(name: str, **more: Any) -> TierStatus:
    nothing = dict.fromkeys(("measured_load_bytes_per_second", "load_latency_seconds"))
    given = {"used_bytes": 0.0, "capacity_bytes": 0.0, "token_share": None, **nothing, **more}
    return TierStatus.model_construct(name=name, type=name, **given)


def asked(*tiers: TierStatus, spare: int = 0) -> Asked:
    """Of two engines in its folder."""
    running = RunningChain.model_construct(
        host="gpu-1",
        pid=42,
        kv_bytes_per_token=7,
        cache_tokens=100,
        spare_memory_bytes=spare,
        store_bytes_per_second={"cpu": 50.0},
    )
    found = EngineStatus.model_construct(tiers=[*tiers], prefill_tokens_per_second=3.0)
    return Asked(running, found, engines=2)


def test_a_host_is_shared_out_among_its_engines_and_rates_are_those_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, seen = tmp_path / "chain.yaml", list[Path]()
    file.write_text(f"""\
version: 1
tiers:
  - {{type: cpu, capacity: 1MiB}}
  - {{type: disk, capacity: 1MiB, path: {tmp_path / "not" / "yet"}}}
  - {{type: redis, maxmemory: 1MiB, url: "redis://127.0.0.1", key_prefix: ours}}
""")
    present, recording = load_chain(file), open_trace(trace(tmp_path, [(1, 1)]))

    def statvfs(path: Path) -> Any:
        seen.append(path)
        return SimpleNamespace(f_bavail=16, f_frsize=1000)

    monkeypatch.setattr("tiers.cli.recommend.os.statvfs", statvfs)
    tiers = [
        status(
            *("cpu",),
            used_bytes=300.0,
            capacity_bytes=400.0,
            measured_load_bytes_per_second=100.0,
            load_latency_seconds=0.25,
        ),
        status(
            *("disk",),
            used_bytes=5000.0,
            capacity_bytes=6000.0,
            measured_load_bytes_per_second=10.0,
        ),
        status("redis"),
    ]
    for spare, of_cpu in ((1000, 300 + 500), (100, 400)):
        known = _known(file, present, asked(*tiers, spare=spare), recording)
        limits = [medium["limit"] for medium in known["media"]]
        assert limits == [of_cpu, 5000 + 16_000 * 15 // 16 // 2, 1 << 20]
    assert {*seen} == {tmp_path}, "the folder is not made yet"
    for spare, of_cpu in ((1000, 500), (0, 1)):
        media = _known(file, present, asked(spare=spare), recording)["media"]
        assert media[0]["limit"] == of_cpu, "it was not opened"
    budget = tmp_path / "budget.yaml"
    for limit, of_cpu in (("100KiB", 100 << 10), ("1GiB", 300 + (1 << 19))):
        budget.write_text(f"media: [{{type: cpu, limit: {limit}}}]\n")
        given = _budget(budget, known, asked(*tiers, spare=1 << 20))
        assert [medium.limit for medium in given.media] == [of_cpu, *limits[1:]]
    assert known["media"][2]["settings"] == {"url": "redis://127.0.0.1", "key_prefix": "ours"}
    assert known["machine"] == {
        "tiers": {
            "cpu": {"load_bandwidth": 100.0, "store_bandwidth": 50.0, "load_latency": 0.25},
            "disk": {"load_bandwidth": 10.0, "store_bandwidth": 10.0, "load_latency": 0.0},
        },
        "kv_bytes_per_token": 1024,
        "engine_cache": 100 * 1024,
        "prefill_rate": 3.0,
    }
    assert [m["limit"] for m in _known(file, present, None, recording)["media"]] == [1 << 20] * 3
    recording.paths[0].write_bytes(encode_header(FileHeader(4, 0.0)))
    old = open_trace(recording.paths[0])
    machine = _known(file, present, asked(*tiers), old)["machine"]
    assert (machine["kv_bytes_per_token"], machine["engine_cache"]) == (7, 700)
    with pytest.raises(typer.Exit):
        _budget(None, known, asked(*tiers))
    known["media"].pop()
    assert _budget(None, known, asked(*tiers[:2])).machine.prefill_rate == 3
    del known["machine"]["kv_bytes_per_token"]
    with pytest.raises(typer.Exit):
        _budget(None, known, asked(*tiers[:2]))


def test_a_simulation_is_compared_with_what_the_engine_counted() -> None:
    uses = [SimpleNamespace(name=name, hit_tokens=50) for name in ("cpu", "disk")]
    report: Any = SimpleNamespace(prompt_tokens=200, tiers=uses)
    line = "Tokens from tiers, simulated and counted by the engine: cpu 25% and"
    for share, text, is_alike in ((0.2, "20%", True), (0.1, "10%", False), (0.4, "40%", False)):
        rate = {"measured_load_bytes_per_second": 1.0}
        tiers = [status("cpu", token_share=share, **rate), status("disk", **rate)]
        first, *others = _measured(report, tiers)
        assert first == f"{line} {text}." and len(others) == (not is_alike)
    assert not [*_measured(report, [status("gone", token_share=0.5, **rate)])]


def test_both_are_of_all_requests(kvtiers: Kvtiers, serving: Serving) -> None:
    """Nothing comes back in the first half, and all in the second, by which chains are judged."""
    served = serving([*islice(once(10, 210), 210), *((999 + at % 8, 10) for at in range(210))])
    ran = kvtiers(*arguments(served))
    found = re.search(r"counted by the engine: cpu (\d+)% and (\d+)%\.", ran.out)
    assert found and int(found[2]) > 40 and abs(int(found[1]) - int(found[2])) <= 1
    assert "these differ" not in ran.out


def test_only_what_this_engine_recorded_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not of a process whose number begins as its own, nor of a host whose name ends so."""
    file = tmp_path / "chain.yaml"
    file.write_text(
        "version: 1\ntiers: [{type: cpu, capacity: 1MiB}]\n"
        f"record: {{path: {tmp_path / 'trace'}}}\n"
    )
    folder = tmp_path / "trace"
    folder.mkdir()
    content = trace(tmp_path, [(1, 1)]).read_bytes()
    for writer in ("gpu-1-421", "big-gpu-1-42", "gpu-1-142"):
        (folder / f"kvtiers-trace-1700000000000-{writer}.jsonl").write_bytes(content)
    with pytest.raises(typer.Exit):
        _trace(None, load_chain(file), asked(), file)
    assert "name it to use 3 files of other engines" in capsys.readouterr().err
    ours = [folder / f"kvtiers-trace-170000000000{at}-gpu-1-42.jsonl" for at in range(2)]
    for path in ours:
        path.write_bytes(content)
    found = _trace(None, load_chain(file), asked(), file)
    assert [*found.paths] == ours and "3 files of other engines" in capsys.readouterr().err


def test_what_no_search_can_take_is_refused(
    kvtiers: Kvtiers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an engine, of a recording that would be long enough."""
    file, recording = tmp_path / "chain.yaml", trace(tmp_path, loop(20, 10, 420))

    def says(chain: str, *more: object) -> str:
        file.write_text(f"version: 1\ntiers: [{chain}]\n")
        ran = kvtiers("recommend", recording, "--chain", file, *more)
        assert (ran.status, ran.out) == (2, "")
        return ran.err

    cpu = "{type: cpu, capacity: 400KiB}"
    assert "without an engine write --budget FILE" in says(cpu)
    twice = f"{cpu}, {{type: cpu, capacity: 400KiB, name: other}}"
    assert "found two tiers of type cpu" in says(twice)
    assert "tier redis has no size" in says("{type: redis, url: 'redis://127.0.0.1'}")
    text = file.read_text()
    assert "it is written or read already" in says(cpu, "--output", file)
    assert "it is written or read already" in says(cpu, "--json", file)
    assert file.read_text() != text
    file.unlink()
    ran = kvtiers("recommend", recording, "--chain", file)
    assert ran.status == 2 and "chain.yaml: found no file" in ran.err
    ran = kvtiers("recommend", recording)
    assert ran.status == 2 and "no chain: found no file: name the chain's file" in ran.err
    monkeypatch.setattr("tiers.control.control_server.runtime_folder", lambda: tmp_path / "none")
    for words in ([], [recording, "--from", "engine"]):
        ran = kvtiers("recommend", *words)
        assert ran.status == 1 and f"no engine listens in {tmp_path / 'none'}" in ran.err


def test_a_budget_need_not_name_the_chain_s_own_media(kvtiers: Kvtiers, tmp_path: Path) -> None:
    """A search near a chain whose server was not among them ended in a traceback."""
    file, budget = tmp_path / "chain.yaml", tmp_path / "budget.yaml"
    redis = "{type: redis, maxmemory: 8MiB, url: 'redis://127.0.0.1'}"
    file.write_text(f"version: 1\ntiers: [{{type: cpu, capacity: 400KiB}}, {redis}]\n")
    machine = f"{RATES}  kv_bytes_per_token: 1024\n  engine_cache: 128KiB\n"
    budget.write_text(f"media: [{{type: cpu, limit: 4MiB}}]\n{machine}")
    few = ("--chains", 20, "--processes", 1)
    asks = ("recommend", trace(tmp_path, loop(20, 10, 420)), "--chain", file, "--budget", budget)
    ran = kvtiers(*asks, *few)
    assert (ran.status, ran.out) == (2, "") and "add redis: {load_bandwidth" in ran.err
    link = "redis: {load_bandwidth: 9MB/s, store_bandwidth: 9MB/s}"
    budget.write_text(budget.read_text().replace("3}}", f"3}}, {link}}}"))
    ran = kvtiers(*asks, *few)
    assert (ran.status, ran.err) == (0, "") and "redis loads" in ran.out


def test_no_tier_is_advised_where_none_pays(
    kvtiers: Kvtiers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To load a token takes longer than to compute it."""
    options: list[TuneOptions] = []

    def noted(*args: Any) -> Any:
        options.append(args[4])
        return searched(*args)

    monkeypatch.setattr("tiers.cli.recommend.searched", noted)
    file, budget, new = (tmp_path / name for name in ("chain.yaml", "budget.yaml", "new.yaml"))
    file.write_text("version: 1\nload_when: always\ntiers: [{type: cpu, capacity: 4MiB}]\n")
    machine = "  kv_bytes_per_token: 1024\n  engine_cache: 128KiB\n"
    budget.write_text(RATES.replace("100MB/s", "100KB/s") + machine)
    recording = trace(tmp_path, loop(8, 10, 420))
    ran = kvtiers(
        *("recommend", recording, "--chain", file, "--budget", budget),
        *("--output", new, "--chains", 20, "--processes", 1, "--minutes", 2),
    )
    assert options == [TuneOptions(20, 120.0, processes=1, near_present=True)]
    assert ran.status == 0, ran.err
    assert "Simulated on requests 253 to 420, which no choice saw:" in ran.out
    assert ran.out.endswith("No tier pays: run the engine without kvtiers.\n")
    assert not new.exists()
