"""A replay over real connectors and stores: its bytes, its report, and what it agrees with."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar, Self

import pytest

from spec.chain import LOAD_POLICIES, ChainSpec
from spec.errors import SpecError
from spec.offloading import StoreContext, StoreSpec
from tests.lab.replay.worlds import BLOCK_BYTES, SIZE, chain, chats, cpu, disk, given, machine
from tiers.contract.engine_info import EngineInfo
from tiers.disk.slab import slot_bytes
from tiers.lab.replay.clock import Clock
from tiers.lab.replay.replay_trace import replay
from tiers.lab.replay.scaling import NO_DEADLINE, CannotReplay, Scale, linked, scaled
from tiers.lab.replay.timed_worker import WrongBytes
from tiers.lab.server import NoPlace
from tiers.store import Block, TierStore
from tiers.testing import MemoryStore
from tiers.traces.trace import TraceRequest
from tiers.tuning.report import Report
from tiers.tuning.simulation.simulate import simulate


def run(chain: ChainSpec, requests: Sequence[TraceRequest], **more: Any) -> Report:
    """Replay on the usual machine, and check what holds of every report."""
    report = replay(requests, SIZE, chain, machine(), **more)
    tokens = report.engine_hit_tokens + report.tier_hit_tokens + report.computed_tokens
    assert report.prompt_tokens == tokens
    return report


def test_a_redis_tier_has_a_place_of_its_own_alone(tmp_path: Path) -> None:
    """The others lie in the folder that is given, where nobody would use one of its name."""
    tiers = chain(cpu(90), disk(400), {"type": "redis", "url": "redis://nowhere"})
    engine = EngineInfo({"model": "replay"}, SIZE, SIZE, 150, step_tokens=256)
    with ExitStack() as stack:
        scaled(tiers, engine, Scale(BLOCK_BYTES, 8 * SIZE), tmp_path, stack)
        assert {place.name for place in tmp_path.iterdir()} == {"cpu", "disk"}


def test_a_request_that_comes_again_is_loaded() -> None:
    prompt = TraceRequest(0.0, 100 * SIZE + 5, 1, list(range(100)))
    others = [
        TraceRequest(10_000.0 + n, 50 * SIZE, 1, list(range(1000 * n, 1000 * n + 50)))
        for n in range(1, 4)
    ]
    again = prompt._replace(timestamp=60_000.0)
    small = machine(engine_cache=110 * BLOCK_BYTES)
    report = replay([prompt, *others, again], SIZE, chain(disk(1000)), small, warm=0.8)
    assert report.requests == 1
    assert report.hit_tokens == {"disk": 100 * SIZE}
    assert report.computed_tokens == 5
    # 2 ms of latency for each wave of 64 blocks, the blocks at 8 MB/s, 5 tokens at 4,000/s.
    assert report.ttft_p50 == pytest.approx(2 * 0.002 + 100 * BLOCK_BYTES / 8e6 + 5 / 4000)


@pytest.mark.parametrize(
    ("policy", "when"), zip(LOAD_POLICIES, ("sooner", "always", "sooner"), strict=True)
)
def test_simulation_and_replay_agree(policy: str, when: str) -> None:
    requests = chats(3)
    tiers = chain(cpu(90), disk(400), given(), load_policy=policy, load_when=when)
    real = run(tiers, requests)
    simulated = simulate(requests, SIZE, tiers, machine())
    assert not any("are busy for" in text for text in real.warnings)
    assert 0 < simulated.pause == pytest.approx(real.pause, rel=0.01)
    one_percent = real.prompt_tokens / 100
    assert simulated.engine_hit_tokens == pytest.approx(real.engine_hit_tokens, abs=one_percent)
    assert simulated.hit_tokens == pytest.approx(real.hit_tokens, abs=one_percent)
    assert simulated.ttft_p50 == pytest.approx(real.ttft_p50, rel=0.2)


@pytest.mark.parametrize("paused", ["reads", "writes", "both"])
def test_they_agree_about_a_tier_that_is_paused(paused: str) -> None:
    tiers, requests = chain(cpu(60), disk(400, paused=paused)), chats(3)
    small = machine(engine_cache=60 * BLOCK_BYTES)
    real, simulated = (do(requests, SIZE, tiers, small) for do in (replay, simulate))
    assert real.hit_tokens["disk"] == simulated.hit_tokens["disk"] == 0
    assert simulated.hit_tokens == pytest.approx(real.hit_tokens, abs=real.prompt_tokens / 100)
    stored = [report.tiers[1].stored_bytes > 0 for report in (real, simulated)]
    assert stored == [paused == "reads"] * 2


@pytest.mark.parametrize("own", [60, 100])
def test_they_agree_where_the_engines_own_blocks_are_not_stored_again(own: int) -> None:
    tiers, requests = chain(cpu(60), disk(400), store="computed"), chats(3)
    on = machine(engine_cache=own * BLOCK_BYTES)
    real, simulated = (do(requests, SIZE, tiers, on) for do in (replay, simulate))
    assert simulated.hit_tokens == pytest.approx(real.hit_tokens, abs=real.prompt_tokens / 50)


@pytest.mark.parametrize("own", [60, 100])
def test_they_agree_where_stores_lag_and_drop(own: int) -> None:
    slow = machine().tiers["disk"].model_copy(update={"store_bandwidth": 1e6})
    links = dict(machine().tiers) | {"disk": slow}
    on = machine(engine_cache=own * BLOCK_BYTES, tiers=links)
    tiers, requests = chain(cpu(30), disk(400)), chats(3, every=60.0)
    real, simulated = replay(requests, SIZE, tiers, on), simulate(requests, SIZE, tiers, on)
    assert real.tiers[1].dropped_blocks > 20
    # The engine's own cache is exact: blocks of no use to anybody are taken first.
    assert simulated.engine_hit_tokens == real.engine_hit_tokens
    assert simulated.hit_tokens == pytest.approx(real.hit_tokens, abs=real.prompt_tokens / 100)
    assert simulated.ttft_p50 == pytest.approx(real.ttft_p50, rel=0.2)


def test_a_redis_tier_has_a_server_of_its_own() -> None:
    tiers = chain({"type": "redis", "url": "redis://nowhere.invalid"})
    small = machine(engine_cache=60 * BLOCK_BYTES)
    real = replay(chats(3, 40), SIZE, tiers, small)
    assert real.hit_tokens["redis"] > 0


class Forgetful(MemoryStore):
    """Answers some blocks with the bytes of others."""

    def get(self, blocks: Sequence[Block]) -> list[bool]:
        kept = list(self.blocks)
        return super().get([Block(kept[0], block.payload) for block in blocks])


class Believed(type(given())):  # type: ignore[misc]
    """A tier whose store is said to verify what it loads."""

    verifies = True


def test_wrong_bytes_are_loud() -> None:
    lying = Believed.model_validate({"type": "given"}).over(Forgetful())
    with pytest.raises(WrongBytes, match=r"request-\d+: \d+ of \d+ loaded blocks have wrong bytes"):
        replay(chats(3, 40), SIZE, chain(lying), machine(engine_cache=60 * BLOCK_BYTES))


class Losing(MemoryStore):
    """Holds every block until it is asked for it."""

    def get(self, blocks: Sequence[Block]) -> list[bool]:
        return [False] * len(blocks)


def test_tokens_that_do_not_arrive_are_computed_and_no_tiers() -> None:
    losing = type(given()).model_validate({"type": "given"}).over(Losing())
    on = machine(engine_cache=60 * BLOCK_BYTES)
    report = replay(chats(3, 40), SIZE, chain(losing), on)
    assert report.hit_tokens == {"given": 0}
    assert report.computed_tokens == report.prompt_tokens - report.engine_hit_tokens


def test_nothing_is_done_in_the_operators_places(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    tiers = chain(disk(400) | {"path": str(mine)})
    run(tiers, chats(4, 20), folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


class Folder(MemoryStore):
    """A plugin's store, of a folder that is production's unless it was moved."""

    rooms: ClassVar[list[tuple[Path, int]]] = []

    def __init__(self, path: Path, capacity: int) -> None:
        super().__init__()
        self.rooms.append((path, capacity))


class FixedSpec(StoreSpec):
    path: Path
    capacity: int

    def open(self, site: StoreContext) -> TierStore:
        (self.path / "opened").touch()
        return Folder(self.path, self.capacity)


class MovableSpec(FixedSpec):
    def scratch(self, folder: Path) -> Self:
        return self.model_copy(update={"path": folder})


def test_a_tier_keeps_the_settings_that_no_link_has(tmp_path: Path) -> None:
    """Among them a deadline that no machine is too slow for: the trace's time stands meanwhile."""
    asked = {"store_threshold": 2, "paused": "writes", "loads_at_once": 3, "load_rate": "1MB/s"}
    tiers = chain(given(**asked))
    engine = EngineInfo({"model": "replay"}, SIZE, SIZE, 150, step_tokens=256)
    scale = Scale(BLOCK_BYTES, 8 * SIZE)
    with ExitStack() as stack:
        small = scaled(tiers, engine, scale, tmp_path, stack)
    (tier,) = linked(small, machine(), scale, Clock())[0].tiers
    assert isinstance(tier, StoreSpec)
    assert (tier.store_threshold, tier.paused, tier.loads_at_once) == (2, "writes", 3)
    assert (tier.deadline, tier.load_rate) == (NO_DEADLINE, None)


@pytest.mark.fault
def test_a_plugins_tier_is_moved_or_refused(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    written = {"type": "given", "path": mine, "capacity": 100 * BLOCK_BYTES}
    with pytest.raises(NoPlace, match=r"tier given: .* given of tests does not say how"):
        run(chain(FixedSpec.model_validate(written)), chats(3, 5))
    run(chain(MovableSpec.model_validate(written)), chats(3, 5))
    assert list(mine.iterdir()) == []
    assert {capacity for _, capacity in Folder.rooms} == {100 * slot_bytes(SIZE * 8)}


def test_what_cannot_be_replayed_says_so() -> None:
    with pytest.raises(CannotReplay, match="give the machine more engine_cache"):
        run(chain(cpu(90)), [TraceRequest(0.0, 151 * SIZE, 1, list(range(151)))])
    with pytest.raises(SpecError, match="add disk"):
        replay(chats(3, 5), SIZE, chain(disk(9)), machine(tiers={}))


def test_a_replay_is_not_recorded(tmp_path: Path) -> None:
    watched = chain(cpu(30), record={"path": tmp_path / "trace"})
    run(watched, chats(3, count=5))
    assert not (tmp_path / "trace").exists(), "it would spoil the trace of live traffic"
