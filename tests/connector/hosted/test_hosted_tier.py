"""HostedTier: a hit is verified bytes in host memory, whatever the store does; nothing leaks."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spec.offloading import HostSpec, StoreContext, StoreSpec
from spec.registry import tier_class
from tiers.connector.hosted import backing_store
from tiers.connector.hosted.hosted_tier import PROMOTION_DEADLINE, Answer, HostedTier
from tiers.connector.hosted.shared_slots import attach_region, create_region, stamp
from tiers.connector.scheduler.lookups import LookupPace
from tiers.connector.scheduler.store_manager import StoreManager
from tiers.contract.messages import WorkerHandshake
from tiers.disk.disk_store import DiskStore
from tiers.disk.slab import slot_bytes
from tiers.errors import TierUnusable
from tiers.store import Block
from tiers.wrappers.guard import Guarded

PAYLOAD = 5000
SLOTS = 8
BLOCKS = [bytes([i]) * 36 for i in range(20)]
"""Names as vLLM makes them: a hash and a KV cache group."""
NAMES = (b"rank-0----------", b"rank-1----------")


class Engine:
    """What vLLM's connector does with a tier: asks, and has two workers copy as it is told."""

    def __init__(
        self,
        folder: Path,
        spec: StoreSpec | None,
        slots: int = SLOTS,
        late: bool = False,
        events: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        names = (b"", b"") if late else NAMES
        self.workers = [
            create_region(
                "engine", WorkerHandshake(rank, names[rank], PAYLOAD), slots, False, folder
            )
            for rank in range(2)
        ]
        regions = [attach_region("engine", rank, folder) for rank in range(2)]
        assert list(folder.iterdir()) == [], "a killed engine must leave nothing behind"

        def open_store() -> Guarded | None:
            if spec is None:
                return None
            return Guarded(spec.open(StoreContext(PAYLOAD, 2)), "tier")

        host = tier_class("cpu").model_validate(
            {"type": "cpu", "capacity": "1MiB", "eviction": "lru"}
        )
        assert isinstance(host, HostSpec)
        self.tier = HostedTier(
            regions,
            host.residency,
            open_store,
            clock,
            events,
        )

    def store(self, blocks: list[bytes], fails: bool = False, request: str = "stores") -> int:
        """Gather what the tier wants of these; on one worker the copies fail. How many it took."""
        orders = self.tier.prepare_store(request, blocks)
        for rank, region in enumerate(self.workers):
            for block, key, slot in orders:
                region.memory.payload(slot)[:] = content(rank, block)
                region.end([slot], [b"" if fails and rank == 1 else stamp(key)])
        # vLLM names them in no order.
        self.tier.complete_store({block for block, _, _ in orders}, True)
        return len(orders)

    def ask(self, request: str, blocks: list[bytes]) -> list[Answer]:
        """Look blocks up, once a step, until the tier knows."""
        limit = time.monotonic() + 30
        while time.monotonic() < limit:
            answers = [self.tier.lookup(request, block) for block in blocks]
            self.tier.end_step(())
            if Answer.PENDING not in answers:
                return answers
            time.sleep(0.001)
        raise AssertionError("the tier never answered")

    def load(self, request: str, blocks: list[bytes]) -> None:
        """Load blocks that were hits, and see that they are what was stored."""
        slots = self.tier.prepare_load(request, blocks)
        for rank, region in enumerate(self.workers):
            for block, slot in zip(blocks, slots, strict=True):
                assert bytes(region.memory.payload(slot)) == content(rank, block)
                region.end([slot])
        self.tier.complete_load(blocks)

    def hits(self, request: str, blocks: list[bytes]) -> list[bytes]:
        """Those that can be loaded; they are, and the request ends."""
        answers = self.ask(request, blocks)
        found = [b for b, answer in zip(blocks, answers, strict=True) if answer is Answer.HIT]
        self.load(request, found)
        self.tier.request_finished(request)
        return found

    def settle(self) -> None:
        """Step until no transfer with the store is under way."""
        while self.tier._store._in_flight:
            self.tier.end_step(())
            time.sleep(0.001)


def content(rank: int, block: bytes) -> bytes:
    return (bytes([rank]) + block) * (PAYLOAD // 37) + bytes(PAYLOAD % 37)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    """Make engines; each is closed, and must have given every slot back."""
    engines: list[Engine] = []
    numbers = itertools.count()

    def one(
        spec: StoreSpec | None, slots: int = SLOTS, late: bool = False, events: bool = False
    ) -> Engine:
        folder = tmp_path / f"shm-{next(numbers)}"
        folder.mkdir()
        engines.append(Engine(folder, spec, slots, late, events))
        return engines[-1]

    yield one
    for engine in engines:
        engine.settle()
        engine.tier.reset()
        engine.tier.end_step(())
        assert engine.tier.pool.in_use == 0
        engine.tier.close()


def disk(path: Path) -> Any:
    return tier_class("disk").model_validate({"type": "disk", "capacity": "8MiB", "path": path})


def redis(url: str) -> Any:
    return tier_class("redis").model_validate({"type": "redis", "url": url, "timeout": "500ms"})


def test_host_memory_alone_keeps_the_last_used(make: Callable[..., Engine]) -> None:
    engine = make(None)
    assert engine.store(BLOCKS[:SLOTS]) == SLOTS
    assert engine.hits("a", BLOCKS[:4]) == BLOCKS[:4]
    engine.store(BLOCKS[SLOTS : SLOTS + 4])
    assert engine.hits("b", BLOCKS[:12]) == [*BLOCKS[:4], *BLOCKS[SLOTS : SLOTS + 4]]


def test_a_hit_stays_until_it_is_loaded_or_its_request_ends(make: Callable[..., Engine]) -> None:
    engine = make(None)
    engine.store(BLOCKS[:SLOTS])
    assert engine.ask("waits", BLOCKS[:6]) == [Answer.HIT] * 6
    assert engine.store(BLOCKS[SLOTS:16]) == 2, "all other slots hold promised blocks"
    engine.load("waits", BLOCKS[:6])
    assert engine.store(BLOCKS[10:16]) == 6


def test_what_only_the_store_has_comes_to_host_memory_first(
    make: Callable[..., Engine], tmp_path: Path
) -> None:
    first = make(disk(tmp_path / "disk"))
    first.store(BLOCKS[:4])
    first.settle()
    again = make(disk(tmp_path / "disk"))
    assert again.tier.lookup("a", BLOCKS[0]) is Answer.PENDING
    assert again.tier.lookup("a", BLOCKS[9]) is Answer.MISS, "an index in memory knows at once"
    assert again.ask("a", BLOCKS[:5]) == [Answer.HIT] * 4 + [Answer.MISS]
    assert again.tier.came_from_store("a", BLOCKS[0])
    again.load("a", BLOCKS[:4])


def test_a_miss_behind_a_prompt_that_is_looked_up_in_steps_is_no_answer_about_it(
    make: Callable[..., Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM asks about the block behind those that are found in every step."""
    first = make(disk(tmp_path / "disk"))
    for start in (0, 4):
        first.store(BLOCKS[start : start + 4])
        first.settle()
    monkeypatch.setattr(LookupPace, "AT_ONCE", 6)
    monkeypatch.setattr(LookupPace, "FEW", 4)
    monkeypatch.setattr(StoreManager, "CHECKED_AT_ONCE", 1)
    again = make(disk(tmp_path / "disk"))
    answers: list[Answer] = []
    for _ in range(100):
        answers = [again.tier.lookup("a", block) for block in BLOCKS[:9]]
        assert answers[8] is Answer.MISS
        if answers == [Answer.HIT] * 8 + [Answer.MISS]:
            break
        again.tier.end_step(())
        time.sleep(0.005)
    else:
        pytest.fail(f"no answer: {answers}")
    again.load("a", BLOCKS[:8])


def test_more_than_host_memory_holds_is_served_as_far_as_it_fits(
    make: Callable[..., Engine], tmp_path: Path
) -> None:
    first = make(disk(tmp_path / "disk"), slots=20)
    for start in range(0, 20, 5):
        first.store(BLOCKS[start : start + 5])
        first.settle()
    small = make(disk(tmp_path / "disk"))
    assert small.hits("a", BLOCKS) == BLOCKS[:SLOTS]
    # Two requests want more together than there is: both get an answer, none waits for ever.
    answers = [small.ask(name, BLOCKS[10:16]) for name in ("b", "c")]
    assert answers[0] == [Answer.HIT] * 6
    assert answers[1] == [Answer.HIT] * 6, "the same blocks serve both"
    assert small.ask("d", BLOCKS[:4]) == [Answer.HIT] * 2 + [Answer.MISS] * 2


def test_a_store_whose_name_comes_late_serves_when_all_ranks_know_it(
    make: Callable[..., Engine], tmp_path: Path
) -> None:
    first = make(disk(tmp_path / "disk"))
    first.store(BLOCKS[:4])
    first.settle()
    late = make(disk(tmp_path / "disk"), late=True)
    assert late.hits("a", BLOCKS[:4]) == []
    late.workers[0].name(NAMES[0])
    assert late.hits("b", BLOCKS[:4]) == [], "the other rank's blocks have no name yet"
    assert late.store(BLOCKS[8:10]) == 2 and late.hits("c", BLOCKS[8:10]) == BLOCKS[8:10]
    late.workers[1].name(NAMES[1])
    limit = time.monotonic() + 30
    while late.hits(f"d{limit - time.monotonic()}", BLOCKS[:4]) != BLOCKS[:4]:
        assert time.monotonic() < limit, "the store never joined"
    assert late.hits("e", BLOCKS[:4]) == BLOCKS[:4]


def test_damage_on_disk_is_a_miss(make: Callable[..., Engine], tmp_path: Path) -> None:
    first = make(disk(tmp_path / "disk"))
    first.store(BLOCKS[:3])
    first.settle()
    (slab,) = (tmp_path / "disk").glob("**/slab-*")
    whole = slab.read_bytes()
    at = whole.index(content(1, BLOCKS[1]))
    with slab.open("r+b") as file:
        file.seek(at + 100)
        file.write(b"?")
    again = make(disk(tmp_path / "disk"))
    assert again.ask("a", BLOCKS[:3]) == [Answer.HIT, Answer.MISS, Answer.HIT]


def test_a_killed_server_is_a_miss(make: Callable[..., Engine], server: Any) -> None:
    engine = make(redis(server.url))
    engine.store(BLOCKS[:4])
    engine.settle()
    fresh = make(redis(server.url))
    assert fresh.hits("a", BLOCKS[:5]) == BLOCKS[:4]
    server.kill()
    late = make(redis(server.url))
    assert late.hits("b", BLOCKS[:5]) == []
    late.store(BLOCKS[:4])
    assert late.hits("c", BLOCKS[:5]) == BLOCKS[:4], "host memory serves on"


class _Hangs(DiskStore):
    """A disk that answers no load until it may."""

    may = threading.Event()

    def get(self, blocks: Sequence[Block]) -> list[bool]:
        assert self.may.wait(60)
        return super().get(blocks)


@pytest.mark.fault
def test_a_load_that_hangs_does_not_keep_an_engine_from_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backing_store, "DRAIN_SECONDS", 0.1)
    spec: Any = SimpleNamespace(open=lambda site: _Hangs(tmp_path / "disk", 8 << 20, site))
    (tmp_path / "shm").mkdir()
    engine = Engine(tmp_path / "shm", spec)
    engine.store(BLOCKS[:2])
    engine.settle()
    engine.tier._residency.clear()
    assert engine.tier.lookup("a", BLOCKS[0]) is Answer.PENDING
    engine.tier.end_step(())
    assert engine.tier._store._in_flight
    closing = threading.Thread(target=engine.tier.close, daemon=True)
    closing.start()
    closing.join(30)
    hung = closing.is_alive()
    _Hangs.may.set()
    closing.join()
    assert not hung


def test_a_load_that_hangs_is_a_miss_after_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(_Hangs, "may", threading.Event())
    spec: Any = SimpleNamespace(open=lambda site: _Hangs(tmp_path / "disk", 8 << 20, site))
    (tmp_path / "shm").mkdir()
    engine = Engine(tmp_path / "shm", spec, clock=lambda: now[0])
    engine.store(BLOCKS[:1])
    engine.settle()
    engine.tier._residency.clear()
    assert engine.tier.lookup("a", BLOCKS[0]) is Answer.PENDING
    engine.tier.end_step(())
    now[0] = PROMOTION_DEADLINE
    assert engine.tier.lookup("a", BLOCKS[0]) is Answer.PENDING
    now[0] += 1
    assert engine.tier.lookup("a", BLOCKS[0]) is Answer.MISS
    _Hangs.may.set()
    engine.settle()
    assert engine.tier.lookup("b", BLOCKS[0]) is Answer.HIT, "what came late serves others"
    engine.tier.close()


def test_a_block_that_one_worker_could_not_copy_is_not_kept(
    make: Callable[..., Engine], tmp_path: Path
) -> None:
    engine = make(disk(tmp_path / "disk"))
    engine.store(BLOCKS[:2], fails=True)
    assert engine.hits("a", BLOCKS[:2]) == []
    engine.store(BLOCKS[:2])
    assert engine.hits("b", BLOCKS[:2]) == BLOCKS[:2]


def test_after_a_reset_nothing_is_found_and_slots_in_use_are_left_alone(
    make: Callable[..., Engine], tmp_path: Path
) -> None:
    engine = make(disk(tmp_path / "disk"))
    engine.store(BLOCKS[:2])
    engine.settle()
    assert engine.ask("a", BLOCKS[:2]) == [Answer.HIT] * 2
    loading = engine.tier.prepare_load("a", BLOCKS[:2])
    engine.tier.reset()
    assert engine.ask("a", BLOCKS[:2]) == [Answer.MISS] * 2
    orders = engine.tier.prepare_store("stores", BLOCKS)
    assert len(orders) == SLOTS - 2 and not {slot for _, _, slot in orders} & set(loading)
    engine.tier.reset()
    for region in engine.workers:
        for slot in [*loading, *(slot for _, _, slot in orders)]:
            region.end([slot], [b""])
    engine.tier.end_step(())
    assert engine.tier.pool.in_use == 0


def test_workers_elsewhere_and_too_little_shared_memory_are_said(tmp_path: Path) -> None:
    with pytest.raises(TierUnusable, match="all workers on the scheduler's machine"):
        attach_region("engine", 0, tmp_path)
    with pytest.raises(TierUnusable, match="more room"):
        create_region("engine", WorkerHandshake(0, b"space", 1 << 40), 1 << 20, False, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_memory_of_an_engine_that_was_killed_while_it_started_is_removed(tmp_path: Path) -> None:
    (tmp_path / "kvtiers-0123456789abcdef-0").write_bytes(b"left behind")
    Engine(tmp_path, None)


def test_two_engines_of_one_name_are_told_apart(tmp_path: Path) -> None:
    handshake = WorkerHandshake(0, b"space-----------", PAYLOAD)
    first = create_region("mine", handshake, SLOTS, False, tmp_path)
    with pytest.raises(TierUnusable, match="engine_id 'mine'"):
        create_region("mine", handshake, SLOTS, False, tmp_path)
    create_region("other", handshake, SLOTS, False, tmp_path).close()
    attach_region("mine", 0, tmp_path).close()
    first.close()


@pytest.mark.parametrize(
    ("kind", "steps"),
    [
        ("cpu", [8]),
        ("cpu", [4, 8]),
        ("cpu", [4, 5, 6, 7, 8]),
        ("disk", [4, 8]),
        ("disk", [4, 5, 6, 7, 8]),
    ],
)
def test_a_prefix_is_evicted_from_its_tail_whatever_steps_stored_it(
    make: Callable[..., Engine], tmp_path: Path, kind: str, steps: list[int]
) -> None:
    """In host memory, or in the store behind it, which alone the second engine has."""
    room = {"capacity": SLOTS * slot_bytes(PAYLOAD) * 2, "path": tmp_path / "disk"}
    spec = tier_class("disk").model_validate({"type": "disk", **room}) if kind == "disk" else None
    engine = make(spec, slots=2 * SLOTS if kind == "disk" else SLOTS)
    for start, end_of_step in zip([0, *steps], steps, strict=False):
        engine.store(BLOCKS[start:end_of_step], request="one")
    engine.tier.request_finished("one")
    engine.settle()
    for number in (10, 12):
        engine.store(BLOCKS[number : number + 2], request=f"other-{number}")
        engine.settle()
    if kind == "disk":
        engine = make(spec)
    assert engine.hits("again", BLOCKS[:8]) == BLOCKS[:4]


def test_what_came_and_went_is_told_in_order(make: Callable[..., Engine], tmp_path: Path) -> None:
    engine = make(disk(tmp_path / "disk"), slots=16, events=True)
    for start, request in ((0, "one"), (8, "one"), (16, "other")):
        engine.store(BLOCKS[start : min(start + 8, 18)], request=request)
        engine.settle()
    told: dict[bool, set[bytes]] = {True: set(), False: set()}
    for one in engine.tier.take_happened():
        held = told[one.in_host]
        assert (one.block in held) != one.stored
        held.symmetric_difference_update({one.block})
    assert told[True] == {*BLOCKS[:14], *BLOCKS[16:18]}
    assert told[False] == set(BLOCKS[:18])
    assert engine.tier.take_happened() == []
    assert make(None).tier.take_happened() == []


@pytest.mark.parametrize("told", ["by a rank", "by the engine"])
def test_other_weights_end_it_until_a_reset(
    make: Callable[..., Engine], tmp_path: Path, told: str
) -> None:
    """The engine's connector goes on with its transfers, which must end as they began."""
    made = make(disk(tmp_path / "disk"))
    made.store(BLOCKS[:2])
    orders = made.tier.prepare_store("under way", BLOCKS[2:4])
    assert made.ask("asks", BLOCKS[:2]) == [Answer.HIT] * 2
    if told == "by a rank":
        made.workers[1].ends(made.tier.generation)
    else:
        made.tier.weights_changed()
    assert made.ask("after", BLOCKS[:2]) == [Answer.MISS] * 2
    made.load("asks", BLOCKS[:2])
    for rank, region in enumerate(made.workers):
        for block, key, slot in orders:
            region.memory.payload(slot)[:] = content(rank, block)
            region.end([slot], [stamp(key)])
    made.tier.complete_store(BLOCKS[2:4], True)
    assert made.store(BLOCKS[4:6], request="new") == 0
    made.settle()
    made.tier.reset()
    assert made.hits("again", BLOCKS[:6]) == []
    assert made.store(BLOCKS[:2], request="since") == 2
    assert made.hits("since", BLOCKS[:2]) == BLOCKS[:2]
