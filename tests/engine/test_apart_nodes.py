"""Prefill and decode apart: a node stores what it computes behind KV that another has sent if that
has the same weights. The nodes are replayed; what a proxy hands on is given."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engine.identity.test_facts import Facts
from tests.engine.test_adapter_marks import Layer, Model, adapter, write
from tests.engine.test_tenants import reports
from tests.support.changing import change, running
from tests.support.clock import wait_for
from tests.support.replay import ReplayEngine, ReplayModel, ReplayRequest
from tests.support.replay_chains import chain_of, close, cpu, disk, measured
from tiers.contract.stats import CHAIN
from tiers.engine.adapter_marks import MarksOfRequests, SeenAdapters

PROMPT = list(range(60))
TO_DECODE = {"do_remote_decode": True}

Node = Callable[..., ReplayEngine]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made: list[ReplayEngine] = []

    def make(
        weights: str, *tiers: Any, used: dict[str, str] | None = None, **more: Any
    ) -> ReplayEngine:
        chain = chain_of(*tiers, disk(tmp_path / "disk"))
        facts = {"model": "replay", "weights": weights, **(used or {})}
        made.append(ReplayEngine(chain, facts=facts, **{"prefix_caching": False, **more}))
        return made[-1]

    yield make
    for engine in made:
        close(engine)


def handed_over(prefill: ReplayEngine) -> dict[str, Any]:
    """What a proxy gets from the prefill node, and hands on to the other."""
    said = reports(prefill)
    prefill.generate([*range(1000, 1040)], 1, kv_transfer_params=TO_DECODE)
    prefill.settle()
    (params,) = said
    return {**params, "do_remote_prefill": True} if params else {}


def stored(
    engine: ReplayEngine, params: dict[str, Any], tier: str = "disk", prompt: list[int] = PROMPT
) -> float:
    """How many blocks of a prompt are stored, of which another node sent a part."""
    before = measured(engine, "stored_blocks", tier)
    engine.generate(prompt, 4, kv_transfer_params=params)
    engine.settle()
    return measured(engine, "stored_blocks", tier) - before


def test_what_is_computed_behind_kv_of_other_weights_is_not_stored(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    params = handed_over(node("v2"))
    decode = node("v1")
    assert stored(decode, params) == 0
    assert caplog.text.count("another node sent KV of other weights") == 1
    assert stored(decode, {}) > 0, "of other requests it is"
    assert measured(decode, "other_weights", CHAIN) == 1


def test_behind_kv_of_its_own_weights_it_is(node: Node) -> None:
    params = handed_over(node("v1"))
    assert params["kvtiers"].keys() == {"weights"} and "v1" not in str(params)
    decode = node("v1")
    assert stored(decode, params) > 0
    assert not measured(decode, "other_weights", CHAIN)


@pytest.mark.parametrize(
    ("fact", "is_stored"),
    [
        ("ModelConfig.quantization", False),
        ("config", False),
        ("ParallelConfig.tensor_parallel_size", True),
        ("device", True),
    ],
)
def test_weights_that_are_used_in_another_way_are_others(
    node: Node, fact: str, is_stored: bool
) -> None:
    params = handed_over(node("v1", used={fact: "fp8"}))
    assert bool(stored(node("v1", used={fact: "None"}), params)) == is_stored


def test_behind_kv_of_weights_that_are_not_known_yet_it_is_not(node: Node) -> None:
    params = handed_over(node("v1", late_facts=Facts()))
    assert params["kvtiers"]["weights"].startswith("@")
    decode = node("v1")
    assert stored(decode, params) == 0
    assert measured(decode, "other_weights", CHAIN) == 1


@pytest.mark.parametrize("was_reset", [(True, False), (False, True), (True, True)])
def test_after_a_reset_nobody_knows_whose_weights_they_are(
    node: Node, was_reset: tuple[bool, bool]
) -> None:
    prefill, decode = node("v1"), node("v1")
    for engine, is_reset in zip((prefill, decode), was_reset, strict=True):
        if is_reset:
            engine.reset_cache()
    assert stored(decode, handed_over(prefill)) == 0


def answers_until_they_are_known(decode: ReplayEngine, params: dict[str, Any], late: Facts) -> None:
    """A request that runs on from before the node's weights are known."""
    decode.add(PROMPT, 60, kv_transfer_params=params)
    for _ in range(8):
        decode.step()
    late.are_known = True
    while decode.scheduler.busy:
        decode.step()
        time.sleep(0.01)  # the tier opens meanwhile
    decode.settle()


def test_what_runs_already_when_the_weights_are_known_is_judged_then(node: Node) -> None:
    params, late = handed_over(node("v2")), Facts("v1")
    decode = node("v1", late_facts=late)
    answers_until_they_are_known(decode, params, late)
    assert measured(decode, "stored_blocks", "disk") == 0
    assert measured(decode, "other_weights", CHAIN) == 1
    wait_for(lambda: stored(decode, {}) > 0)


@pytest.mark.parametrize("sent", ["v1", "v2"])
def test_until_they_are_known_no_tier_stores_it(node: Node, sent: str) -> None:
    """Not the cpu tier either, which waits for nothing: others would get it from there."""
    params, late = handed_over(node(sent)), Facts("v1")
    decode = node("v1", cpu(), late_facts=late)
    assert stored(decode, params, "cpu") == 0
    answers_until_they_are_known(decode, params, late)
    assert bool(measured(decode, "stored_blocks", "cpu")) == (sent == "v1"), "it runs on"


def test_nor_does_it_store_what_others_find_of_that_in_the_engine_s_cache(node: Node) -> None:
    others, own = (handed_over(node(weights)) for weights in ("v2", "v1"))
    decode, longer = node("v1", cpu(), prefix_caching=True), [*PROMPT, *range(200, 240)]
    assert stored(decode, others, "cpu") == 0
    assert stored(decode, {}, "cpu", PROMPT[:30]) == 0
    for prompt in (longer, [*longer, *range(300, 340)]):  # it is found behind what was found, too
        assert stored(decode, own, "cpu", prompt) == 0
    assert measured(decode, "other_weights", CHAIN) == 4
    assert stored(decode, {}, "cpu", [*range(300, 552)]) > 0, "the engine has nothing of that"
    assert stored(decode, {}, "cpu") > 0, "nor of this any more: it is computed anew"


@pytest.mark.parametrize("sent", ["v1", "v2", ""])
def test_what_was_found_so_is_stored_once_it_is_known_to_be_of_its_own(
    node: Node, sent: str
) -> None:
    late = Facts("v1")
    params = handed_over(node(sent) if sent else node("v1", late_facts=Facts()))
    decode = node("v1", cpu(), late_facts=late, prefix_caching=True)
    assert stored(decode, params, "cpu") == stored(decode, {}, "cpu") == 0
    late.are_known = True
    wait_for(lambda: stored(decode, {}, prompt=[*range(700, 730)]) > 0)
    assert bool(stored(decode, {}, "cpu")) == (sent == "v1")


def test_a_shared_tier_that_comes_while_the_engine_runs_knows_the_weights(
    node: Node, tmp_path: Path
) -> None:
    params = handed_over(node("v2"))
    alone, shared = chain_of(cpu()), chain_of(cpu(), disk(tmp_path / "disk"))
    with running(alone, ranks=1, facts={"model": "replay", "weights": "v1"}) as decode:
        assert handed_over(decode) == {}
        change(decode, shared)
        assert stored(decode, params) == 0
        assert stored(decode, {}) == 0, "it finds that in the engine's cache"
        assert stored(decode, {}, prompt=PROMPT[30:]) > 0
        assert handed_over(decode)["kvtiers"]["weights"]


def test_a_node_whose_tiers_nobody_shares_names_no_weights(node: Node) -> None:
    alone = ReplayEngine(chain_of(cpu()), facts={"model": "replay", "weights": "v2"})
    params = handed_over(alone)
    close(alone)
    assert params == {}
    assert stored(node("v1"), params) > 0


@pytest.mark.parametrize(
    ("sent", "own", "is_stored"), [(1, 1, True), (2, 1, False), (None, 1, False), (1, None, False)]
)
def test_an_adapter_s_weights_count_too(
    node: Node,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sent: int | None,
    own: int | None,
    is_stored: bool,
) -> None:
    """Nodes that know an adapter by one name, and may have loaded other weights of it; None: it is
    not known which."""
    one, plain = adapter(write(tmp_path / "sql", b"1")), ReplayModel.engine_info
    monkeypatch.setattr(ReplayRequest, "lora_request", one, raising=False)

    def with_adapter(weights: int | None) -> tuple[ReplayEngine, Callable[[], None]]:
        seen, marks = SeenAdapters(), MarksOfRequests(1)

        def load() -> None:
            stamp = seen.before(one)
            if weights is not None:
                seen.after(one, Model(1, {"q": Layer(weights)}), stamp)

        def info(model: ReplayModel, blocks: int) -> Any:
            return replace(plain(model, blocks), marks=marks, adapters=seen)

        with monkeypatch.context() as patch:
            patch.setattr(ReplayModel, "engine_info", info)
            return node("v1"), load

    prefill, load = with_adapter(sent)
    load()
    assert handed_over(prefill)["kvtiers"]["weights"].startswith("@"), "its worker has yet to say"
    params = handed_over(prefill)
    decode, load = with_adapter(own)
    decode.add(PROMPT, 12, kv_transfer_params=params)
    decode.step()
    load()  # as an engine does in the step that first runs a request of it
    while decode.scheduler.busy:
        decode.step()
    decode.settle()
    assert bool(measured(decode, "stored_blocks", "disk")) == is_stored
    assert measured(decode, "other_weights", CHAIN) == (own is not None and not is_stored)
