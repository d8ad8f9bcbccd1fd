"""What a plugin's store gives back is served only if it is the very block that was put."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Protocol

import pytest

import tiers.store
from spec.offloading import StoreContext, StoreSpec
from tests.support.faulty_stores import FaultyStore, SlowStore
from tiers.block import HEADER_BYTES, digest
from tiers.errors import TierError, TierUnavailable
from tiers.store import Block, Damages, LocalIndex, TierStore, capability, required
from tiers.testing import Memory, StoreContract, make_key
from tiers.wrappers import integrity, reopening
from tiers.wrappers.encryption import EncryptedStore
from tiers.wrappers.guard import Guarded
from tiers.wrappers.integrity import VerifiedStore, record_bytes
from tiers.wrappers.opening import open_guarded
from tiers.wrappers.put_process import PutsApart

SIZE = 4096


class Store:
    """A right store, in a dict; a test makes a liar of it."""

    def __init__(self, site: StoreContext) -> None:
        self.site = site
        self.payloads: dict[bytes, bytes] = {}
        self.dropped: list[bytes] = []

    def has(self, keys: Sequence[bytes]) -> Any:
        return [key in self.payloads for key in keys]

    def put(self, blocks: Sequence[Block]) -> Any:
        self.payloads.update((block.key, bytes(block.payload)) for block in blocks)
        return [True] * len(blocks)

    def get(self, blocks: Sequence[Block]) -> Any:
        for key, payload in blocks:
            payload[:] = self.payloads.get(key, bytes(len(payload)))
        return [key in self.payloads for key, _ in blocks]

    def drop(self, keys: Sequence[bytes]) -> None:
        self.dropped += keys
        for key in keys:
            self.payloads.pop(key, None)

    def close(self) -> None:
        pass


class DictSpec(StoreSpec):
    def open(self, site: StoreContext) -> TierStore:
        MADE.append(MAKE[0](site))
        return MADE[-1]


class VerifyingSpec(DictSpec):
    verifies: ClassVar[bool] = True


class TriedSpec(VerifyingSpec):
    def medium(self, store: TierStore) -> Any:
        return Dict(store)


class Dict:
    """What a store in a dict keeps, as its medium."""

    def __init__(self, store: Any) -> None:
        self.payloads: dict[bytes, bytes] = store.payloads

    def read(self, key: bytes) -> bytes:
        return self.payloads[key]

    def write(self, key: bytes, data: bytes) -> None:
        self.payloads[key] = data


class Careful(Store):
    """Keeps a checksum of key and payload before each payload."""

    def put(self, blocks: Sequence[Block]) -> Any:
        for key, payload in blocks:
            self.payloads[key] = digest(key + bytes(payload)) + bytes(payload)
        return [True] * len(blocks)

    def get(self, blocks: Sequence[Block]) -> Any:
        return [self._take(*block) for block in blocks]

    def _take(self, key: bytes, payload: memoryview) -> bool:
        kept = self.payloads.get(key, b"")
        if len(kept) != 16 + len(payload) or kept[:16] != digest(key + kept[16:]):
            return False
        payload[:] = kept[16:]
        return True


MAKE: list[Callable[[StoreContext], Store]] = []
MADE: list[Store] = []


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    MADE.clear()
    MAKE[:] = [Store]
    yield


def opened(make: type[Store] = Store) -> Guarded:
    MAKE[:] = [make]
    return open_guarded(DictSpec(type="dict"), StoreContext(SIZE))


class Zeroed(Store):
    def get(self, blocks: Sequence[Block]) -> Any:
        for _, payload in blocks:
            payload[:] = bytes(len(payload))
        return [True] * len(blocks)


class ZeroedBehindTheHeader(Store):
    def get(self, blocks: Sequence[Block]) -> Any:
        got = super().get(blocks)
        for _, payload in blocks:
            payload[HEADER_BYTES:] = bytes(len(payload) - HEADER_BYTES)
        return got


class AnothersPayload(Store):
    def get(self, blocks: Sequence[Block]) -> Any:
        other = list(self.payloads.values())[-1]
        for _, payload in blocks:
            payload[:] = other
        return [True] * len(blocks)


class Idle(Store):
    """Says True, and leaves the memory as it was."""

    def get(self, blocks: Sequence[Block]) -> Any:
        return [True] * len(blocks)


class OneBit(Store):
    def get(self, blocks: Sequence[Block]) -> Any:
        got = super().get(blocks)
        blocks[0].payload[HEADER_BYTES + 100] ^= 4
        return got


@pytest.mark.fault
@pytest.mark.parametrize("liar", [Zeroed, ZeroedBehindTheHeader, AnothersPayload, Idle, OneBit])
def test_a_get_that_lies_is_a_miss(liar: type[Store]) -> None:
    store = opened(liar)
    first, other = make_key(), make_key()
    assert store.put(Memory([first, other], SIZE).fill().blocks) == [True, True]
    assert store.get(Memory([first], SIZE).blocks) == [False]
    assert store.damaged() == 1
    assert MADE[0].dropped == [first] and first not in MADE[0].payloads
    assert store.health.reads_up, "the others are still served"


def test_what_a_key_had_before_is_not_served_from_scratch_memory() -> None:
    """A store that answers True without writing gets memory in which a block may still lie."""

    class Once(Store):
        def get(self, blocks: Sequence[Block]) -> Any:
            return super().get(blocks) if len(self.dropped) == 0 else [True] * len(blocks)

    store = opened(Once)
    key = make_key()
    store.put(Memory([key], SIZE).fill().blocks)
    assert store.get(Memory([key], SIZE).blocks) == [True]
    store.drop([key])
    assert store.get(Memory([key], SIZE).blocks) == [False]


@pytest.mark.fault
def test_memory_that_is_written_to_later_is_never_the_caller_s() -> None:
    class Late(Store):
        kept: ClassVar[list[memoryview]] = []

        def get(self, blocks: Sequence[Block]) -> Any:
            got = super().get(blocks)
            self.kept[:] = [payload for _, payload in blocks]
            return got

    store = opened(Late)
    key = make_key()
    store.put(Memory([key], SIZE).fill().blocks)
    memory = Memory([key], SIZE)
    assert store.get(memory.blocks) == [True]
    Late.kept[0][:] = bytes(len(Late.kept[0]))
    assert memory.holds(0)


STRANGE: list[Callable[[int], object]] = [
    lambda count: (True for _ in range(count)),
    lambda count: dict.fromkeys(range(count), True),
    lambda count: "y" * count,
    lambda count: [True] * (count + 1),
    lambda count: [True] * (count - 1),
    lambda count: [1] * count,
    lambda count: ["no"] * count,
    lambda count: None,
    lambda count: True,
]


@pytest.mark.fault
@pytest.mark.parametrize("strange", range(len(STRANGE)))
@pytest.mark.parametrize("verb", ["has", "put", "get"])
@pytest.mark.parametrize("spec", [DictSpec, VerifyingSpec])
def test_an_answer_of_another_shape_is_a_miss(
    spec: type[DictSpec], verb: str, strange: int
) -> None:
    made = type("Odd", (Store,), {verb: lambda self, items: STRANGE[strange](len(items))})
    MAKE[:] = [made]
    store = open_guarded(spec(type="dict"), StoreContext(SIZE))
    keys = [make_key(), make_key()]
    asked: dict[str, Any] = {"has": keys}
    assert getattr(store, verb)(asked.get(verb, Memory(keys, SIZE).blocks)) == [False, False]
    assert store.failures.by_kind() == {"TierError": 1}


def lengths(
    spec: type[DictSpec], make: Callable[[StoreContext], Store], *, tells: bool = True
) -> list[int]:
    """The payload lengths that stores of the spec are opened for; the last of them stays open."""
    MAKE[:] = [make]
    open_guarded(spec(type="dict"), StoreContext(SIZE), announce=id if tells else None)  # type: ignore[arg-type]
    return [store.site.payload_bytes for store in MADE]


def test_a_store_is_told_the_length_of_records_unless_it_shows_that_it_verifies() -> None:
    assert lengths(DictSpec, Store) == [record_bytes(SIZE)] == [2 * 4096]
    MADE.clear()
    assert lengths(TriedSpec, Careful) == [SIZE]
    assert not MADE[0].payloads, "nothing of the trial is left"
    assert len(set(MADE[0].dropped)) >= 6


class Unkeyed(Careful):
    """Its checksum is of the payload alone."""

    def put(self, blocks: Sequence[Block]) -> Any:
        for key, payload in blocks:
            self.payloads[key] = digest(bytes(payload)) + bytes(payload)
        return [True] * len(blocks)

    def _take(self, key: bytes, payload: memoryview) -> bool:
        kept = self.payloads.get(key, b"")
        if len(kept) != 16 + len(payload) or kept[:16] != digest(kept[16:]):
            return False
        payload[:] = kept[16:]
        return True


class Short(Store):
    """Serves what it has, if it is the payload's beginning."""

    def get(self, blocks: Sequence[Block]) -> Any:
        for key, payload in blocks:
            kept = self.payloads.get(key, b"")
            payload[: len(kept)] = kept
        return [key in self.payloads for key, _ in blocks]


class ReadOnly(Careful):
    def put(self, blocks: Sequence[Block]) -> Any:
        return [False] * len(blocks)


class Raises(Careful):
    def get(self, blocks: Sequence[Block]) -> Any:
        raise KeyError("of a bug")


@pytest.mark.fault
@pytest.mark.parametrize(
    ("spec", "store", "says"),
    [
        (VerifyingSpec, Careful, "its spec has no `medium`"),
        (TriedSpec, Store, "it serves a block with a bit flipped at its start"),
        (TriedSpec, Short, "it serves a block with a bit flipped at its start"),
        (TriedSpec, Unkeyed, "another block's bytes in place of its own"),
        (TriedSpec, ReadOnly, "it could not be tried (CannotTry: it does not take a block)"),
        (TriedSpec, Raises, "it could not be tried (KeyError: 'of a bug')"),
    ],
)
def test_a_store_that_only_says_that_it_verifies_is_not_believed(
    spec: type[DictSpec], store: type[Store], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert lengths(spec, store)[-1] == record_bytes(SIZE)
    (line,) = caplog.messages
    assert "tier dict (package tests) claims that it verifies, but" in line and says in line
    lengths(spec, store, tells=False)  # as each worker opens it
    assert len(caplog.messages) == 1


def test_a_store_that_is_down_is_tried_when_it_is_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reopening, "RETRY_AFTER", 0.1)

    class Down(Careful):
        def put(self, blocks: Sequence[Block]) -> Any:
            if len(MADE) == 1:
                raise TierUnavailable("no server")
            return super().put(blocks)

    closed: list[object] = []
    Down.close = lambda self: closed.append(self)  # type: ignore[method-assign]
    MAKE[:] = [Down]
    store = open_guarded(TriedSpec(type="dict"), StoreContext(SIZE), announce=lambda _: None)
    memory = Memory([make_key()], SIZE).fill()
    while store.put(memory.blocks) != [True]:
        time.sleep(0.05)
    assert [one.site.payload_bytes for one in MADE] == [SIZE] * 2
    assert closed == MADE[:1]
    assert not [line for line in caplog.messages if "verifies" in line]


def test_many_blocks_pass_through_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integrity, "SCRATCH_BYTES", 3 * record_bytes(SIZE))
    largest = 0

    class Counting(Store):
        def put(self, blocks: Sequence[Block]) -> Any:
            nonlocal largest
            largest = max(largest, len(blocks))
            return super().put(blocks)

    store = opened(Counting)
    keys = [make_key() for _ in range(20)]
    assert store.put(Memory(keys, SIZE).fill().blocks) == [True] * 20
    memory = Memory(keys, SIZE)
    assert store.get(memory.blocks) == [True] * 20
    assert all(memory.holds(index) for index in range(20))
    assert largest == 3


@pytest.mark.parametrize("verb", ["put", "get"])
@pytest.mark.parametrize("works", [0, 2])
def test_what_moved_before_a_part_that_fails_has_moved(
    verb: str, works: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(integrity, "SCRATCH_BYTES", 3 * record_bytes(SIZE))
    inner, keys = Store(StoreContext(record_bytes(SIZE))), [make_key() for _ in range(9)]
    store = VerifiedStore(inner, SIZE)
    store.put(Memory(keys, SIZE).fill().blocks)
    honest, parts = getattr(inner, verb), list[int]()

    def failing(blocks: Sequence[Block]) -> Any:
        if len(parts) == works:
            raise TierUnavailable("gone")
        parts.append(len(blocks))
        return honest(blocks)

    monkeypatch.setattr(inner, verb, failing)
    memory = Memory(keys, SIZE).fill() if verb == "put" else Memory(keys, SIZE)
    if works:
        assert getattr(store, verb)(memory.blocks) == [True] * 6 + [False] * 3
        assert all(memory.holds(index) for index in range(6))
    else:
        with pytest.raises(TierUnavailable, match="gone"):
            getattr(store, verb)(memory.blocks)


class TestVerified(StoreContract):
    """The wrapper changes nothing for a store that is right."""

    def open_store(self, payload_bytes: int) -> TierStore:
        return VerifiedStore(Store(StoreContext(record_bytes(payload_bytes))), payload_bytes)


def test_what_the_store_can_not_is_an_error_of_a_tier() -> None:
    """As where it could when it was asked, and was opened anew since."""
    with pytest.raises(TierError, match="no LocalIndex"):
        required(VerifiedStore(Store(StoreContext(record_bytes(SIZE))), SIZE), LocalIndex)


CAPABILITIES = [kind for kind in vars(tiers.store).values() if getattr(kind, "_is_protocol", False)]


@pytest.mark.parametrize(
    "wrapper", [VerifiedStore, EncryptedStore, PutsApart, SlowStore, FaultyStore]
)
def test_a_wrapper_has_all_methods_of_a_capability_or_none(wrapper: type) -> None:
    """With some of them it would be passed by, as one that encrypts must not be."""
    for kind in CAPABILITIES:
        found = {hasattr(wrapper, name) for name in vars(kind) if not name.startswith("_")}
        assert len(found) == 1 or kind is Protocol, kind


def test_it_counts_damage_whatever_the_store_can() -> None:
    assert capability(opened(), Damages) is not None
