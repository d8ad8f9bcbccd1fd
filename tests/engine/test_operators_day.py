"""An operator's day: what goes wrong below an engine is one line, a state and a count, and costs no
answer. Each trouble is made for real, over the replay engine."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spec.chain import ChainSpec
from tests.support.replay import ReplayEngine, ReplayModel, answer
from tests.support.replay_chains import MODEL, SLOT, chain_of, cpu, disk, measured, redis, workload
from tests.support.servers import RedisServer
from tests.support.slow_store import SlowSpec, TroubledStore
from tiers.connector import assembly
from tiers.contract.stats import STATE, STATES
from tiers.disk.folder import upkeep
from tiers.store import TierStore
from tiers.wrappers import guard, reopening

MakeEngine = Callable[..., ReplayEngine]
OTHER = """
import logging, sys
from pathlib import Path
from spec.offloading import StoreContext
from tiers.disk.spec import DiskSpec
logging.basicConfig(level=logging.WARNING, stream=sys.stdout, format="%(message)s")
site = StoreContext(int(sys.argv[2]))
store = DiskSpec(path=Path(sys.argv[1]), capacity=160 << 10).open(site)
print("open", flush=True)
sys.stdin.read()
store.close()
"""
"""Another engine's disk tier on the folder, with less capacity, as a program that stays until its
input ends."""
PATIENCE = 30.0
"""Seconds after which what does not come is missing: protection from hanging."""


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(upkeep, "PLACE_EVERY_S", 0.1)
    caplog.set_level(logging.INFO)


@pytest.fixture
def small_mount(tmp_path: Path) -> Iterator[Path]:
    """A file system of 40 MiB, nearly full."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=40m,mode=700", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("this user can't mount a file system of 40 MiB")
    try:
        (place / "filler").write_bytes(bytes(30 << 20))
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def state(made: ReplayEngine, tier: str) -> str:
    """How the metrics say that a tier does."""
    made.step()
    return STATES[int(measured(made, STATE, tier))]


def until(done: Callable[[], bool]) -> None:
    late = time.monotonic() + PATIENCE
    while not done():
        assert time.monotonic() < late, "it did not come to that"
        time.sleep(0.02)


def serve(made: ReplayEngine, seed: int = 5, count: int = 20) -> None:
    """Serve requests, each of which must be answered as without tiers."""
    for prompt, tokens in workload(seed, count):
        request = made.generate(prompt, tokens)
        assert request.output == answer(made.model, prompt, tokens, len(made.workers))
    made.settle()


def serve_until(made: ReplayEngine, done: Callable[[], bool]) -> None:
    seeds = iter(range(10_000))

    def serve_some() -> bool:
        serve(made, next(seeds), 4)
        return done()

    until(serve_some)


def trouble(caplog: pytest.LogCaptureFixture) -> list[str]:
    """All lines about trouble, of whatever part, but sums of what earlier tests' engines repeated
    a minute ago."""
    lines = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    return [line for line in lines if not line.endswith("in the last minute")]


def test_a_folder_that_others_may_write_to(
    engine: MakeEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk").chmod(0o777)
    made = engine(chain_of(cpu(), disk(tmp_path / "disk")))
    assert state(made, "disk") == "refused" and state(made, "cpu") == "open"
    serve(made)
    assert state(made, "disk") == "refused"
    assert measured(made, "reads_up", "disk") == measured(made, "writes_up", "disk") == 0
    assert measured(made, "capacity_bytes", "disk") == 1 << 20
    (line,) = trouble(caplog)
    assert "tier 'disk' is unusable" in line and "chmod it to 0700" in line


@pytest.mark.fault
@pytest.mark.parametrize("how", ["never", "always"])
def test_a_server_that_is_full_and_evicts_nothing(
    engine: MakeEngine,
    tmp_path: Path,
    server: RedisServer,
    caplog: pytest.LogCaptureFixture,
    how: str,
) -> None:
    """Wherever blocks are stored from: it is a server's own default, and lasts."""
    caplog.set_level(logging.INFO)
    made = engine(chain_of(redis(server, tmp_path, name="full", store_process=how)))
    serve_until(made, lambda: state(made, "full") == "open")
    serve_until(made, lambda: how == "never" or "are stored by the process" in caplog.text)
    client = server.client()
    client.config_set("maxmemory", client.info("memory")["used_memory"] + (64 << 10))
    serve_until(made, lambda: state(made, "full") == "degraded")
    assert measured(made, "writes_up", "full") == 1
    assert any("maxmemory-policy allkeys-lru" in line for line in trouble(caplog))
    client.config_set("maxmemory", 200 << 20)
    until(lambda: state(made, "full") == "open")  # though nothing more is stored
    client.config_set("maxmemory", client.info("memory")["used_memory"] + (64 << 10))
    serve_until(made, lambda: state(made, "full") == "degraded")
    client.config_set("maxmemory-policy", "allkeys-lru")
    serve_until(made, lambda: state(made, "full") == "open")


@pytest.mark.fault
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_server_that_is_not_there_and_comes(
    engine: MakeEngine,
    tmp_path: Path,
    server: RedisServer,
    caplog: pytest.LogCaptureFixture,
    ranks: int,
) -> None:
    """Of two ranks with the same KV the second stores nothing, and joins all the same."""
    server.kill()
    dead = redis(server, tmp_path, name="dead")
    model = ReplayModel(replicated=ranks > 1)
    made = engine(chain_of(dead, disk(tmp_path / "disk")), model=model, world_size=ranks)
    assert state(made, "disk") == "open"
    until(lambda: state(made, "dead") == "down")
    serve(made)
    assert state(made, "dead") == "down"
    assert measured(made, "stored_blocks", "dead") == 0
    assert (
        measured(made, "store_failures", "dead") + measured(made, "store_dropped_down", "dead") > 0
    )
    (line,) = trouble(caplog)
    assert "tier dead is configured, not reached yet" in line and str(server.port) in line
    assert "tier 'dead' is open" not in caplog.text
    server.start()
    until(lambda: "tier 'dead' is open" in caplog.text)
    until(lambda: state(made, "dead") == "open")
    serve(made, seed=200)
    assert measured(made, "stored_blocks", "dead") > 0
    assert trouble(caplog) == [line], "recovery is no trouble"


@pytest.mark.fault
def test_a_file_system_smaller_than_the_capacity(
    engine: MakeEngine, small_mount: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = engine(chain_of(disk(small_mount / "disk", "5GiB")))
    until(lambda: state(made, "disk") == "degraded")
    serve_until(made, lambda: measured(made, "evictions", "disk") > 0)
    assert state(made, "disk") == "degraded"
    (line,) = trouble(caplog)
    assert "its file system has room for" in line and "capacity 5GiB" in line
    stored, evicted = (measured(made, name, "disk") for name in ("stored_blocks", "evictions"))
    assert measured(made, "capacity_bytes", "disk") == 5 << 30
    until(lambda: not made.step() and measured(made, "used_bytes", "disk") > 0)
    assert measured(made, "used_bytes", "disk") < 12 << 20
    assert stored > evicted and measured(made, "store_failures", "disk") == 0


@pytest.mark.fault
@pytest.mark.parametrize("how", ["removed", "replaced", "emptied"])
def test_a_folder_that_goes_while_it_is_open(
    engine: MakeEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    how: str,
) -> None:
    monkeypatch.setattr(upkeep, "EVERY_S", 0.1)
    monkeypatch.setattr(reopening, "RETRY_AFTER", 0.1)
    folder = tmp_path / "disk"
    made = engine(chain_of(disk(folder)), prefix_caching=False)
    serve(made)
    assert open_files(folder), "else nothing is tried"
    if how == "replaced":
        folder.rename(tmp_path / "old")
        folder.mkdir(mode=0o700)
    elif how == "emptied":
        subprocess.run(f"rm -rf {folder}/*", shell=True, check=True)
    else:
        shutil.rmtree(folder)
    until(lambda: caplog.text.count("tier 'disk' is open") == 2)
    until(lambda: not any("(deleted)" in one or "/old/" in one for one in open_files(tmp_path)))
    (line,) = trouble(caplog)
    assert "tier disk is open no more" in line and f"{folder} was removed or replaced" in line
    before = measured(made, "stored_blocks", "disk")
    serve_until(made, lambda: state(made, "disk") == "open")
    serve(made, seed=200)
    assert measured(made, "stored_blocks", "disk") > before
    assert trouble(caplog) == [line]
    made.close()
    again = engine(chain_of(disk(folder)))
    serve(again, seed=200)
    assert measured(again, "loaded_blocks", "disk") > 0, "the folder is a tier again"


@pytest.mark.fault
def test_a_smaller_capacity_that_another_engine_says(
    engine: MakeEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "disk"
    made = engine(chain_of(disk(folder, "4MiB")))
    serve(made, count=60)
    command = [sys.executable, "-c", OTHER, str(folder), str(MODEL.payload_bytes)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as other:
        assert other.stdin is not None and other.stdout is not None
        said, opened = (other.stdout.readline() for _ in range(2))
        assert "capacity 160KiB replaces the 4MiB of another engine" in said and opened == "open\n"
        until(lambda: state(made, "disk") == "degraded")
        # By another thread than the one that says the state, once a second.
        until(lambda: not made.step() and measured(made, "capacity_bytes", "disk") == 160 << 10)
        until(lambda: not made.step() and measured(made, "used_bytes", "disk") <= 160 << 10)
        until(lambda: bool(trouble(caplog)))
        (line,) = trouble(caplog)
        assert "another engine on its folder has set capacity 160KiB" in line and "4MiB" in line
        other.stdin.close()
    until(lambda: not made.step() and measured(made, "capacity_bytes", "disk") == 4 << 20)
    until(lambda: state(made, "disk") == "open")


@pytest.mark.fault
def test_a_cpu_tier_that_is_too_large_costs_the_others_nothing(
    engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    big = {"type": "cpu", "name": "big", "capacity": "900TiB"}
    made = engine(chain_of(cpu(30), big), prefix_caching=False)
    assert state(made, "big") == "refused" and state(made, "cpu") == "open"
    serve(made)
    assert measured(made, "loaded_blocks", "cpu") > 0
    (line,) = trouble(caplog)
    assert "tier 'big' is unusable" in line and "capacity 900TiB" in line
    assert measured(made, "capacity_bytes", "cpu") == 30 * SLOT


@pytest.mark.parametrize("ranks", [1, 2])
def test_blocks_that_the_engines_end_loses(
    engine: MakeEngine,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
) -> None:
    """One rank tells of them: the others lose the same ones. Nobody waits for them long."""
    monkeypatch.setattr(guard, "CLOSE_SECONDS", 3600.0)
    monkeypatch.setattr(assembly, "DRAIN_SECONDS", 0.1)
    stores: list[TroubledStore] = []

    go_on = threading.Event()

    class Closing(TroubledStore):
        def close(self) -> None:
            go_on.wait()  # for its puts
            super().close()

    def own(*_: object) -> TierStore:
        # The scheduler's, which puts nothing, comes last.
        stores.append(Closing() if len(stores) < ranks else TroubledStore())
        return stores[-1]

    monkeypatch.setattr(SlowSpec, "open", own)
    made = engine(ChainSpec(version=1, tiers=(SlowSpec(type="slow"),)), world_size=ranks)
    for store in stores:
        store.pace.hang("put")
    made.generate(range(40), 1)
    made.step()
    blocks = int(measured(made, "storing_bytes")) // MODEL.payload_bytes // ranks
    made.closed = True
    for worker in made.workers:
        worker.close()
    assert made.connector is not None
    made.connector.shutdown()
    go_on.set()
    lines = trouble(caplog)
    (line,) = [line for line in lines if "are lost" in line]
    assert f"tier 'slow (package tests)': {blocks} blocks were in" in line and blocks > 0
    assert sum("slow (package tests): not closed after 1 s" in line for line in lines) == ranks


def open_files(folder: Path) -> list[str]:
    """Files in a folder that this process has open or mapped, those that were deleted too."""
    names = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            names.append(str(link.readlink()))
        except FileNotFoundError:
            continue
    mapped = Path("/proc/self/maps").read_text().splitlines()
    names += [line.split(maxsplit=5)[5] for line in mapped if len(line.split(maxsplit=5)) == 6]
    return [name for name in names if name.startswith(f"{folder}")]
