"""LoRA adapters: whose KV is whose when files, links and names stay and weights do not."""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.clock import Clock, wait_for
from tests.support.replay import ReplayEngine, ReplayModel, ReplayRequest
from tests.support.replay_chains import chain_of, cpu, measured
from tiers.contract.marks import LoadedAdapter, RequestMark
from tiers.engine import adapter_marks
from tiers.engine.adapter_marks import (
    PATIENCE,
    TICK_SECONDS,
    MarksOfRequests,
    SeenAdapters,
    folder_stamp,
    name_of,
    settled_stamp,
    weights_digest,
)
from tiers.engine.identity.digests import Stamp

WEIGHTS = "adapter_model.safetensors"


class Layer:
    """Weights of one layer, as vLLM has them."""

    def __init__(self, number: float) -> None:
        self.module_name, self.rank, self.scaling = "q_proj", 8, 1
        self.lora_a = torch.full((2, 3), number, dtype=torch.bfloat16)
        self.lora_b: list[torch.Tensor | None] = [torch.full((3, 2), number), None]


class Model:
    """An adapter in an engine's memory."""

    def __init__(self, number: int, layers: dict[str, Layer]) -> None:
        self.id, self.rank, self.loras = number, 8, layers


class Engine:
    """Loads adapters as a vLLM worker does, with room for so many, and says so to a scheduler."""

    def __init__(self, room: int = 1, ranks: int = 1, now: Callable[[], float] = time.monotonic):
        self.room = room
        self.seen = [SeenAdapters() for _ in range(ranks)]
        self.marks = MarksOfRequests(ranks, now=now)
        self.loaded: dict[int, list[Model]] = {}
        self.asked = 0

    def load(self, adapter: Any) -> None:
        reads = adapter.load_inplace or adapter.lora_int_id not in self.loaded
        stamps = [seen.before(adapter) if reads else b"" for seen in self.seen]
        if reads:
            self.loaded.pop(adapter.lora_int_id, None)
            while len(self.loaded) >= self.room:
                del self.loaded[next(iter(self.loaded))]
            gc.collect()
            self.loaded[adapter.lora_int_id] = [self.read(adapter, seen) for seen in self.seen]
        models = self.loaded[adapter.lora_int_id]
        for seen, model, stamp in zip(self.seen, models, stamps, strict=True):
            seen.after(adapter, model, stamp)

    def read(self, adapter: Any, seen: SeenAdapters) -> Model:
        said = (Path(adapter.lora_path) / WEIGHTS).read_bytes()
        return Model(adapter.lora_int_id, {"q": Layer(float(said[0]))})

    def step(self) -> None:
        """A step of the engine: what its workers have loaded reaches the scheduler."""
        self.marks.take_reports({rank: seen.report() for rank, seen in enumerate(self.seen)})

    def mark_of(self, request: Any) -> RequestMark:
        """The mark of a request that has come and waits, for so many steps at most."""
        wait_for(lambda: self.is_ready(request))
        return self.marks.of(request)

    def is_ready(self, request: Any) -> bool:
        self.step()
        return self.marks.ready(request)


def adapter(path: Path | str, name: str = "sql", number: int = 1, inplace: bool = False) -> Any:
    return SimpleNamespace(
        lora_name=name, lora_path=str(path), lora_int_id=number, load_inplace=inplace
    )


_numbers = iter(range(10**6))


def request_of(adapter: Any) -> Any:
    return SimpleNamespace(request_id=str(next(_numbers)), lora_request=adapter)


def write(folder: Path, weights: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / WEIGHTS).write_bytes(weights * 100)
    (folder / "adapter_config.json").write_text('{"r": 8}')
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "sql", b"1")


def steps_of(mark: RequestMark) -> list[tuple[int, bytes]]:
    assert mark.shared and mark.may_load and len(mark.steps) == 1
    return mark.steps


# -- what was loaded -----------------------------------------------------------------------------


def test_equal_weights_have_one_mark_in_every_engine(tmp_path: Path, folder: Path) -> None:
    marks = []
    for weights in (b"1", b"1", b"2"):
        engine, one = Engine(), adapter(write(folder, weights))
        engine.load(one)
        marks.append(steps_of(engine.mark_of(request_of(one))))
    assert marks[0] == marks[1] != marks[2]
    plain = request_of(None)
    assert MarksOfRequests(1).ready(plain) and MarksOfRequests(1).of(plain) == RequestMark()


def test_each_tensor_and_each_setting_counts() -> None:
    def model() -> Model:
        return Model(1, {"q": Layer(1), "v": Layer(2)})

    first, changed = weights_digest(model()), []
    for number in range(8):
        other: Any = model()
        layer = other.loras["v"]
        if number == 0:
            layer.lora_a[1, 2] = 3
        elif number == 1:
            layer.lora_b.reverse()
        elif number == 2:
            layer.scaling = 2
        elif number == 3:
            other.loras["w"] = other.loras.pop("v")
        elif number == 4:
            layer.lora_a = layer.lora_a.to(torch.float32)
        elif number == 5:
            other.rank = 16
        else:
            other.loras["bare"] = torch.full((2,), number)
        changed.append(weights_digest(other))
    assert len({first, *changed}) == 9
    same = model()
    same.id = 7
    assert weights_digest(same) == first, "its number is this engine's"
    same.loras["q"].lora_a = object()  # type: ignore[assignment]
    assert weights_digest(same) == b"", "what does not show its content has none"
    assert weights_digest(Model(1, {})) == b""


def test_nothing_is_shared_until_all_ranks_have_loaded_it(folder: Path) -> None:
    engine, one = Engine(ranks=2), adapter(folder)
    engine.load(one)
    request = request_of(one)
    engine.marks.take_reports({0: engine.seen[0].report()})
    assert not engine.marks.of(request).shared
    engine.marks.take_reports({1: engine.seen[1].report()})
    mark = engine.marks.of(request)
    assert mark.shared

    alone = Engine()
    alone.load(one)
    of_one_rank = alone.mark_of(request_of(one))
    assert mark.content == of_one_rank.content, "nodes of other ranks know it by that"
    assert mark.steps != of_one_rank.steps


def test_ranks_with_different_weights_are_another_adapter(folder: Path) -> None:
    """A trainer wrote the next version between the first rank's reading and the second's."""

    class Torn(Engine):
        def read(self, adapter: Any, seen: SeenAdapters) -> Model:
            if seen is self.seen[1]:
                write(folder, b"2")
            return super().read(adapter, seen)

    one = adapter(folder)
    torn = Torn(ranks=2)
    torn.load(one)
    torn.step()
    assert not torn.marks.of(request_of(one)).shared, "nor do both know which files they read"
    contents = [seen._loaded[name_of(one)].content for seen in torn.seen]
    assert contents[0] != contents[1]


@pytest.mark.parametrize("stamps", [(b"old", b"new"), (b"new", b"old"), (b"new", b"")])
def test_ranks_that_read_different_files_share_nothing(stamps: tuple[bytes, bytes]) -> None:
    """Whose stamp it was, both would load again."""
    one, marks = adapter("anywhere"), MarksOfRequests(2)
    marks.take_reports(
        {
            rank: {name_of(one): LoadedAdapter(1, b"%d" % rank, stamp)}
            for rank, stamp in enumerate(stamps)
        }
    )
    assert not marks.of(request_of(one)).shared


def test_a_request_that_has_the_name_of_one_before_it_has_a_mark_of_its_own(folder: Path) -> None:
    engine, one = Engine(), adapter(folder)
    engine.load(one)
    request = request_of(one)
    steps_of(engine.mark_of(request))
    engine.marks.forget(request.request_id)
    request.lora_request = None
    assert engine.marks.of(request) == RequestMark()


# -- files that change ---------------------------------------------------------------------------


def test_an_adapter_replaced_between_load_and_first_request_keeps_its_mark(folder: Path) -> None:
    """What is computed is of the weights that were loaded; what is there now, nobody loads."""
    old, one = Engine(), adapter(folder)
    old.load(one)
    write(folder, b"2")
    new = Engine()
    new.load(one)
    mark, other = old.mark_of(request_of(one)), new.mark_of(request_of(one))
    assert mark.shared and not mark.may_load
    assert mark.steps != steps_of(other)


@pytest.mark.parametrize("how", ["link of the folder", "link of the file", "time", "rename"])
def test_what_stays_the_same_by_size_and_times_is_seen(folder: Path, how: str) -> None:
    versions = [write(folder.parent / f"v{number}", b"%d" % number) for number in (1, 2)]
    path = folder.parent / "served"
    if how == "link of the folder":
        path.symlink_to(versions[0])
    elif how == "link of the file":
        write(path, b"1")
        (path / WEIGHTS).unlink()
        (path / WEIGHTS).symlink_to(versions[0] / WEIGHTS)
    else:
        versions[0].rename(path)
    for file in (*versions[1].iterdir(), *path.iterdir()):
        os.utime(file, ns=(1, 1))
    before = folder_stamp(str(path))
    assert before == folder_stamp(str(path)) != b""
    if how == "link of the folder":
        path.unlink()
        path.symlink_to(versions[1])
    elif how == "link of the file":
        (path / WEIGHTS).unlink()
        (path / WEIGHTS).symlink_to(versions[1] / WEIGHTS)
    elif how == "time":
        (path / WEIGHTS).write_bytes(b"2" * 100)
        os.utime(path / WEIGHTS, ns=(1, 1))
    else:
        path.rename(folder.parent / "old")
        versions[1].rename(path)
    assert folder_stamp(str(path)) != before


def test_files_that_no_adapter_is_made_of_are_not_looked_at(folder: Path) -> None:
    before = folder_stamp(str(folder))
    for name in ("README.md", "trainer_state.json", "tokenizer.json"):
        (folder / name).write_text("{}")
    assert folder_stamp(str(folder)) == before
    (folder / "another.json").write_text("{}")
    assert folder_stamp(str(folder)) != before


def test_what_is_no_folder_has_no_stamp(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (folder / "loop.json").symlink_to("loop.json")
    for path in ("org/adapter", "s3://bucket/adapter", str(tmp_path / "loop"), str(folder)):
        assert folder_stamp(path) == settled_stamp(path) == b""


def test_files_of_this_very_tick_are_waited_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a change in the same tick would have the same times."""
    older = (folder / "adapter_config.json").stat().st_ctime
    wait_for(lambda: time.time() > older + 2 * TICK_SECONDS)
    (folder / WEIGHTS).write_bytes(b"2")
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    written = (folder / WEIGHTS).stat().st_ctime_ns / 1e9
    monkeypatch.setattr(time, "time", lambda: written + 0.005)
    assert settled_stamp(str(folder)) == folder_stamp(str(folder))
    assert waited == [pytest.approx(TICK_SECONDS - 0.005, abs=1e-5)]
    monkeypatch.setattr(time, "time", lambda: written - 1.0)
    assert settled_stamp(str(folder)) == b"", "clocks that differ tell nothing"


def test_files_of_a_system_that_counts_seconds_are_settled_after_two(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For which no load of an adapter waits."""
    second = 10**9
    monkeypatch.setattr(
        adapter_marks,
        "stamp_of",
        lambda status: Stamp(1, 1, status.st_size, 5 * second, 5 * second),
    )
    for age, is_settled in ((0.5, False), (1.5, False), (2.5, True)):
        monkeypatch.setattr(time, "time", lambda age=age: 5 + age)
        assert (settled_stamp(str(folder)) != b"") == is_settled


# -- loading again -------------------------------------------------------------------------------


def test_an_adapter_that_is_loaded_again_is_the_same_while_its_weights_are(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is evicted for another, and comes back."""
    engine, one = Engine(), adapter(folder)
    other = adapter(write(folder.parent / "other", b"9"), "other", 2)
    engine.load(one)
    first = engine.mark_of(request_of(one))
    engine.load(other)
    assert not engine.loaded.keys() & {1}
    again = engine.mark_of(request_of(one))
    assert steps_of(again) == steps_of(first), "before it is loaded, too: its files are the same"
    engine.load(one)
    assert engine.seen[0].may_store(name_of(one))
    assert steps_of(engine.mark_of(request_of(one))) == steps_of(first)
    assert "have changed" not in caplog.text


@pytest.mark.parametrize("how", ["evicted", "in place", "new number"])
def test_nothing_is_stored_under_a_name_that_had_two_contents(
    folder: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine's own prefix cache may have KV of both, and tells them apart by name alone."""
    engine, one = Engine(room=2), adapter(folder)
    engine.load(one)
    running = request_of(one)
    mark = engine.mark_of(running)
    steps_of(mark)
    write(folder, b"2")
    assert not engine.mark_of(request_of(one)).may_load, "it would be loaded from there"
    if how == "evicted":
        engine.loaded.clear()
    again = adapter(folder, number=1 + (how == "new number"), inplace=how == "in place")
    with caplog.at_level(logging.WARNING):
        engine.load(again)
        assert not engine.seen[0].may_store(name_of(one)), "at once: the scheduler learns it later"
        engine.step()
        engine.load(again)
    assert not mark.shared, "what runs has computed with either"
    assert not engine.mark_of(request_of(again)).shared
    assert [r.message for r in caplog.records if "was loaded again with other weights" in r.message]
    assert len(caplog.records) == 2, "that the files had changed, once, and this, once"
    elsewhere = adapter(write(folder.parent / "v3", b"3"), number=3)
    engine.load(elsewhere)
    steps_of(engine.mark_of(request_of(elsewhere)))


def test_the_same_name_with_another_number_is_the_same_adapter(folder: Path) -> None:
    """It was unloaded and loaded again by its name."""
    engine = Engine(room=2)
    marks = []
    for number in (1, 2):
        one = adapter(folder, number=number)
        assert not engine.marks.of(request_of(one)).shared, "who knows what will be loaded"
        engine.load(one)
        marks.append(steps_of(engine.mark_of(request_of(one))))
    assert marks[0] == marks[1]


def test_a_number_that_is_used_twice_is_told_by_what_is_computed_with(folder: Path) -> None:
    """The engine goes by the number: the second adapter is never loaded."""
    engine = Engine()
    first, second = adapter(folder), adapter(write(folder.parent / "b", b"2"), "b")
    engine.load(first)
    engine.load(second)
    marks = [engine.mark_of(request_of(one)) for one in (first, second)]
    assert marks[0].steps == marks[1].steps and marks[0].may_load
    assert not marks[1].may_load


def test_a_number_whose_weights_are_others_is_trusted_under_no_earlier_name(folder: Path) -> None:
    """It was loaded in place from another path. A request of before that may run beside one of now,
    and a step of the engine makes sure of one of the two names alone."""
    engine = Engine()
    first = adapter(folder)
    second = adapter(write(folder.parent / "v2", b"2"), inplace=True)
    engine.load(first)
    straggler = request_of(first)
    assert engine.mark_of(straggler).shared
    engine.load(second)
    marks = [engine.mark_of(one) for one in (straggler, request_of(first), request_of(second))]
    assert [mark.shared for mark in marks] == [False, False, True]
    assert [engine.seen[0].may_store(name_of(one)) for one in (first, second)] == [False, True]


def test_salts_that_may_be_adapters_names_keep_both_apart(folder: Path) -> None:
    """vLLM before 0.31 puts either into a first block's hash as it is."""
    one = adapter(folder)
    plain, salted = request_of(None), request_of(None)
    salted.cache_salt = "sql"
    for mistakes in (False, True):
        engine = Engine()
        engine.marks = MarksOfRequests(1, mistakes_salts=mistakes)
        engine.load(one)
        before = engine.mark_of(request_of(one))
        assert before.shared
        assert engine.mark_of(salted).shared != mistakes
        assert before.shared != mistakes, "it may find what the salted one computes"
        assert engine.mark_of(request_of(one)).shared != mistakes
        assert engine.mark_of(plain).shared


def test_an_adapter_without_files_is_not_cached(caplog: pytest.LogCaptureFixture) -> None:
    """From a model hub, or handed over in memory: what would be loaded next time?"""
    engine, one = Engine(), adapter("org/adapter")
    model = Model(1, {"q": Layer(1)})
    with caplog.at_level(logging.WARNING):
        engine.seen[0].after(one, model, engine.seen[0].before(one))
        assert not engine.mark_of(request_of(one)).shared
        assert not engine.mark_of(request_of(one)).shared
    assert len([r for r in caplog.records if "load it from a local folder" in r.message]) == 1


def test_files_that_change_while_they_are_loaded_are_nobody_s(folder: Path) -> None:
    class Slow(Engine):
        def read(self, adapter: Any, seen: SeenAdapters) -> Model:
            model = super().read(adapter, seen)
            write(folder, b"2")
            return model

    engine, one = Slow(), adapter(folder)
    engine.load(one)
    assert not engine.mark_of(request_of(one)).shared


def test_more_adapters_than_are_told_apart(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(adapter_marks, "MOST_NAMES", 2)
    seen = SeenAdapters()
    model = Model(1, {"q": Layer(1)})
    for name in "abcd":
        seen.after(adapter(folder, name), model)
    assert [seen.may_store(name_of(adapter(folder, name))) for name in "abcd"] == [True] * 2 + [
        False
    ] * 2
    assert len(caplog.records) == 1
    seen.after(adapter(folder, "a"), Model(1, {"q": Layer(2)}))
    assert not seen.may_store(name_of(adapter(folder, "a"))), "those that are, still are"


# -- the scheduler's thread ----------------------------------------------------------------------


def test_a_request_does_not_wait_to_hear_what_is_loaded(folder: Path) -> None:
    engine, one = Engine(), adapter(folder)
    engine.load(one)
    first = request_of(one)
    assert engine.marks.ready(first) and not engine.marks.of(first).shared
    engine.step()
    assert engine.marks.of(first).shared, "what it computes meanwhile is stored"
    assert not engine.marks.of(first).may_load
    steps_of(engine.mark_of(request_of(one)))


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[set[str], list[str]]]:
    """Folders that don't answer, as those of an NFS server that is gone, and the threads that
    looked into any folder."""
    free, hang, threads = threading.Event(), set[str](), list[str]()

    def stamp(path: str) -> bytes:
        threads.append(threading.current_thread().name)
        if path in hang:
            free.wait(60)
        return folder_stamp(path)

    monkeypatch.setattr(adapter_marks, "folder_stamp", stamp)
    yield hang, threads
    free.set()


def test_a_folder_that_hangs_keeps_nobody_waiting(
    folder: Path, hanging: tuple[set[str], list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    hang, threads = hanging
    clock = Clock()
    engine, one = Engine(room=2, now=clock), adapter(folder)
    other = adapter(write(folder.parent / "other", b"2"), "other", 2)
    for each in (one, other):
        engine.load(each)
    engine.step()
    threads.clear()  # a worker, which loads adapters, looks itself
    hang.add(one.lora_path)
    first = request_of(one)
    assert not engine.marks.ready(first)
    clock.now += 2 * PATIENCE
    assert engine.marks.ready(first) and not engine.marks.of(first).may_load
    assert engine.marks.of(first).shared, "it is stored nevertheless"
    second = request_of(one)
    assert engine.marks.ready(second), "nor does anybody wait after it"
    assert not engine.marks.of(second).may_load
    steps_of(engine.mark_of(request_of(other)))
    wait_for(lambda: len(threads) > 1)
    assert threading.current_thread().name not in threads and len(threads) == 2
    assert [r.message for r in caplog.records if "does not answer" in r.message]


def test_each_request_has_its_files_looked_at_after_it_came(folder: Path) -> None:
    clock = Clock()
    engine, one = Engine(now=clock), adapter(folder)
    engine.load(one)
    engine.step()
    waiting = request_of(one)
    steps_of(engine.mark_of(waiting))
    write(folder, b"2")
    clock.now += 0.001
    assert not engine.mark_of(request_of(one)).may_load
    assert engine.marks.of(waiting).may_load, "as it was found"
    clock.now += 2.0
    assert not engine.mark_of(waiting).may_load, "who waits long is looked at again"


class Coming(Future[bytes]):
    """An answer that comes right behind so many questions whether it is there."""

    def __init__(self, stamp: bytes, questions: int) -> None:
        super().__init__()
        self._stamp, self._questions = stamp, questions

    def done(self) -> bool:
        was_done = super().done()
        if not was_done and self._questions == 0:
            self.set_result(self._stamp)
        self._questions -= 1
        return was_done


@pytest.mark.parametrize("questions", range(8))
def test_an_answer_that_comes_at_any_moment_counts(
    folder: Path, questions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, one = Engine(now=Clock()), adapter(folder)
    engine.load(one)
    monkeypatch.setattr(
        engine.marks._lookers, "submit", lambda look, path: Coming(look(path), questions)
    )
    steps_of(engine.mark_of(request_of(one)))


@pytest.mark.parametrize("questions", range(8))
def test_an_answer_of_before_a_request_came_counts_at_no_moment(
    folder: Path, questions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files were read then, and the answer comes now: meanwhile they have changed."""
    clock = Clock()
    engine, one = Engine(now=clock), adapter(folder)
    engine.load(one)
    monkeypatch.setattr(
        engine.marks._lookers, "submit", lambda look, path: Coming(look(path), questions)
    )
    engine.is_ready(request_of(one))
    write(folder, b"2")
    clock.now += 0.001
    assert not engine.mark_of(request_of(one)).may_load


# -- a whole engine ------------------------------------------------------------------------------


def test_what_runs_while_weights_change_is_not_stored(
    folder: Path, engine: Callable[..., ReplayEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the step on that loads them: the scheduler, which ordered it, hears of them after it."""
    seen, marks, one = SeenAdapters(), MarksOfRequests(1), adapter(folder)
    plain = ReplayModel.engine_info
    monkeypatch.setattr(
        ReplayModel,
        "engine_info",
        lambda model, blocks: replace(plain(model, blocks), marks=marks, adapters=seen),
    )
    monkeypatch.setattr(ReplayRequest, "lora_request", one, raising=False)
    made = engine(chain_of(cpu()), prefix_caching=False)
    tokens = 4 * made.model.block_tokens

    def add(start: int, said: int = 4) -> ReplayRequest:
        return made.add(range(start, start + tokens), said)

    def load() -> Model:
        stamp = seen.before(one)
        model = Model(1, {"q": Layer(float((folder / WEIGHTS).read_bytes()[0]))})
        seen.after(one, model, stamp)
        return model

    add(0, said=2 * tokens)
    made.step()
    made.step()  # nothing is loaded
    first = load()
    made.run()
    made.settle()
    assert measured(made, "stored_blocks", "cpu") == 11, "what ran before it was known, too"
    again = add(0)
    made.run()
    assert again.loaded_tokens == tokens
    stored = measured(made, "stored_blocks", "cpu")
    running = add(1000, said=2 * tokens)
    while running.num_tokens < tokens + made.model.block_tokens + 1:
        made.step()  # until the next one stores a block of its answer
    del first
    write(folder, b"2")
    second = load()
    made.run()
    made.settle()
    assert measured(made, "stored_blocks", "cpu") - stored <= 5, "what ran before"
    assert measured(made, "store_failures", "cpu") == 1, "ordered when nobody knew"
    last = add(0)
    made.run()
    assert last.loaded_tokens == 0 and second is not None
