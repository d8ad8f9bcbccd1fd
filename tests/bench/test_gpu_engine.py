"""`make gpu-engine` where there is no GPU: its order, what it makes of wrong answers, and all of it
with the CPU's engine in the GPU's place."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from pydantic import ByteSize, TypeAdapter

from bench import engine_child, gpu_engine
from bench.gpu_engine import (
    EQUAL_CELLS,
    FULL,
    INVARIANT,
    SMOKE,
    SPEED_CELLS,
    Plan,
    Runs,
    is_right,
    main,
    told,
)
from tests.engine.vllm.imported import Program
from tests.support.topologies import wait_until

PARTS = ["equal", "speed"]
(CHAIN,) = SMOKE.equal
Result = dict[str, Any]
Behaves = Callable[[dict[str, Any]], Result | None]
"""What an engine of a job gives; None: it does not start."""


LINE = "tier disk: blocks are stored by the process 12, beside the engine's"
APART = f"(EngineCore pid=1) INFO 11-27 02:00:00 [put_process.py:147] {LINE}\n"
WITHIN = "tier disk: blocks are stored by the engine's process, since another can't (no)"


def answer(cached: int, tiers: Mapping[str, int], logprob: float = -0.5) -> dict[str, Any]:
    return {
        "answer": [7, 8],
        "logprobs": [{"7": logprob}, {"8": -1.0}],
        "cached": cached,
        "from_tiers": dict(tiers),
        "ttft": 0.1,
    }


def connector(job: dict[str, Any]) -> str:
    transfer = job["engine"].get("kv_transfer_config", {})
    return str(transfer.get("kv_connector", "none"))


def right(job: dict[str, Any]) -> Result:
    """What an engine gives that does as it should; the restarted one has all from the disk."""
    chained = connector(job) == "KVTiersConnector"
    cells = []
    for length, at_once in job["cells"]:
        cached, tiers = (length, {"disk": length}) if chained else (0, {})
        cell = {"length": length, "at_once": at_once, "seconds": 0.5}
        cell["own"] = [answer(length, {}) for _ in range(at_once)]
        first = [answer(0, {}) for _ in range(at_once)]
        later = [answer(cached, tiers) for _ in range(at_once)]
        cell |= {"cold": first, "again": later} if job["again"] else {"cold": later}
        cells.append(cell)
    cells[0]["other"] = answer(0, {}, -0.7)
    result = {"runner": "V2", "async_scheduling": True, "graphs": "FULL", "start_seconds": 1.0}
    return {**result, "cells": cells}


def wrong(job: dict[str, Any]) -> Result:
    """One log probability differs in its last bit."""
    result = right(job)
    cell = result["cells"][-1]
    cell["again" if job["again"] else "cold"][0]["logprobs"][1]["8"] = -1.0000000000000002
    return result


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Behaves], Runs]:
    def make(behaves: Behaves) -> Runs:
        def child(job: dict[str, Any], env: Mapping[str, str], seconds: float) -> tuple[str, int]:
            assert 0 < seconds <= gpu_engine.SECONDS
            result = behaves(job)
            if result is None:
                return "begins\nit does not start", 1
            said = result.pop("said", APART if connector(job) == "KVTiersConnector" else "")
            Path(job["result"]).write_text(json.dumps(result))
            return said, 0

        monkeypatch.setattr(gpu_engine, "_child", child)
        return Runs(SMOKE, tmp_path / "engine.json", tmp_path, said={"engines": {}})

    return make


def written(made: Runs) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(made.file.read_text())["engines"]
    return found


def test_right_answers(runs: Callable[[Behaves], Runs]) -> None:
    jobs: list[dict[str, Any]] = []
    made = runs(lambda job: jobs.append(job) or right(job))  # type: ignore[func-returns-value]
    assert made.all(PARTS)
    found = written(made)
    assert {part: {*engines} for part, engines in found.items()} == {
        "equal": {"llama, V1, eager"},
        "speed": {"none", "native", "chain", "restarted", "inside", "chain, sampled"},
    }
    assert all(one["exit"] == 0 for part in PARTS for one in found[part].values())
    by_name = {Path(job["result"]).stem: job for job in jobs}
    again = {name.partition(", ")[2]: job["again"] for name, job in by_name.items()}
    assert again == {
        "llama, V1, eager": True,
        "none": False,
        "native": True,
        "chain": True,
        "restarted": False,
        "inside": False,
        "chain, sampled": False,
    }
    assert {name for name, job in by_name.items() if job["sampled"]} == {"speed, chain, sampled"}
    assert {name: job["alone"] for name, job in by_name.items()} == {
        name: name.startswith("speed") for name in by_name
    }
    kept, later = (by_name[f"speed, {name}"] for name in ("chain", "restarted"))
    assert kept["engine"] == later["engine"], "it has the disk that was left"
    assert kept["folder"] and not later["folder"]
    apart = ("chain", "inside", "chain, sampled")
    folders = [by_name[f"speed, {name}"]["folder"] for name in apart]
    assert len({*folders}) == 3, "what another stored is not stored again"


def test_answers_that_differ_in_a_bit(runs: Callable[[Behaves], Runs]) -> None:
    """And the engines beside it are heard all the same."""
    made = runs(lambda job: right(job) if job["alone"] else wrong(job))
    assert not made.all(PARTS)
    assert sum(len(engines) for engines in written(made).values()) == 7
    assert not runs(lambda job: wrong(job) if job["alone"] else right(job)).all(PARTS)
    peer = runs(lambda job: wrong(job) if connector(job) != "KVTiersConnector" else right(job))
    assert peer.all(PARTS), "what others answer is told, and judged by nobody"


def test_it_ends_with_an_error_where_answers_differ(
    runs: Callable[[Behaves], Runs], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_engine, "write_model", lambda *_: None)
    monkeypatch.setattr(gpu_engine, "SETTLED_SECONDS", 0.0)
    file = tmp_path / "some.json"
    runs(wrong)
    assert main(file, SMOKE, scratch=tmp_path) == 1
    runs(right)
    assert main(file, SMOKE, scratch=tmp_path) == 0
    assert main(file, SMOKE, only="speed", scratch=tmp_path) == 0
    assert [*json.loads(file.read_text())["engines"]] == ["speed"]
    monkeypatch.setattr(gpu_engine, "machine", lambda: {"gpu": ""})
    plan = replace(SMOKE, speed=())
    assert main(file, plan, scratch=tmp_path) == 1, "without a GPU only a smoke run is fine"


def test_a_chain_whose_engine_stores_fails_it(runs: Callable[[Behaves], Runs]) -> None:
    """Where another process can't be had its figures are those of `inside`."""

    def within(name: str) -> Behaves:
        def behaves(job: dict[str, Any]) -> Result:
            said = {"said": f"WARNING {WITHIN}\nWARNING {WITHIN}\n"}
            return {**right(job), **(said if Path(job["result"]).stem == name else {})}

        return behaves

    made = runs(within("speed, chain"))
    assert not made.all(PARTS)
    engines = written(made)
    assert engines["speed"]["chain"]["stores"] == [WITHIN.partition(" ")[2]]
    assert engines["speed"]["restarted"]["stores"] == [LINE.partition(" ")[2]]
    assert not runs(within("equal, llama, V1, eager")).all(PARTS)
    nothing = runs(lambda job: {**right(job), "said": ""})
    assert not nothing.all(PARTS), "nobody said who stores"
    assert is_right({**came(), "stores": []}, replace(CHAIN, connector="restarted"))


def test_engines_start_as_the_gpu_has_room(runs: Callable[[Behaves], Runs]) -> None:
    """In the order of the plan; those that ask for no share need none."""
    beside, most, began = 0, 0, list[str]()
    lock, pair = threading.Lock(), threading.Barrier(2)

    def behaves(job: dict[str, Any]) -> Result:
        nonlocal beside, most
        with lock:
            began.append(Path(job["result"]).stem)
            beside += 1
            most = max(most, beside)
        pair.wait(60)
        time.sleep(0.1)  # a third would come now
        with lock:
            beside -= 1
        return right(job)

    made = runs(behaves)
    large = {**CHAIN.more, "gpu_memory_utilization": 0.4}
    engines = [replace(CHAIN, name=str(number), more=large) for number in range(6)]
    made.plan = replace(SMOKE, equal=engines, speed=())
    assert made.all(PARTS)
    assert most == 2 and sorted(began) == [f"equal, {number}" for number in range(6)]
    assert {*began[:2]} == {"equal, 0", "equal, 1"}


@pytest.mark.parametrize("plan", [FULL, SMOKE])
def test_what_stands_beside_fits_a_host(plan: Plan, runs: Callable[[Behaves], Runs]) -> None:
    """Tiers in memory are pinned, on a machine of 128 GiB, whose disk has 64."""
    made = runs(right)
    made.plan = plan
    memory = disk = 0
    folders = set()
    for part in PARTS:
        for engine in getattr(plan, part):
            job = made._job(engine, part, Path("some"))
            extra = job["engine"].get("kv_transfer_config", {}).get("kv_connector_extra_config", {})
            tiers = extra.get("chain", {"tiers": []})["tiers"]
            memory += extra.get("cpu_bytes_to_use", 0) + sum(
                gib(tier["capacity"]) for tier in tiers[:1] if engine.connector != "restarted"
            )
            new = [tier for tier in tiers[1:] if tier["path"] not in folders]
            folders |= {tier["path"] for tier in new}
            disk += sum(gib(tier["capacity"]) for tier in new if part == "speed")
    assert memory <= 96 << 30 and disk <= 48 << 30


def gib(size: str) -> int:
    return int(TypeAdapter(ByteSize).validate_python(size))


def test_a_chain_that_does_not_start_fails_it(runs: Callable[[Behaves], Runs]) -> None:
    """A peer that does not start fails nothing."""

    def without(name: str) -> Behaves:
        return lambda job: None if connector(job) == name else right(job)

    assert not runs(without("KVTiersConnector")).all(PARTS)
    for name in ("none", "OffloadingConnector"):
        made = runs(without(name))
        assert made.all(PARTS)
    native = written(made)["speed"]["native"]
    assert native["exit"] == 1 and native["output"] == "begins\nit does not start"


def test_an_engine_that_does_not_start_is_told_by_its_error() -> None:
    """Which a tracker of resources that it leaves comes behind."""
    lines = ["Traceback", "ValueError: there is no room"]
    lines += ["RuntimeError: it failed. See root cause above", "  warnings.warn('leaked')"]
    came = {"exit": 1, "output": "\n".join(lines)}
    assert gpu_engine._lines("chain", came) == [f"chain: exit 1: {lines[1]}"]
    assert gpu_engine._lines("chain", {**came, "output": "ended"}) == ["chain: exit 1: ended"]
    (said,) = gpu_engine._lines("chain", {**came, "output": ""})
    assert said.endswith("it printed nothing")


@pytest.mark.parametrize("starts", [True, False])
def test_a_restart_is_after_the_first_end(runs: Callable[[Behaves], Runs], starts: bool) -> None:
    """Both have one disk. It is tried where the first did not start, too."""
    again, ended = threading.Event(), threading.Event()

    def behaves(job: dict[str, Any]) -> Result | None:
        name = Path(job["result"]).stem
        if name == "speed, chain":
            assert not again.wait(0.5), "it began beside the first"
            ended.set()
            return right(job) if starts else None
        if name == "speed, restarted":
            again.set()
            assert ended.is_set()
        return right(job)

    assert runs(behaves).all(PARTS) == starts
    assert again.is_set()


def a_cell(length: int = 1000, at_once: int = 1, **more: Any) -> dict[str, Any]:
    own = [answer(992, {}) for _ in range(at_once)]
    later = [answer(992, {"cpu": 600, "disk": 392}) for _ in range(at_once)]
    cell = {"length": length, "at_once": at_once, "seconds": 2.0, "own": own, "again": later}
    return {**cell, "cold": [answer(0, {}) for _ in range(at_once)], **more}


def test_what_is_told_of_a_cell() -> None:
    found = told(a_cell(other=answer(0, {}, -0.7)))
    assert found == {
        "length": 1000,
        "at_once": 1,
        "tokens_per_second": (1000 + gpu_engine.ANSWER) / 2,
        "ttft_cold": 0.1,
        "cached_cold": 0,
        "ttft_own": 0.1,
        "cached_own": 992,
        "ttft_again": 0.1,
        "cached_again": 992,
        "from_tiers": {"cpu": 600, "disk": 392},
        "same_answers": 1,
        "same_bits": 1,
        "prefix_matters": True,
    }
    several = a_cell(at_once=3)
    several["again"][1]["logprobs"][0]["7"] = -0.51
    several["again"][2] |= {"answer": [7, 9], "logprobs": [], "from_tiers": {}, "ttft": 0.4}
    found = told(several)
    assert (found["same_answers"], found["same_bits"]) == (2, 1)
    assert (found["ttft_again"], found["from_tiers"]["disk"]) == (0.1, 392)
    assert found["tokens_per_second"] == 3 * (1000 + gpu_engine.ANSWER) / 2
    assert "prefix_matters" not in found
    first = a_cell(cold=[answer(990, {"disk": 990})])
    del first["again"]
    found = told(first)
    assert found["from_tiers"] == {"disk": 990} and found["cached_again"] == 990


def cell_of(**more: Any) -> dict[str, Any]:
    return {**told(a_cell()), **more}


def came(**more: Any) -> dict[str, Any]:
    """An engine whose last cell is so."""
    cells = [told(a_cell()) for _ in CHAIN.cells]
    return {"cells": [*cells[:-1], cell_of(**more)], "stores": [LINE.partition(" ")[2]]}


def test_what_is_right() -> None:
    assert is_right(came(), CHAIN)
    assert is_right(came(at_once=4, same_bits=0, same_answers=3), CHAIN), "batches differ"
    assert not is_right(came(same_bits=0), CHAIN)
    assert not is_right(came(prefix_matters=False), CHAIN), "nothing can be told by such a model"
    assert not is_right(came(cached_again=960), CHAIN), "less came than the engine itself kept"
    assert is_right(came(cached_own=960), CHAIN), "by then a tier has the last block, too"
    assert not is_right(came(from_tiers={"cpu": 400, "disk": 400}), CHAIN)
    assert not is_right(came(from_tiers={}), CHAIN), "the engine's own cache had it"
    assert not is_right({"cells": came()["cells"][1:]}, CHAIN), "a cell is missing"
    alike = replace(CHAIN, env=INVARIANT)
    assert not is_right(came(at_once=4, same_bits=3), alike), "whatever the batch"
    assert is_right(came(at_once=4, same_bits=4), alike)
    assert not is_right({"exit": 1, "output": ""}, CHAIN)


def holds(turn: str) -> str:
    """How a file is locked by others."""
    with Path(turn).open("a") as file:
        for how, name in ((fcntl.LOCK_EX, "nobody"), (fcntl.LOCK_SH, "shared")):
            try:
                fcntl.flock(file, how | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            return name
    return "alone"


class FakeEngine:
    """As much of vLLM's `LLM` as a child asks: it notes who holds the turn, and the prompts."""

    def __init__(self, turn: str) -> None:
        self.turn = turn
        self.started, self.asked = "", set[str]()
        self.prompts: list[tuple[int, ...]] = []
        self.pause = 0.0
        scheduler = SimpleNamespace(async_scheduling=True)
        graphs = SimpleNamespace(cudagraph_mode="FULL")
        config = SimpleNamespace(scheduler_config=scheduler, compilation_config=graphs)
        self.llm_engine = SimpleNamespace(vllm_config=config)

    def start(self, **_: Any) -> FakeEngine:
        self.started = holds(self.turn)
        return self

    def generate(self, prompts: Sequence[dict[str, Any]], *_: Any, **__: Any) -> list[Any]:
        self.asked.add(holds(self.turn))
        time.sleep(self.pause)
        asked = [tuple(one["prompt_token_ids"]) for one in prompts]
        self.prompts += asked
        return [self._answer(prompt) for prompt in asked]

    def _answer(self, prompt: tuple[int, ...]) -> Any:
        place = {prompt[0]: SimpleNamespace(logprob=-float(prompt[0]))}
        output = SimpleNamespace(token_ids=[prompt[0]], logprobs=[place])
        said = {"kvtiers": {"cached_tokens": {"cpu": 16}}}
        metrics = SimpleNamespace(first_token_latency=0.25)
        return SimpleNamespace(
            outputs=[output], num_cached_tokens=None, kv_transfer_params=said, metrics=metrics
        )


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    made, vllm = FakeEngine(str(tmp_path / "turn")), ModuleType("vllm")
    vllm.LLM, vllm.SamplingParams, vllm.TokensPrompt = made.start, dict, dict  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    return made


def ask(fake: FakeEngine, cells: Sequence[tuple[int, int]], **more: Any) -> dict[str, Any]:
    job = {"engine": {}, "cells": cells, "answer": 8, "again": True, "folder": None, "sampled": 0}
    return engine_child.run({**job, "turn": fake.turn, "alone": False, "seconds": 600.0, **more})


def test_an_engine_waits_until_nobody_else_is_asked(
    fake: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are asked beside each other have the turn from their start."""
    cells = [(32, 1), (16, 2)]
    ask(fake, cells)
    assert (fake.started, fake.asked) == ("shared", {"shared"})
    fake.asked.clear()
    with Path(fake.turn).open("a") as other:
        fcntl.flock(other, fcntl.LOCK_SH)

        def flock(file: Any, how: int) -> None:
            assert how == fcntl.LOCK_EX
            other.close()
            fcntl.flock(file, how)

        patched = SimpleNamespace(flock=flock, LOCK_EX=fcntl.LOCK_EX, LOCK_SH=fcntl.LOCK_SH)
        monkeypatch.setattr(engine_child, "fcntl", patched)
        ask(fake, cells, alone=True)
    assert (fake.started, fake.asked) == ("shared", {"alone"}), "it starts while the other is asked"
    assert holds(fake.turn) == "nobody"


def test_one_that_hangs_in_its_turn_is_ended(
    fake: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waiting for the turn costs it nothing; who has ended is not."""
    ended: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "killpg", lambda *how: ended.append(how))
    fake.pause = 0.3
    ask(fake, [(32, 1)], seconds=0.1)
    assert not ended, "one that shares the turn has its parent's limit"
    ask(fake, [(32, 1)], alone=True, seconds=0.1)
    assert ended == [(0, signal.SIGKILL)]
    fake.pause = 0.0
    ask(fake, [(32, 1)], alone=True)
    wait_until(lambda: not any(isinstance(one, threading.Timer) for one in threading.enumerate()))


def test_where_the_engines_thread_is(fake: FakeEngine) -> None:
    """While other prompts are asked than those of the cells."""
    assert ask(fake, [(32, 1)])["sampled"] is None
    before = len(fake.prompts)
    fake.pause = 0.05
    found = ask(fake, [(32, 1)], sampled=4)["sampled"]
    asked = fake.prompts[before:]
    assert found["ttft"] == 0.25 and len(asked) - before == 4
    assert not {*asked[-4:]} & {*asked[:-4]}
    longest = max(found["stacks"], key=found["stacks"].get)
    assert longest.startswith("bench/test_gpu_engine.py") and " generate < " in longest


ROOMS = {"equal": (EQUAL_CELLS, 900 * 16), "speed": (SPEED_CELLS, 4400 * 16)}


@pytest.mark.parametrize("part", ROOMS)
def test_a_cell_comes_again_when_others_have_taken_its_room(
    fake: FakeEngine, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells, room = ROOMS[part]
    really, kept = engine_child._evict, {}

    def evict(llm: Any, job: dict[str, Any], cell: dict[str, Any]) -> None:
        fake.prompts.clear()
        really(llm, job, cell)
        others = set(fake.prompts)
        assert others.isdisjoint(map(tuple, engine_child._prompts(cell)))
        kept[cell["length"], cell["at_once"]] = max(0, room - sum(map(len, others)))

    monkeypatch.setattr(engine_child, "_evict", evict)
    ask(fake, cells)
    assert [*kept] == [*cells]
    assert all(left < 0.1 * length * at_once for (length, at_once), left in kept.items()), kept


def test_a_child_tells_what_came(fake: FakeEngine) -> None:
    result = ask(fake, [(32, 1), (16, 2)])
    first, second = result["cells"]
    assert [len(second[name]) for name in ("cold", "own", "again")] == [2, 2, 2]
    assert first["own"] == first["again"] == first["cold"]
    (one,) = first["own"]
    token = one["answer"][0]
    assert one["logprobs"] == [{str(token): -float(token)}]
    assert (one["cached"], one["from_tiers"], one["ttft"]) == (0, {"cpu": 16}, 0.25)
    assert first["other"]["answer"] != one["answer"] and "other" not in second
    assert "again" not in ask(fake, [(32, 1)], again=False)["cells"][0]


def test_every_engine_has_its_model() -> None:
    for plan in (FULL, SMOKE):
        for part in PARTS:
            assert all(one.model in plan.models for one in getattr(plan, part))
            assert part in plan.sizes


@pytest.mark.vllm
@pytest.mark.faults
@pytest.mark.timeout(900)
def test_all_of_it_runs_on_the_cpu(
    vllm_jobs: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for vLLM's own connector, which refuses CPUs, and graphs and runners, which CPUs lack.
    One engine begins as on a GPU, the others have vLLM imported as they do."""
    really = gpu_engine._child

    def child(
        job: dict[str, Any], env: Mapping[str, str], seconds: float
    ) -> tuple[str, int | None]:
        if Path(job["result"]).stem == "speed, inside":
            return really(job, env, seconds)
        program = Program(vllm_jobs, "bench.engine_child", {**os.environ, **env}, errors=True)
        return program.communicate(json.dumps(job)), program.returncode

    monkeypatch.setattr(gpu_engine, "_child", child)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # starts sooner
    monkeypatch.setattr(gpu_engine, "ENGINE_SECONDS", 600.0)
    monkeypatch.setattr(gpu_engine, "SECONDS", 850.0)
    file = tmp_path / "engine.json"
    assert main(file, SMOKE) == 0
    said = json.loads(file.read_text())["engines"]
    native = said["speed"].pop("native")
    assert "CPU Offloading is currently only supported on" in native["output"]
    plain, restarted = said["speed"]["none"], said["speed"]["restarted"]
    sampled = said["speed"].pop("chain, sampled")
    assert len(sampled["stores"]) == 1 and not said["speed"]["inside"]["stores"]
    assert len(sampled["cells"]) == 1 and sampled["sampled"]["ttft"] > 0
    assert any("execute_model" in stack for stack in sampled["sampled"]["stacks"])
    for one in (*said["equal"].values(), *said["speed"].values()):
        cells = one["cells"]
        assert [(cell["length"], cell["at_once"]) for cell in cells] == [*CHAIN.cells]
        assert all(cell["ttft_cold"] > 0 and cell["tokens_per_second"] > 0 for cell in cells)
        assert all(cell["cached_own"] > 0 for cell in cells) and cells[0]["prefix_matters"]
    assert all(not cell["cached_cold"] and not cell["from_tiers"] for cell in plain["cells"])
    assert all([*cell["from_tiers"]] == ["disk"] for cell in restarted["cells"])
