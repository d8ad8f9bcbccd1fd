"""Routers read what tiers hold from events as vLLM publishes them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from bench.routers import (
    RESULT,
    WITHOUT,
    Addresses,
    Indexer,
    Publishing,
    indexer_python,
    scenario,
)
from spec.chain import ChainSpec, EventsSpec
from tests.engine.vllm.tiny_vllm import BLOCK_TOKENS, Run, documents
from tests.engine.vllm.vllm_chains import IN_PROCESS
from tests.engine.vllm.vllm_server import VllmServer
from tests.support.clock import wait_for
from tests.support.replay import ReplayEngine
from tests.support.replay_chains import MODEL, chain_of, cpu, disk
from tests.support.servers import RedisServer
from tiers.contract.protocols import BlockEvent, Origin

pytestmark = pytest.mark.vllm

SIZE = MODEL.block_tokens


def event(stored: bool = True, is_local: bool = True) -> BlockEvent:
    return BlockEvent(
        "my-nvme",
        "STORAGE",
        is_local,
        stored=stored,
        hashes=(b"a" * 32, b"b" * 32),
        block_tokens=2,
        parent=b"p" * 32,
        origin=Origin([1, 2, 3, 4], 7, "adapter"),
    )


def in_vllms_words(given: BlockEvent, **settings: bool) -> Any:
    from tiers.engine.vllm_events import AsVllm, GroupKind

    (made,) = AsVllm(EventsSpec.model_validate(settings), [GroupKind("full_attention")])([given])
    return made


def test_events_are_what_vllm_itself_would_say() -> None:
    from vllm.distributed.kv_events import BlockRemoved, BlockStored

    stored = in_vllms_words(event())
    assert isinstance(stored, BlockStored)
    assert (stored.medium, stored.block_size, stored.token_ids) == ("STORAGE", 2, [1, 2, 3, 4])
    assert (stored.lora_id, stored.lora_name) == (7, "adapter")
    assert stored.parent_block_hash == int.from_bytes(b"p" * 8)
    assert stored.block_hashes == [int.from_bytes(b"a" * 8), int.from_bytes(b"b" * 8)]
    assert (stored.group_idx, stored.kv_cache_spec_kind) == (0, "full_attention")
    removed = in_vllms_words(event(stored=False))
    assert isinstance(removed, BlockRemoved)
    assert (removed.medium, removed.block_hashes) == ("STORAGE", stored.block_hashes)


@pytest.mark.parametrize("stored", [True, False])
def test_what_some_routers_drop_is_told_only_when_asked_for(stored: bool) -> None:
    plain = in_vllms_words(event(stored))
    assert (plain.locality, plain.ownership) == (None, None)
    here = in_vllms_words(event(stored), locality=True, ownership=True)
    assert (here.locality, here.ownership) == ("LOCAL", "my-nvme")
    there = in_vllms_words(event(stored, is_local=False), locality=True)
    assert there.locality == "REMOTE"


def test_extra_keys_are_vllms_own() -> None:
    from tiers.engine.vllm_events import describe

    request = SimpleNamespace(
        all_token_ids=list(range(12)),
        lora_request=SimpleNamespace(adapter_id=3, name="a", lora_name="a", lora_path="p"),
        mm_features=[],
        cache_salt="tenant",
        prompt_embeds=None,
        session_id="s",
    )
    said = describe(request, 0, 4, 2)
    assert said == Origin(list(range(8)), 3, "a", [("a", "tenant"), ("a",)], "s")
    request.lora_request, request.cache_salt = None, None
    assert describe(request, 4, 4, 2) == Origin(list(range(4, 12)), session="s")


@pytest.fixture
def publish(
    engine: Callable[..., ReplayEngine],
) -> Iterator[Callable[..., Publishing]]:
    """Make engines that publish their events."""
    made: list[Publishing] = []
    addresses = Addresses()

    def make(chain: ChainSpec, **options: Any) -> Publishing:
        made.append(Publishing(engine(chain, kv_events=True, **options), chain, addresses))
        return made[-1]

    yield make
    for one in made:
        one.close()
    addresses.close()


@pytest.fixture
def indexer() -> Iterator[Indexer]:
    """A real indexer."""
    python = indexer_python()
    if python is None:
        pytest.skip(WITHOUT)
    with Indexer(python, SIZE) as running:
        yield running


def test_by_the_rules_of_routers_nothing_is_ignored(
    publish: Callable[..., Publishing], tmp_path: Path
) -> None:
    """As the next test, where no indexer is installed: by its rules, as they were found."""
    publishing = publish(chain_of(cpu(12), disk(tmp_path)))
    publishing.generate(range(40))
    publishing.generate(range(100, 124))
    publishing.generate([*range(12), *range(200, 230)])
    llmd = publishing.llmd
    assert llmd.ignored == 0
    assert llmd.query(range(40), "storage") == 40
    assert llmd.query([*range(12), *range(200, 230)], "storage") == 40
    for event in publishing.said:
        assert event["medium"] in ("CPU", "STORAGE"), "Dynamo drops cpu, disk and other spellings"
        assert event.get("ownership") is None, "Dynamo drops what has an owner"
        assert event.get("locality") in (None, "LOCAL"), "Dynamo drops what is REMOTE"
        assert all(0 <= one < 1 << 64 for one in event["block_hashes"])
        if event["type"] == "BlockStored":
            assert event["block_size"] == SIZE, "Dynamo drops other sizes"
            assert len(event["token_ids"]) == SIZE * len(event["block_hashes"])
            assert len(set(event["block_hashes"])) == len(event["block_hashes"])
            assert event["kv_cache_spec_kind"] == "full_attention"


def test_an_indexer_knows_what_each_tier_holds(
    publish: Callable[..., Publishing], indexer: Indexer, tmp_path: Path
) -> None:
    publishing = publish(chain_of(cpu(12), disk(tmp_path)))
    indexer.register(1, publishing.addresses)
    publishing.generate(range(40))
    indexer.until(range(40), {"1": {"gpu": 0, "cpu": 40, "disk": 40}})
    assert publishing.llmd.query(range(40), "cpu") == 40
    assert publishing.llmd.query(range(40), "storage") == 40
    publishing.generate(range(100, 124))  # the tail of the first prompt leaves host memory
    indexer.until(range(40), {"1": {"gpu": 0, "cpu": 24, "disk": 40}})
    indexer.until(range(100, 124), {"1": {"gpu": 0, "cpu": 24, "disk": 24}})
    assert publishing.llmd.query(range(40), "cpu") == 24
    assert publishing.llmd.query(range(40), "storage") == 40
    assert publishing.llmd.ignored == 0


def test_three_engines_over_one_redis_and_two_disks(
    indexer: Indexer, shared_server: RedisServer, tmp_path: Path
) -> None:
    found = scenario(indexer, shared_server.url, tmp_path)
    assert found == json.loads(RESULT.read_text())
    again = found["engine 1 is registered anew"]
    assert again["of engine 1"]["dynamo"] == {"1": {"gpu": 0, "cpu": 0, "disk": 40}}
    for numbers in found["sequence numbers"].values():
        assert numbers == list(range(len(numbers)))


def test_a_vllm_that_starts_again_tells_an_indexer_what_its_disk_has(
    tiny_llama: Path, tmp_path: Path
) -> None:
    """Two real servers, one after the other, over one disk; the second tells before it is asked."""
    if (python := indexer_python()) is None:
        pytest.skip(WITHOUT)
    prompts = documents(5, 600)  # of which an engine of 40 blocks keeps nothing of the first two
    addresses = Addresses()
    chain = tmp_path / "chain.yaml"
    tiers = [disk(tmp_path / "disk", capacity="64MiB")]
    chain.write_text(
        yaml.safe_dump({"version": 1, "load_when": "always", "staging": "64MiB", "tiers": tiers})
    )
    on_disk = {"1": {"gpu": 0, "cpu": 0, "disk": 18 * BLOCK_TOKENS}}
    with Indexer(python, BLOCK_TOKENS) as indexer:
        with served(tiny_llama, chain, tmp_path / "log", addresses) as server:
            indexer.register(1, addresses)
            for prompt in prompts:
                server.complete(prompt, 1)
            server.settle()
            for prompt in prompts[:2]:
                indexer.until(prompt, on_disk)
        indexer.unregister(1)
        with served(tiny_llama, chain, tmp_path / "log", addresses) as server:
            wait_for(lambda: any(b"STORAGE" in said for _, said in addresses.replayed()), 60)
            indexer.register(1, addresses)
            server.complete(documents(1, 40, seed=7)[0], 1)  # its event shows what was missed
            for prompt in prompts:
                indexer.until(prompt, on_disk)
    addresses.close()


@contextlib.contextmanager
def served(model: Path, chain: Path, log: Path, addresses: Addresses) -> Iterator[VllmServer]:
    """A server that publishes its events."""
    config = json.dumps(publishing_to(addresses))
    server = VllmServer(model, chain, log, **{"kv-events-config": config})
    try:
        yield server
    finally:
        server.close()


def publishing_to(addresses: Addresses) -> dict[str, Any]:
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": addresses.events,
        "replay_endpoint": addresses.replay,
    }


def test_an_engines_own_events_and_ours_are_of_one_form(
    run_vllm: Callable[..., Run], tmp_path: Path
) -> None:
    """What a real engine publishes of its own blocks is what it publishes of a tier's."""
    import msgspec
    import zmq

    addresses = Addresses()
    listening: Any = zmq.Context.instance().socket(zmq.SUB)
    with listening:
        # An engine that publishes before this is connected to it is not heard.
        listening.setsockopt(zmq.RECONNECT_IVL, 1)
        connects = {"0": ("pause", 2.0)}
        listening.connect(addresses.events)
        listening.subscribe(b"")
        prompts = [[(prompt, 4)] for prompt in documents(2, 200)]
        tiers = [{"type": "cpu", "capacity": "64MiB"}, disk(tmp_path, capacity="64MiB")]
        publishing = publishing_to(addresses)
        run_vllm(prompts, tiers, kv_events_config=publishing, before=connects, **IN_PROCESS)
        said: list[Any] = []
        while listening.poll(1000):
            _, number, payload = listening.recv_multipart()
            said.append((int.from_bytes(number, "big"), msgspec.msgpack.decode(payload)[1]))
    addresses.close()
    assert [number for number, _ in said] == list(range(len(said)))
    stored = [one for _, batch in said for one in batch if one["type"] == "BlockStored"]
    blocks = {medium: known(one for one in stored if one["medium"] == medium) for medium in MEDIA}
    assert len(blocks["GPU"]) >= 2 * (200 // BLOCK_TOKENS)
    assert blocks["CPU"] and blocks["STORAGE"]
    for medium in ("CPU", "STORAGE"):
        assert blocks[medium].items() <= blocks["GPU"].items()


MEDIA = ("GPU", "CPU", "STORAGE")


def known(events: Iterable[Any]) -> dict[int, Any]:
    """What events say of each block, by its hash."""
    found = {}
    for one in events:
        parent, size = one["parent_block_hash"], one["block_size"]
        for number, block in enumerate(one["block_hashes"]):
            tokens = tuple(one["token_ids"][number * size : (number + 1) * size])
            rest = {k: one.get(k) for k in one if k not in OF_SEVERAL}
            rest["extra_keys"] = (one.get("extra_keys") or {number: None})[number]
            found[block] = (parent, tokens, rest)
            parent = block
    return found


OF_SEVERAL = ("block_hashes", "parent_block_hash", "token_ids", "medium", "extra_keys")
