"""Every member of a MultiConnector over children that record: order, arguments, what comes back."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spec.load import load_chain
from tests.support.fake_requests import BLOCKS
from tests.support.kept import kept
from tiers.connector.assembly import scheduler_parts
from tiers.connector.multi.multi_connector import MultiConnectorMetadata, MultiHandshakeMetadata
from tiers.connector.multi.multi_scheduler import MultiScheduler, MultiSettings
from tiers.connector.multi.multi_worker import MultiWorker
from tiers.connector.policy.request_table import RequestTable
from tiers.contract.connector import SchedulerConnector, WorkerConnector
from tiers.contract.engine_info import EngineInfo
from tiers.contract.messages import TransferResults, WorkerHandshake
from tiers.contract.stats import TierStats

REQUEST = SimpleNamespace(request_id="r", num_tokens=64, block_hashes=[])
POOL = SimpleNamespace(get_num_free_blocks=lambda: 9)
FAN_OUT: dict[str, tuple[Any, ...]] = {
    "shutdown": (),
    "register_kv_caches": ({"layer": "kv"},),
    "set_host_xfer_buffer_ops": ("copy",),
    "clear_connector_metadata": (),
    "start_load_kv": ("context",),
    "wait_for_layer_load": ("layer",),
    "save_kv_layer": ("layer", "kv", "attention"),
    "finish_forward": (),
    "reset_capture_state": (),
    "unregister_kv_caches": (),
    "restore_kv_caches": (),
    "wait_for_save": (),
    "bind_kv_cache_manager": (SimpleNamespace(block_pool=POOL),),
    "bind_gpu_block_pool": (POOL,),
    "on_new_request": (REQUEST,),
    "update_connector_output": (
        SimpleNamespace(kv_connector_worker_meta=None, finished_recving=None),
    ),
    "request_finished": (REQUEST, [1, 2]),
    "request_finished_all_groups": (REQUEST, ([1, 2], [3])),
    "reset_cache": (),
    "weights_changed": (),
    "disable_store": (REQUEST,),
}
"""Members that every child is called with, and arguments."""

ANY: dict[str, tuple[Any, ...] | None] = {
    "has_pending_push_work": (),
    "has_pending_block_frees": (),
    "register_finished_partial_tail": (REQUEST, ([1],), [(0, 1, 2)]),
    "requires_kv_delivery": None,
}
"""Members that are true if one child's is; None: a property."""

ALL = ["supports_divergent_local_hybrid_hits"]
"""Properties that are true if every child's is."""

OWN_TESTS = {
    *("get_mem_pool_context", "get_finished_count", "get_kv_connector_stats", "take_events"),
    *("get_finished", "get_transfer_results", "get_kv_connector_kv_cache_events"),
    *("get_external_cache_hit_sources", "get_loaded_kv_cache_group_ids"),
    *("get_handshake_metadata", "set_xfer_handshake_metadata"),
    *("set_xfer_handshake_metadata_pp_aware", "handle_preemptions"),
}
"""Members with a test of their own below."""

ELSEWHERE = {
    *("get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta"),
    *("bind_connector_metadata", "has_connector_metadata"),
    *("get_block_ids_with_load_errors", "build_connector_worker_meta"),
}
"""Members that test_multi_connector.py tests."""

MEMBERS = {
    name
    for half in (SchedulerConnector, WorkerConnector)
    for name in dir(half)
    if not name.startswith("_")
}


class Script:
    """What a child answers to each member, or raises; and, for all children, what was called."""

    def __init__(self, name: str, calls: list[Any]) -> None:
        self.name = name
        self.calls = calls
        self.answers: dict[str, Any] = {}

    def play(self, member: str, *args: Any) -> Any:
        self.calls.append((self.name, member, *args))
        answer = self.answers.get(member)
        if isinstance(answer, Exception):
            raise answer
        return answer


def _member(name: str) -> Any:
    if isinstance(getattr(SchedulerConnector, name, None), property):
        return property(lambda self: bool(self.script.answers.get(name)))
    return lambda self, *args: self.script.play(name, *args)


Recorder = type(
    "Recorder", (SchedulerConnector, WorkerConnector), {name: _member(name) for name in MEMBERS}
)


class Both(MultiScheduler, MultiWorker):
    """Both halves in one object, as an engine's adapter composes them."""

    def __init__(self, children: Any) -> None:
        settings = MultiSettings(RequestTable.of_connectors(4))
        MultiScheduler.__init__(self, children, settings, "abc", "ours")
        MultiWorker.__init__(self, children, "abc", "ours")


@pytest.fixture
def calls() -> list[Any]:
    return []


@pytest.fixture
def scripts(calls: list[Any]) -> list[Script]:
    made = [Script(name, calls) for name in "abc"]
    for script in made:
        script.answers["request_finished"] = (False, None)
        script.answers["request_finished_all_groups"] = (False, None)
    return made


@pytest.fixture
def multi(scripts: list[Script]) -> Both:
    children = []
    for script in scripts:
        child: Any = Recorder()
        child.script = script
        children.append(child)
    return Both(children)


def test_no_member_is_left_out() -> None:
    assert {*FAN_OUT, *ANY, *ALL, *OWN_TESTS, *ELSEWHERE} == MEMBERS


@pytest.mark.parametrize("member", FAN_OUT)
def test_every_child_is_called_in_order(multi: Both, calls: list[Any], member: str) -> None:
    getattr(multi, member)(*FAN_OUT[member])
    assert calls == [(name, member, *FAN_OUT[member]) for name in "abc"]


@pytest.mark.parametrize("member", FAN_OUT)
def test_a_child_that_raises_keeps_no_other_from_its_call(
    multi: Both, scripts: list[Script], calls: list[Any], member: str
) -> None:
    scripts[0].answers[member] = OSError("a")
    scripts[1].answers[member] = ValueError("b")
    with pytest.raises(ValueError, match="b") as caught:
        getattr(multi, member)(*FAN_OUT[member])
    assert str(caught.value.__context__) == "a", "the first error is not lost"
    assert [name for name, *_ in calls] == ["a", "b", "c"]


class Idle(WorkerConnector):
    """A worker half that has nothing to do for a layer, as tiers of ours."""

    shutdown = register_kv_caches = handle_preemptions = start_load_kv = _member("")
    wait_for_save = get_transfer_results = get_block_ids_with_load_errors = _member("")
    build_connector_worker_meta = _member("")


def test_layers_cost_nothing_where_no_child_hears_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    multi = MultiWorker([Idle(), Idle()], "ab")
    monkeypatch.setattr(multi, "for_each", None)  # whoever calls it raises
    multi.wait_for_layer_load("layer")
    multi.save_kv_layer("layer", torch.empty(0), None)


def test_a_child_that_hears_of_layers_is_told_beside_one_that_does_not(calls: list[Any]) -> None:
    hears: Any = type("Hears", (Idle,), {"save_kv_layer": _member("save_kv_layer")})()
    hears.script = Script("b", calls)
    MultiWorker([Idle(), hears], "ab").save_kv_layer("layer", torch.empty(0), "attention")
    assert [call[:3] for call in calls] == [("b", "save_kv_layer", "layer")]


class HandsOn:
    """A child that is no subclass of ours, and hands every call on."""

    def __init__(self, script: Script) -> None:
        self._inner: Any = Recorder()
        self._inner.script = script

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_a_child_that_has_its_layer_calls_from_elsewhere_is_told(calls: list[Any]) -> None:
    patched, hands_on = Idle(), HandsOn(Script("b", calls))
    patched.save_kv_layer = lambda *args: calls.append(("a", *args))  # type: ignore[method-assign]
    for child in (patched, hands_on):
        multi: Any = MultiWorker([Idle(), child], "ab")  # type: ignore[list-item]
        multi.save_kv_layer("layer", torch.empty(0), "attention")
    assert [call[0] for call in calls] == ["a", "b"]


@pytest.mark.parametrize("member", ANY)
def test_true_if_any_child_says_so(multi: Both, scripts: list[Script], member: str) -> None:
    def ask() -> Any:
        args = ANY[member]
        return getattr(multi, member) if args is None else getattr(multi, member)(*args)

    assert ask() is False
    scripts[2].answers[member] = True
    assert ask() is True


@pytest.mark.parametrize("member", ALL)
def test_true_if_every_child_says_so(multi: Both, scripts: list[Script], member: str) -> None:
    for script in scripts:
        assert getattr(multi, member) is False
        script.answers[member] = True
    assert getattr(multi, member) is True


def test_every_child_is_offered_a_partial_tail(multi: Both, scripts: Any) -> None:
    scripts[0].answers["register_finished_partial_tail"] = True
    assert multi.register_finished_partial_tail(REQUEST, ([1],), [])
    assert [name for name, *_ in scripts[0].calls] == ["a", "b", "c"]


def test_an_error_of_one_child_still_drops_the_request(multi: Both, scripts: list[Script]) -> None:
    before = kept(multi)
    scripts[0].answers["request_finished"] = (True, None)
    scripts[1].answers["request_finished"] = RuntimeError("b")
    with pytest.raises(RuntimeError, match="b"):
        multi.request_finished(REQUEST, [])
    assert kept(multi) == before


@pytest.mark.parametrize(
    ("answers", "expected"),
    [((None, True, True), True), ((True, False, True), False), ((None, None, None), True)],
)
def test_a_reset_succeeds_unless_one_refuses(
    multi: Both, scripts: list[Script], answers: Any, expected: bool
) -> None:
    for script, answer in zip(scripts, answers, strict=True):
        script.answers["reset_cache"] = answer
    assert multi.reset_cache() is expected


def test_one_child_at_most_has_a_memory_pool(multi: Both, scripts: list[Script]) -> None:
    assert multi.get_mem_pool_context() is None
    pool = contextlib.nullcontext()
    scripts[1].answers["get_mem_pool_context"] = pool
    assert multi.get_mem_pool_context() is pool
    scripts[2].answers["get_mem_pool_context"] = contextlib.nullcontext()
    with pytest.raises(ValueError, match="b, c each"):
        multi.get_mem_pool_context()


@pytest.mark.parametrize(
    ("counts", "expected"), [((2, 2, 2), 2), ((2, None, 3), None), ((None, None, None), None)]
)
def test_finished_counts_agree_or_are_the_engines(
    multi: Both, scripts: list[Script], counts: Any, expected: int | None
) -> None:
    for script, count in zip(scripts, counts, strict=True):
        script.answers["get_finished_count"] = count
    assert multi.get_finished_count() == expected


def test_finished_counts_that_differ_name_who_says_what(multi: Both, scripts: list[Script]) -> None:
    for script, count in zip(scripts, (1, 2, 1), strict=True):
        script.answers["get_finished_count"] = count
    with pytest.raises(ValueError, match="a: 1, b: 2, c: 1"):
        multi.get_finished_count()


def test_events_are_chained_in_order(multi: Both, scripts: list[Script]) -> None:
    for script in scripts:
        script.answers["take_events"] = [f"{script.name}1", f"{script.name}2"]
    assert list(multi.take_events()) == ["a1", "a2", "b1", "b2", "c1", "c2"]


def test_transfer_results_are_united_and_saves_counted(multi: Both, scripts: list[Script]) -> None:
    multi.bind_connector_metadata(MultiConnectorMetadata((None, None, None), {"r": 1}))
    scripts[0].answers["get_transfer_results"] = TransferResults({"r"}, {"x"}, {"x"})
    scripts[1].answers["get_transfer_results"] = TransferResults(set(), {"y"}, set())
    scripts[2].answers["get_transfer_results"] = TransferResults({"s"}, set(), {"z"})
    found = multi.get_transfer_results({"q"})
    assert found == TransferResults({"s"}, {"x", "y"}, {"x", "z"})
    asked = [call for call in scripts[0].calls if call[1] == "get_transfer_results"]
    assert asked == [(name, "get_transfer_results", {"q"}) for name in "abc"]
    assert multi.get_finished(set()) == ({"r", "s"}, {"x", "y"})


class Events(list[str]):
    def merge(self, other: list[str]) -> Events:
        return Events([*self, *other])


def test_workers_events_are_merged(multi: Both, scripts: list[Script]) -> None:
    assert multi.get_kv_connector_kv_cache_events() is None
    scripts[0].answers["get_kv_connector_kv_cache_events"] = Events("a")
    scripts[2].answers["get_kv_connector_kv_cache_events"] = Events("c")
    assert multi.get_kv_connector_kv_cache_events() == ["a", "c"]


def test_stats_are_grouped_by_child(multi: Both, scripts: list[Script]) -> None:
    assert multi.get_kv_connector_stats() is None and multi.stats_by_child() == {}
    scripts[0].answers["get_kv_connector_stats"] = TierStats({"cpu": {"hits": 1}})
    scripts[1].answers["get_kv_connector_stats"] = TierStats({"cpu": {"hits": 2}})
    scripts[2].answers["get_kv_connector_stats"] = "its own kind"
    total = multi.get_kv_connector_stats()
    assert total is not None and total["cpu"] == {"hits": 3}
    assert multi.stats_by_child()["c"] == "its own kind"


def test_the_child_that_serves_names_the_source(
    multi: Both, scripts: list[Script], calls: list[Any]
) -> None:
    assert multi.get_external_cache_hit_sources(REQUEST, 8) == {}
    for script, tokens in zip(scripts, (0, 32, 64), strict=True):
        script.answers["get_num_new_matched_tokens"] = (tokens, tokens > 0)
        script.answers["get_external_cache_hit_sources"] = {script.name: 32}
        script.answers["get_loaded_kv_cache_group_ids"] = (0, 2)
    multi.get_num_new_matched_tokens(REQUEST, 0)
    assert multi.get_loaded_kv_cache_group_ids(REQUEST) == (0, 2)
    calls.clear()
    assert multi.get_external_cache_hit_sources(REQUEST, 32) == {"b": 32}
    assert calls == [("b", "get_external_cache_hit_sources", REQUEST, 32)]


def test_what_is_loaded_within_a_step_is_not_stored_by_others(
    multi: Both, scripts: list[Script], calls: list[Any]
) -> None:
    for script in scripts:
        script.answers["get_num_new_matched_tokens"] = (0, False)
    scripts[1].answers["get_num_new_matched_tokens"] = (32, False)
    multi.get_num_new_matched_tokens(REQUEST, 0)
    multi.update_state_after_alloc(REQUEST, BLOCKS, 32)
    assert calls[-3:] == [(name, "disable_store", REQUEST) for name in "abc"], (
        "once each knows the request, of whose media none waits"
    )
    assert [call[1] for call in calls].count("disable_store") == 3


def test_a_request_whose_load_has_ended_has_been_decided_about(
    multi: Both, scripts: list[Script]
) -> None:
    """Engines call again then, without tokens; `store: computed` goes by what was loaded."""
    for script, tokens in zip(scripts, (0, 32, 0), strict=True):
        script.answers["get_num_new_matched_tokens"] = (tokens, tokens > 0)
    multi.get_num_new_matched_tokens(REQUEST, 8)
    for tokens in (32, 0):
        multi.update_state_after_alloc(REQUEST, BLOCKS, tokens)
        assert multi._requests.of(REQUEST).load_range == range(2, 10)


@pytest.mark.parametrize(
    "member", ["set_xfer_handshake_metadata", "set_xfer_handshake_metadata_pp_aware"]
)
def test_workers_words_reach_the_children_they_are_for(
    multi: Both, scripts: list[Script], calls: list[Any], member: str
) -> None:
    assert multi.get_handshake_metadata() is None
    scripts[0].answers["get_handshake_metadata"] = "of a"
    said = multi.get_handshake_metadata()
    assert said == MultiHandshakeMetadata(("of a", None, None), "ours")
    calls.clear()
    another = MultiHandshakeMetadata(("x", "y", "z"), "another chain")
    getattr(multi, member)({(0, 0): said, (0, 1): another, (0, 2): "another connector's"})
    assert calls == [("a", member, {(0, 0): "of a"}), ("b", member, {}), ("c", member, {})]


def test_a_chain_does_not_take_another_chains_slots_for_its_own() -> None:
    """vLLM's own MultiConnector gives the handshake of its first child to all."""
    disk = {"type": "disk", "capacity": "1MiB", "path": "/nowhere"}
    cpu = {"type": "cpu", "capacity": "1MiB"}
    info = EngineInfo(facts={}, block_tokens=4, hash_tokens=4, num_blocks=8)
    theirs, ours = (
        MultiScheduler(*scheduler_parts(load_chain({"version": 1, "tiers": tiers}), info))
        for tiers in ([cpu], [cpu, disk])
    )
    said = MultiHandshakeMetadata((WorkerHandshake(0, b"", 64, slots=9),) * 2, theirs._chain)
    for chain, slots in ((ours, 0), (theirs, 9)):
        chain.set_xfer_handshake_metadata({0: said})
        child: Any = chain.children[0]
        assert child.pool.num_slots == slots
        chain.shutdown()


def test_orders_reach_each_child_although_one_raises(
    multi: Both, scripts: list[Script], calls: list[Any]
) -> None:
    scripts[0].answers["handle_preemptions"] = OSError("a")
    with pytest.raises(OSError, match="a"):
        multi.handle_preemptions(MultiConnectorMetadata(("for a", "for b", "for c"), {}))
    assert calls == [(name, "handle_preemptions", f"for {name}") for name in "abc"]
