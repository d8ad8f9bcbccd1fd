"""A real vLLM engine that sleeps, and one whose weights change under it. `AHEAD`: with two steps in
flight, as by default on GPUs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.vllm.checkpoints import write_model
from tests.engine.vllm.tiny_vllm import LLAMA, Run, documents, hosted

pytestmark = pytest.mark.vllm

BATCH = [(prompt, 8) for prompt in documents(1, 600, seed=1)]
FULL = 18 * 32
NAP: list[Any] = [("sleep", {"level": 1}), ("wake_up", {})]
IN_PROCESS = {"env": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}}
AHEAD: dict[str, Any] = {"steps_in_flight": 2, **IN_PROCESS}


@pytest.mark.faults
@pytest.mark.fault
def test_sleep_and_new_weights(run_vllm: Callable[..., Run], tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", {**LLAMA, "initializer_range": 0.4})
    change = [
        ("collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(other)}}),
        ("reset_prefix_cache", {"reset_connector": True}),
    ]
    plain = run_vllm([BATCH] * 2, told={1: change}, **AHEAD)
    old, new = plain.tokens
    assert old != new, "the weights must matter"

    disk = {"type": "disk", "capacity": "64MiB", "path": str(tmp_path / "disk")}
    wary = run_vllm([BATCH] * 3, [disk], told={1: NAP, 2: change}, **AHEAD)
    assert wary.tokens == [old, old, new]
    assert wary.cached == [[0], [0], [0]]

    sibling = run_vllm([BATCH] * 2, [disk], told={1: NAP}, on_reset="keep", **AHEAD)
    assert sibling.tokens == [old, old]
    assert sibling.cached == [[FULL], [FULL]]
    assert sibling.loaded() == {"disk": 2 * FULL}


ASKED = [[(prompt, 8)] for prompt in documents(2, 600, seed=2)]
IN_PLACE: dict[str, Any] = {"before": {"start": ["plain_linears"]}, "enable_prefix_caching": False}
"""Weights can be changed, and what an engine itself keeps of old ones is in no answer."""


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Weights as a training loop makes them, of the tiny model."""
    folder = tmp_path_factory.mktemp("policies")
    spreads = [0.4, 0.5, 0.6]
    made = [write_model(folder / str(one), {**LLAMA, "initializer_range": one}) for one in spreads]
    return [str(one) for one in made]


@pytest.fixture(scope="module")
def base(run_vllm: Callable[..., Run]) -> list[list[int]]:
    """What the tiny model says to the second prompt."""
    return run_vllm([ASKED[1]], **IN_PLACE, **IN_PROCESS).tokens[0]


def is_never_another_s(
    run_vllm: Callable[..., Run],
    base: list[list[int]],
    disk: dict[str, Any],
    told: dict[int, Any],
    **options: Any,
) -> None:
    """Run an engine whose weights change where it is `told`, over a disk, and then a replica of
    the weights that it began with: both answer as engines without tiers."""
    rounds = [ASKED[0], *ASKED * 3 * len(told)]
    told = {1 + number * 3 * len(ASKED): what for number, what in told.items()}
    plain = run_vllm(rounds, told=told, **IN_PLACE, **options)
    answers = {(tuple(tokens), at % 2) for at, (tokens,) in enumerate(plain.tokens[1:])}
    assert len(answers) == 2 * len(told), "each change of the weights must matter"

    policy = run_vllm(rounds, [disk], told=told, settled=True, **IN_PLACE, **options)
    assert policy.tokens == plain.tokens
    replica = run_vllm(ASKED, [disk], **IN_PLACE, **options)
    assert replica.tokens == [plain.tokens[0], base]
    assert replica.cached == [[FULL], [0]], "what the weights on disk have computed, and no more"
    for number in told:
        assert policy.cached[number : number + 2] == [[0], [0]], "it is of other weights"
    assert sum(tokens for batch in policy.cached for tokens in batch) >= FULL * len(told)


@pytest.mark.fault
def test_a_trainer_in_the_engines_process(
    run_vllm: Callable[..., Run], base: list[list[int]], tmp_path: Path, policies: list[str]
) -> None:
    """As one that shares its devices does: loads parameters, sleeps, and resets by default; then
    one that copies over them and resets nothing, of which the engine itself would serve old KV."""
    disk = {"type": "disk", "capacity": "64MiB", "path": str(tmp_path / "disk")}
    sleeps: list[Any] = [("sleep", {"level": 2}), ("wake_up", {})]
    reloads = {"method": "reload_weights", "kwargs": {"weights_path": policies[1]}}
    told = {
        0: [("train_in_place", {"path": policies[0]}), ("reset_prefix_cache", {})],
        1: [*sleeps, ("collective_rpc", reloads), ("reset_prefix_cache", {})],
        2: [("copy_in_place", {"path": policies[2]})],
    }
    is_never_another_s(run_vllm, base, disk, told, **AHEAD)


@pytest.mark.faults
def test_a_trainer_beside_the_engine(
    run_vllm: Callable[..., Run], base: list[list[int]], tmp_path: Path, policies: list[str]
) -> None:
    """Whose worker extension loads what it sends, and which then resets by default."""
    disk = {"type": "disk", "capacity": "64MiB", "path": str(tmp_path / "disk")}
    sent = [{"method": "update_weight", "args": [path]} for path in policies[:2]]
    told = {
        number: [("collective_rpc", one), ("reset_prefix_cache", {})]
        for number, one in enumerate(sent)
    }
    options = {"is_async": True, "worker_extension_cls": "tests.engine.vllm.training.Trained"}
    is_never_another_s(run_vllm, base, disk, told, **options)


@pytest.mark.faults
def test_weights_change_under_vllms_own_connector(
    run_vllm: Callable[..., Run], base: list[list[int]], tmp_path: Path, policies: list[str]
) -> None:
    """Which no reset of the engine's own cache reaches, either. Its loads are not looked at."""
    disk = {"type": "disk", "capacity": "64MiB", "path": str(tmp_path / "disk")}
    tiers = hosted({"type": "cpu", "capacity": "16MiB"}, disk)
    one, other = ASKED
    told: dict[int, Any] = {
        1: [("copy_in_place", {"path": policies[0]})],
        3: [("reset_prefix_cache", {"reset_connector": True})],
        5: [("train_in_place", {"path": policies[1]}), ("reset_prefix_cache", {})],
    }
    rounds = [one, other, one, other, other, other, one]
    plain = run_vllm(rounds, told=told, **IN_PLACE, **IN_PROCESS)
    policy = run_vllm(rounds, told=told, kv_transfer_config=tiers, **IN_PLACE, **IN_PROCESS)
    assert policy.tokens == plain.tokens
    assert policy.cached[3:] == [[0], [FULL], [0], [0]]
    replica = run_vllm(ASKED, kv_transfer_config=tiers, **IN_PLACE, **IN_PROCESS)
    assert replica.tokens == [plain.tokens[0], base]
    assert replica.cached == [[FULL], [0]]


@pytest.mark.faults
@pytest.mark.fault
def test_weights_are_transferred(
    run_vllm: Callable[..., Run], base: list[list[int]], tmp_path: Path, policies: list[str]
) -> None:
    """An engine with a weight_transfer_config shares nothing from the start."""
    disk = {"type": "disk", "capacity": "64MiB", "path": str(tmp_path / "disk")}
    told = {2: [("transfer", {"path": policies[0]})]}
    one, other = ASKED
    rounds = [one, one, one, other, other]
    options = {**IN_PROCESS, **IN_PLACE, "weight_transfer_config": {"backend": "folders"}}
    options["before"] = {"start": ["transfer_from_folders"]}
    plain = run_vllm(rounds, told=told, **options)
    assert plain.tokens[0] != plain.tokens[2], "the weights must matter"
    policy = run_vllm(rounds, [disk], told=told, settled=True, **options)
    assert policy.tokens == plain.tokens
    assert policy.cached == [[0], [FULL], [0], [0], [FULL]]
    replica = run_vllm(ASKED, [disk], **IN_PLACE, **IN_PROCESS)
    assert replica.tokens == [plain.tokens[0], base]
    assert replica.cached == [[0], [0]]


@pytest.mark.faults
@pytest.mark.fault
def test_running_requests_are_reset(run_vllm: Callable[..., Run], tmp_path: Path) -> None:
    """With one step in flight: with two, vLLM itself raises, whatever connector loads."""
    disk = {"type": "disk", "capacity": "64MiB", "path": str(tmp_path / "disk")}
    one, other = ([(prompt, 40)] for [(prompt, _)] in ASKED)
    told: dict[int, Any] = {1: [("turn_in_place", {})]}
    options = {**IN_PROCESS, "preempt": 8}
    rounds = [one, one, one, other]
    plain = run_vllm(rounds, told=told, **options)
    assert plain.tokens[0] != plain.tokens[1] != plain.tokens[2], "what changed must matter"
    policy = run_vllm(rounds, [disk], told=told, settled=True, **options)
    assert policy.tokens == plain.tokens
    (base,) = run_vllm([other], **IN_PROCESS).tokens
    replica = run_vllm([one, other], [disk], **IN_PROCESS)
    assert replica.tokens == [plain.tokens[0], base]
    assert replica.cached == [[FULL], [0]]


@pytest.fixture(scope="module")
def trained(run_vllm: Callable[..., Run], policies: list[str]) -> list[list[int]]:
    """What other weights, which a trainer wrote over them, say to the first prompt."""
    told = {0: [("train_in_place", {"path": policies[0]}), ("reset_prefix_cache", {})]}
    before = {"before": {"start": ["plain_linears"]}}
    return run_vllm([ASKED[0]], told=told, **before, **IN_PROCESS).tokens[0]


@pytest.mark.faults
@pytest.mark.fault
@pytest.mark.parametrize("hosts", ["kvtiers", "vllm"])
@pytest.mark.parametrize("reset_connector", [False, True])
def test_a_reset_that_the_engine_refuses(
    run_vllm: Callable[..., Run],
    trained: list[list[int]],
    policies: list[str],
    reset_connector: bool,
    hosts: str,
) -> None:
    """Requests run on over it, and what the engine itself keeps is of weights of before. It is
    served from there, but never from a tier."""
    cpu = {"type": "cpu", "capacity": "64MiB"}
    over: dict[str, Any] = {"tiers": [cpu], **AHEAD}
    if hosts == "vllm":
        over = {"kv_transfer_config": hosted(cpu), **IN_PROCESS}
    changed = {"asked": BATCH[0][0], "path": policies[0], "reset_connector": reset_connector}
    others = [(prompt, 8) for prompt in documents(4, 600, seed=5)]
    options: dict[str, Any] = {"before": {"start": ["plain_linears"]}}
    options["num_gpu_blocks_override"] = 70
    one, other = ASKED
    rounds = [one, one, others, one, others, other, others, other]
    policy = run_vllm(
        rounds, told={1: [("change_under_a_request", changed)]}, settled=True, **options, **over
    )
    assert policy.cached[1] == [FULL], "the engine's own cache has it"
    assert policy.tokens[0] != policy.tokens[1] != trained, "the weights must matter"
    assert (policy.tokens[3], policy.cached[3]) == (trained, [0])
    is_served = hosts == "kvtiers"
    assert policy.cached[7] == [FULL * is_served], "what is computed since is stored"


@pytest.mark.faults
def test_a_trainer_that_has_the_workers_sleep(run_vllm: Callable[..., Run]) -> None:
    """Past the engine, which would have refused while it loads. What a load would bring later
    touches nothing, and the engine computes it."""
    cpu = {"type": "cpu", "capacity": "64MiB"}
    one, other = ASKED
    naps = [("reset_prefix_cache", {}), ("sleep_under_a_load", {"asked": one[0][0]})]
    plain = run_vllm([one, other], **IN_PROCESS)
    policy = run_vllm([one, one, other], [cpu], told={1: naps}, on_reset="keep", **IN_PROCESS)
    assert policy.tokens == [plain.tokens[0], *plain.tokens]
    assert policy.count("cpu", "load_failures") > 0


@pytest.mark.faults
@pytest.mark.fault
@pytest.mark.parametrize("how", ["forget", "keep", "hosted"])
def test_workers_that_sleep_without_a_reset(
    run_vllm: Callable[..., Run], tmp_path: Path, how: str
) -> None:
    """The engine serves what is gone, as without tiers; what it computes behind that is never
    another's."""
    disk = {"type": "disk", "capacity": "64MiB", "path": str(tmp_path / "disk")}
    one, other = ASKED
    longer, others = [([*one[0][0], *other[0][0][:300]], 8)], [(other[0][0], 8)]
    (true,) = run_vllm([longer], **IN_PROCESS).tokens
    told: dict[int, Any] = {1: [("sleep_past", {})], 3: [("reset_prefix_cache", {})]}
    rounds = [one, longer, longer, others]
    tiers: dict[str, Any] = {"tiers": [disk]}
    over: dict[str, Any] = {**tiers, **AHEAD, "on_reset": how}
    if how == "hosted":
        tiers = {"kv_transfer_config": hosted({"type": "cpu", "capacity": "16MiB"}, disk)}
        over = {**tiers, **IN_PROCESS}
    policy = run_vllm(rounds, told=told, settled=True, **over)
    assert policy.tokens[1] != true, "what is gone must matter"
    replica = run_vllm([longer, others], **tiers, **IN_PROCESS)
    assert replica.tokens == [true, policy.tokens[3]]
    assert replica.cached[0] == [FULL], "what was stored before is right"


@pytest.mark.faults
def test_an_engine_that_sleeps_over_vllms_own_connector_goes_on_with_its_tiers(
    run_vllm: Callable[..., Run], tmp_path: Path
) -> None:
    """It was reset before, so that a later call of its workers shows nothing new."""
    disk = {"type": "disk", "capacity": "64MiB", "path": str(tmp_path / "disk")}
    tiers = hosted({"type": "cpu", "capacity": "16MiB"}, disk)
    told = {1: NAP, 2: [("collective_rpc", {"method": "get_model"})]}
    options = {"settled": True, "enable_prefix_caching": False, **IN_PROCESS}
    policy = run_vllm([ASKED[0]] * 3, told=told, kv_transfer_config=tiers, **options)
    assert policy.cached == [[0], [0], [FULL]]


def check_answers_after(
    run_vllm: Callable[..., Run], raises: str, options: dict[str, Any], **how: str
) -> None:
    """Ask a prompt twice, the second time with a step that raises as `training` says, then another:
    the load ends, and the answers are those of an engine without a chain."""
    cpu = {"type": "cpu", "capacity": "64MiB"}
    one, other = ASKED
    options = {**options, "enable_prefix_caching": False}
    plain = run_vllm([one, other], **options)
    told = {1: [(raises, {"asked": one[0][0], **how})]}
    policy = run_vllm([one, one, other], [cpu], told=told, settled=True, **options)
    assert policy.tokens == [plain.tokens[0], *plain.tokens]
    assert policy.cached[1] == [FULL]


@pytest.mark.faults
@pytest.mark.fault
@pytest.mark.parametrize("options", [IN_PROCESS, AHEAD], ids=["one step", "two steps"])
def test_a_load_whose_step_raised_before_the_worker_had_it_ends(
    run_vllm: Callable[..., Run], options: dict[str, Any]
) -> None:
    """In an engine of the caller's process, which goes on."""
    check_answers_after(run_vllm, "raise_under_a_load", options)


@pytest.mark.faults
@pytest.mark.fault
@pytest.mark.parametrize("where", ["logits", "forward"])
@pytest.mark.parametrize("options", [IN_PROCESS, AHEAD], ids=["one step", "two steps"])
def test_a_load_ends_whose_end_went_with_a_step_that_raised(
    run_vllm: Callable[..., Run], options: dict[str, Any], where: str
) -> None:
    """As where a device has no memory for logits, and who called the engine goes on."""
    check_answers_after(run_vllm, "raise_behind_a_load", options, where=where)


@pytest.mark.faults
@pytest.mark.fault
@pytest.mark.parametrize("how", ["raise_under_a_load", "lose_an_end"])
def test_a_load_of_two_ranks_whose_step_raised_ends(run_vllm: Callable[..., Run], how: str) -> None:
    bound = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", **IN_PROCESS["env"]}
    check_answers_after(run_vllm, how, {"tensor_parallel_size": 2, "env": bound})
