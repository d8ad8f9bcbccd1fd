"""What a plugin's store gives back is served only if it is the very block that was put."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Protocol

import pytest

import tiers.store
from spec.offloading import StoreContext, StoreSpec
from tests.support.faulty_stores import FaultyStore, SlowStore
from tiers.block import HEADER_BYTES
from tiers.errors import TierError, TierUnavailable
from tiers.store import (
    Block,
    Damages,
    LocalIndex,
    TierStore,
    batch_blocks,
    capability,
    required,
)
from tiers.testing import GivenSpec, Memory, MemoryStore, StoreContract, make_key
from tiers.wrappers import integrity
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
def test_an_answer_of_another_shape_is_a_miss(verb: str, strange: int) -> None:
    made = type("Odd", (Store,), {verb: lambda self, items: STRANGE[strange](len(items))})
    MAKE[:] = [made]
    store = open_guarded(DictSpec(type="dict"), StoreContext(SIZE))
    keys = [make_key(), make_key()]
    asked: dict[str, Any] = {"has": keys}
    assert getattr(store, verb)(asked.get(verb, Memory(keys, SIZE).blocks)) == [False, False]
    assert store.failures.by_kind() == {"TierError": 1}


class OursSpec(GivenSpec):
    """As the disk's: what opens it is in `tiers`."""

    verifies: ClassVar[bool] = True


@pytest.mark.fault
@pytest.mark.parametrize("spec", [DictSpec, VerifyingSpec])
def test_a_plugin_s_store_is_told_the_length_of_records_whatever_it_says(
    spec: type[DictSpec],
) -> None:
    open_guarded(spec(type="dict"), StoreContext(SIZE))
    assert [store.site.payload_bytes for store in MADE] == [record_bytes(SIZE)] == [2 * 4096]


def test_a_store_of_ours_that_verifies_is_given_payloads() -> None:
    ours = open_guarded(OursSpec(type="given"), StoreContext(SIZE))
    plain = open_guarded(GivenSpec(type="given"), StoreContext(SIZE))
    assert isinstance(ours.now(), MemoryStore) and isinstance(plain.now(), VerifiedStore)


def test_a_batch_goes_on_as_one() -> None:
    """Else its last blocks would be put, and count as used, last."""
    for size in (4096, 500 << 10, 1 << 19, 600 << 10, 1 << 20, 1 << 21, 5000 << 10, 1 << 24):
        for store in (
            VerifiedStore(MemoryStore(), size),
            EncryptedStore(MemoryStore(), [bytes(32)], size),
        ):
            assert store._at_once >= batch_blocks(size), f"{size}"


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
