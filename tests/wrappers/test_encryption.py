"""Encrypted tiers against someone with the disk or the Redis: nothing to read, no way to plant."""

from __future__ import annotations

import random
import secrets
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from cryptography.hazmat.primitives.ciphers import algorithms
from cryptography.hazmat.primitives.cmac import CMAC

from spec.offloading import StoreContext, StoreSpec
from tests.support.clock import wait_for
from tests.support.servers import RedisServer, binaries
from tiers.block import HEADER_BYTES, MAX_KEY_BYTES, NAMESPACE_BYTES, parse_header
from tiers.disk.slab import slot_bytes
from tiers.disk.spec import DiskSpec
from tiers.errors import RecordError, TierUnavailable, TierUnusable
from tiers.remote.shared_spec import SharedSpec
from tiers.remote.spec import RedisSpec
from tiers.store import Block, Damages, GatheredBlock, Prefix, TierStore, capability
from tiers.testing import Memory, MemoryStore
from tiers.wrappers import encryption, integrity
from tiers.wrappers.encryption import SCALAR_MAX_KEYS, BlockCipher, HiddenNames, encrypted_bytes
from tiers.wrappers.guard import Guarded
from tiers.wrappers.opening import open_guarded

SPACE_KEY, AES_KEY = bytes(range(32)), bytes(range(100, 132))
NAMES = HiddenNames(SPACE_KEY, AES_KEY)


def cmac(key: bytes) -> bytes:
    mac = CMAC(algorithms.AES(AES_KEY))
    mac.update(key)
    return mac.finalize()


@pytest.mark.parametrize("count", [1, SCALAR_MAX_KEYS, SCALAR_MAX_KEYS + 1])
@pytest.mark.parametrize("size", range(NAMESPACE_BYTES + 1, MAX_KEY_BYTES + 1))
def test_a_name_is_its_namespace_and_the_cmac_of_its_key(size: int, count: int) -> None:
    chance = random.Random(size)
    keys = [chance.randbytes(size) for _ in range(count)]
    assert NAMES.of(keys) == [NAMES.space(key[:NAMESPACE_BYTES]) + cmac(key) for key in keys]


def test_keys_of_several_lengths_get_their_names_in_order() -> None:
    chance = random.Random(0)
    keys = [chance.randbytes(chance.randrange(NAMESPACE_BYTES + 1, 70)) for _ in range(300)]
    keys += keys[:7]
    assert NAMES.of(keys) == [name for key in keys for name in NAMES.of([key])]
    two = [
        chance.randbytes(size) for size in (24, 40) * SCALAR_MAX_KEYS
    ]  # before and after a reset
    assert NAMES.of(two) == [name for key in two for name in NAMES.of([key])]
    assert NAMES.of([]) == []


def test_names_of_one_block_of_two_ranks_have_nothing_in_common() -> None:
    block = b"the engine's hash of a prompt"
    one, other = NAMES.of([bytes([rank]) * NAMESPACE_BYTES + block for rank in range(2)])
    assert one[:NAMESPACE_BYTES] != other[:NAMESPACE_BYTES]
    assert one[NAMESPACE_BYTES:] != other[NAMESPACE_BYTES:]


def test_other_keys_make_other_names() -> None:
    key = bytes(40)
    (name,) = NAMES.of([key])
    assert HiddenNames(AES_KEY, AES_KEY).of([key])[0][:NAMESPACE_BYTES] != name[:NAMESPACE_BYTES]
    assert HiddenNames(AES_KEY, SPACE_KEY).of([key])[0][NAMESPACE_BYTES:] != name[NAMESPACE_BYTES:]


def test_nothing_is_kept_for_each_number_of_keys() -> None:
    """`struct` keeps the formats of the last hundred, of 32 bytes for each name."""
    keys = [number.to_bytes(40) for number in range(4200)]
    NAMES.of(keys)
    tracemalloc.start()
    for count in range(4000, 4040):
        NAMES.of(keys[:count])
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 1 << 20


def test_a_name_may_end_with_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encryption, "_encrypt", lambda _, blocks: np.zeros_like(blocks))
    assert NAMES.of([bytes(40)] * (SCALAR_MAX_KEYS + 1)) == [bytes(32)] * (SCALAR_MAX_KEYS + 1)


SIZE = 8192
SITE = StoreContext(SIZE)
SPACE = b"the namespace..."
KEY = SPACE + b"digest of a prompt that one could guess"
OTHER = SPACE + b"digest of another prompt, known as well"
GONE = SPACE + b"digest of a prompt that is dropped"
SECRET = b"what the user said in confidence, as KV. " * 200
assert len(SPACE) == NAMESPACE_BYTES


class Attacker:
    """Reads and writes the tier as whoever has its disk or server can; has no encryption key."""

    def __init__(self, spec: StoreSpec, read_all: Callable[[], bytes]) -> None:
        self.store = spec.open(StoreContext(encrypted_bytes(SIZE)))
        self.read_all = read_all

    def names(self) -> list[bytes]:
        """What records that lie there call themselves."""
        data, found = self.read_all(), []
        place = data.find(b"kvtiers\n")
        while place >= 0:
            with suppress(RecordError):
                found.append(parse_header(data[place : place + HEADER_BYTES]).key)
            place = data.find(b"kvtiers\n", place + 1)
        return found

    def read(self, name: bytes) -> bytearray:
        data = bytearray(encrypted_bytes(SIZE))
        assert self.store.get([Block(name, memoryview(data))]) == [True]
        return data

    def write(self, name: bytes, data: bytes | bytearray) -> None:
        self.store.drop([name])
        padded = bytearray(data).ljust(encrypted_bytes(SIZE), b"\0")
        assert self.store.put([Block(name, memoryview(padded))]) == [True]


class Victim:
    """A tier with encryption, and whoever attacks it."""

    def __init__(self, spec: StoreSpec, plain: StoreSpec, read_all: Callable[[], bytes]) -> None:
        self.spec, self.plain = spec, plain
        self.attacker = Attacker(plain, read_all)
        self.tier = opened(spec)

    def keep(self, key: bytes, payload: bytes = SECRET) -> bytes:
        """Store a block; the name that it has since."""
        before = set(self.attacker.names())
        whole = bytearray(payload[:SIZE].ljust(SIZE, b"."))
        assert self.tier.put([Block(key, memoryview(whole))]) == [True]
        (name,) = set(self.attacker.names()) - before
        return name

    def serves(self, key: bytes, tier: TierStore | None = None) -> bytes | None:
        payload = bytearray(SIZE)
        (ok,) = (tier or self.tier).get([Block(key, memoryview(payload))])
        return bytes(payload) if ok else None

    def reopen(self, keys: Sequence[str]) -> Guarded:
        """The same tier for an engine with these keys."""
        write_keys(self.spec, keys)
        return opened(self.spec)


def opened(spec: StoreSpec) -> Guarded:
    """The tier, once it has answered: a start does not wait for a Redis."""
    tier = open_guarded(spec, SITE)
    wait_for(lambda: not tier.health.opening)
    return tier


def write_keys(spec: StoreSpec, keys: Sequence[str]) -> None:
    assert spec.encryption is not None
    spec.encryption.key_file.write_text("# keys\n" + "\n".join(keys) + "\n")


MINE = secrets.token_hex(32)
NEW = secrets.token_hex(32)


@pytest.fixture(scope="module")
def one_server() -> Iterator[RedisServer]:
    with RedisServer(next(iter(binaries().values()))) as server:
        yield server


@pytest.fixture(params=["disk", "redis"])
def victim(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Victim]:
    file = tmp_path / "keys"
    file.write_text(MINE)
    file.chmod(0o600)
    encryption = {"encryption": {"key_file": str(file)}}
    settings: dict[str, Any]
    if request.param == "disk":
        folder = tmp_path / "disk"
        settings = {"capacity": 64 * slot_bytes(encrypted_bytes(SIZE)), "path": folder}
        spec: type[StoreSpec] = DiskSpec

        def read_all() -> bytes:
            return b"".join(f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file())
    else:
        server: RedisServer = request.getfixturevalue("one_server")
        client: Any = redis.Redis.from_url(server.url)
        prefix = secrets.token_hex(8)
        settings = {"url": server.url, "key_prefix": prefix, "timeout": "30s", "deadline": "30s"}
        spec = RedisSpec

        def read_all() -> bytes:
            keys = client.keys(f"{prefix}:*")
            return b"".join(key + client.get(key) for key in keys)

    made = Victim(
        spec.model_validate({**settings, **encryption}), spec.model_validate(settings), read_all
    )
    yield made
    made.tier.close()
    made.attacker.store.close()


def test_what_is_stored_comes_back(victim: Victim) -> None:
    victim.keep(KEY)
    assert victim.serves(KEY) == SECRET[:SIZE]
    assert victim.serves(OTHER) is None


def test_a_reader_finds_neither_kv_nor_names(victim: Victim) -> None:
    victim.keep(KEY)
    lies_there = victim.attacker.read_all()
    for known in (SECRET[:64], KEY[NAMESPACE_BYTES:], SPACE, KEY[-16:]):
        assert known not in lies_there


def test_a_reader_who_guesses_a_prompt_can_t_tell_whether_it_is_there(victim: Victim) -> None:
    victim.keep(KEY)
    assert victim.attacker.store.has([KEY]) == [False]
    assert opened(victim.plain).has([KEY]) == [False]


def test_equal_blocks_look_different(victim: Victim) -> None:
    one, two = victim.keep(KEY), victim.keep(OTHER)
    first, second = victim.attacker.read(one), victim.attacker.read(two)
    assert sum(a == b for a, b in zip(first[:SIZE], second[:SIZE], strict=True)) < SIZE // 50


def assert_planted_in_vain(victim: Victim, key: bytes = KEY) -> None:
    assert capability(victim.tier, Damages)
    before = victim.tier.damaged()
    assert victim.serves(key) is None
    assert victim.tier.damaged() == before + 1
    assert victim.tier.has([key]) == [False], "it is not offered again"


@pytest.mark.parametrize("place", [0, 11, 12, 4000, 12 + SIZE, 12 + SIZE + 15])
def test_a_changed_bit_under_a_right_checksum(victim: Victim, place: int) -> None:
    name = victim.keep(KEY)
    data = victim.attacker.read(name)
    data[place] ^= 1
    victim.attacker.write(name, data)
    assert_planted_in_vain(victim)


def test_another_block_of_ours_under_this_name(victim: Victim) -> None:
    name, other = victim.keep(KEY), victim.keep(OTHER, b"another answer")
    victim.attacker.write(name, victim.attacker.read(other))
    assert_planted_in_vain(victim)


def test_the_same_prompt_s_block_of_another_model(victim: Victim) -> None:
    name = victim.keep(KEY)
    foreign = victim.keep(b"another model..." + KEY[NAMESPACE_BYTES:], b"another model's KV")
    victim.attacker.write(name, victim.attacker.read(foreign))
    assert_planted_in_vain(victim)


def test_plain_bytes_under_the_hidden_name(victim: Victim) -> None:
    name = victim.keep(KEY)
    victim.attacker.write(name, b"planted" * 1000)
    assert_planted_in_vain(victim)


def test_a_plain_tier_s_block_is_never_asked_for(victim: Victim) -> None:
    plain = opened(victim.plain)
    assert plain.put([Block(KEY, memoryview(bytearray(b"planted".ljust(SIZE))))]) == [True]
    plain.close()
    assert victim.serves(KEY) is None


def test_a_block_sealed_with_the_attacker_s_key(victim: Victim) -> None:
    name = victim.keep(KEY)
    sealed = bytearray(encrypted_bytes(SIZE))
    block = Block(KEY, memoryview(bytearray(b"planted".ljust(SIZE))))
    BlockCipher(secrets.token_bytes(32)).encrypt(block, memoryview(sealed))
    victim.attacker.write(name, sealed)
    assert_planted_in_vain(victim)


def test_a_shorter_block_of_ours_made_longer(victim: Victim) -> None:
    name = victim.keep(KEY)
    short = bytearray(encrypted_bytes(SIZE))
    block = Block(KEY, memoryview(bytearray(SECRET[: SIZE - 16])))
    BlockCipher(bytes.fromhex(MINE)).encrypt(block, memoryview(short))
    victim.attacker.write(name, short)
    assert_planted_in_vain(victim)


def test_no_seal_at_all(victim: Victim) -> None:
    name = victim.keep(KEY)
    victim.attacker.write(name, b"")
    assert_planted_in_vain(victim)


def test_keys_rotate_without_a_miss_and_a_removed_one_opens_nothing(victim: Victim) -> None:
    victim.keep(KEY)
    victim.keep(GONE)
    rotated = victim.reopen([NEW, MINE])
    for verb in (rotated.has, rotated.peek) if victim.spec.is_prompt else (rotated.has,):
        assert verb([OTHER, KEY, GONE]) == [False, True, True]
    rotated.drop([GONE])
    assert rotated.has([KEY, GONE]) == [True, False]
    assert victim.serves(KEY, rotated) == SECRET[:SIZE]
    assert rotated.put([Block(OTHER, memoryview(bytearray(SECRET[:SIZE])))]) == [True]
    assert rotated.has([OTHER, KEY]) == [True, True]
    rotated.close()
    later = victim.reopen([NEW])
    assert later.has([KEY, OTHER]) == [False, True]
    assert victim.serves(KEY, later) is None
    assert victim.serves(OTHER, later) == SECRET[:SIZE]
    later.close()


class Midway(MemoryStore):
    """Has time for three blocks."""

    asked = 0

    def get(self, blocks: Sequence[Block]) -> list[bool]:
        if self.asked:
            raise TierUnavailable("no answer in time")
        self.asked = 1
        return super().get(blocks[:3]) + [False] * len(blocks[3:])


@pytest.mark.parametrize("at_once", [3, 8])
def test_what_came_in_time_is_loaded_while_keys_rotate(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what came before there was no time for the rest of many blocks."""
    monkeypatch.setattr(integrity, "SCRATCH_BYTES", at_once * encrypted_bytes(100))
    keys = [secrets.token_bytes(40) for _ in range(8)]
    store = encryption.EncryptedStore(Midway(), [bytes(32), bytes([1] * 32)], 100)
    store.put(Memory(keys, 100).fill().blocks)
    memory = Memory(keys, 100)
    assert store.get(memory.blocks) == [True] * 3 + [False] * 5
    assert all(map(memory.holds, range(3)))
    with pytest.raises(TierUnavailable):
        store.get(memory.blocks)


class PackingWindows(MemoryStore):
    def pack_blocks(self) -> int:
        return 4

    def held_prefix(self, prompts: Sequence[Sequence[bytes]]) -> list[int]:
        return [0] * len(prompts)

    def held_blocks(self, prompts: Sequence[Sequence[bytes]]) -> list[list[bool]]:
        return [self.has(keys) for keys in prompts]


def test_blocks_of_windows_are_found_under_every_key_while_keys_rotate() -> None:
    inner, old, new = PackingWindows(), bytes(32), bytes([1] * 32)
    keys = [secrets.token_bytes(40) for _ in range(4)]
    for key, some in ((old, keys[:1]), (new, keys[2:3])):
        encryption.EncryptedStore(inner, [key], 100).put(Memory(some, 100).fill().blocks)
    store = encryption.EncryptedStore(inner, [new, old], 100)
    assert store.held_blocks([keys, [], keys[1:3]]) == [
        [True, False, True, False],
        [],
        [False, True],
    ]


def test_a_conversation_goes_on_in_packs_while_keys_rotate(tmp_path: Path) -> None:
    """What follows is under the new key, and what it began with is not."""
    tmp_path.chmod(0o700)
    space, keys = secrets.token_bytes(NAMESPACE_BYTES), [bytes([n] * 32) for n in range(3)]
    prompt, other = ([space + secrets.token_bytes(24) for _ in range(150)] for _ in range(2))
    with closing(SharedSpec(path=tmp_path).open(StoreContext(encrypted_bytes(100)))) as packs:
        group = packs.pack_blocks()

        def put(store: TierStore, first: int, last: int) -> bool:
            numbers, memory = range(first, last), Memory(prompt[first:last], 100).fill()
            return all(
                store.put(
                    [
                        GatheredBlock(block.key, block.payload, None, Prefix(prompt, at, group))
                        for at, block in zip(numbers, memory.blocks, strict=True)
                    ]
                )
            )

        for newest, (first, last) in enumerate([(0, 10), (10, 24), (24, 150)]):
            store = encryption.EncryptedStore(packs, keys[newest::-1], 100)
            assert put(store, first, last)
            asked = [prompt, prompt[:15], other, prompt[:9] + other, []]
            assert store.held_prefix(asked) == [last, min(last, 15), 0, 9, 0]
        store.drop(prompt[:1])
        assert store.held_prefix([prompt]) == [0]
        assert put(store, 0, 10)
        assert store.held_prefix([prompt]) == [150]


@pytest.mark.parametrize(
    "keys", [[], ["abc"], [MINE, MINE], ["0" * 63 + "g"], [f"{n:064x}" for n in range(9)]]
)
def test_a_bad_key_file_is_told_and_none_of_it_shown(
    victim: Victim, keys: list[str], tmp_path: Path
) -> None:
    with pytest.raises(TierUnusable) as told:
        victim.reopen(keys)
    assert str(tmp_path / "keys") in str(told.value)
    assert not any(key in str(told.value) for key in keys)
    (tmp_path / "keys").unlink()
    with pytest.raises(TierUnusable, match="No such file"):
        open_guarded(victim.spec, SITE)


def test_compressed_and_encrypted_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(MINE)
    with pytest.raises(ValueError, match="encrypted blocks can't be made smaller"):
        RedisSpec.model_validate(
            {"url": "redis://x", "codec": "zstd", "encryption": {"key_file": str(file)}}
        )
