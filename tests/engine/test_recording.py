"""What the replay engine is asked stands in the trace: each request once, its prefixes as ids."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zstandard

from tests.support.clock import Clock
from tests.support.replay import ReplayEngine, ReplayModel
from tests.support.replay_chains import DENSE, HYBRID, MODEL, Marked, chain_of, cpu, drive
from tiers.contract.engine_info import EngineInfo
from tiers.contract.marks import MediaMark, MediaMarks
from tiers.traces.open_trace import open_trace
from tiers.traces.trace import TraceRequest

SIZE = MODEL.block_tokens


@contextmanager
def recording(path: Path, **engine: Any) -> Iterator[ReplayEngine]:
    chain = chain_of(cpu(), record={"path": str(path)})
    made = ReplayEngine(chain, **engine)
    yield made
    made.settle()
    made.close()


def recorded(path: Path) -> list[TraceRequest]:
    trace = open_trace(path)
    requests = list(trace)
    assert not trace.summary.skipped
    return requests


def test_the_trace_has_what_was_asked(tmp_path: Path) -> None:
    clock = Clock(100.0)
    prefix = list(range(3 * SIZE))
    with recording(tmp_path / "trace", now=clock) as engine:
        engine.generate([*prefix, 1], max_tokens=SIZE)
        clock.now += 2.5
        engine.generate([*prefix, *[2] * (2 * SIZE)], max_tokens=1)
        engine.generate(prefix, max_tokens=3, salt="a")
        engine.generate([5] * (SIZE - 1), max_tokens=1)
    first, second, salted, short = recorded(tmp_path / "trace")
    assert [r.timestamp for r in (first, second, salted, short)] == [0.0, 2500.0, 2500.0, 2500.0]
    assert (first.input_length, first.output_length) == (3 * SIZE + 1, SIZE)
    assert (second.input_length, second.output_length) == (5 * SIZE, 1)
    assert first.blocks == second.blocks[:3] and len(set(second.blocks)) == 5
    assert (len(first.answer_blocks), len(second.answer_blocks)) == (1, 0)
    assert len(salted.blocks) == 3 and not {*salted.blocks} & {*second.blocks}
    assert first.salt is None
    assert salted.salt is not None and salted.salt != "a"
    assert len(short.blocks) == 0


@pytest.mark.parametrize(("model", "parts"), [(MODEL, 1), (DENSE, 3), (HYBRID, 1)])
def test_bytes_of_a_token_are_those_that_tiers_keep_of_most(
    tmp_path: Path, model: ReplayModel, parts: int
) -> None:
    """Of windows a tier keeps what is before the ends of prefixes."""
    with recording(tmp_path / "trace", model=model) as engine:
        engine.generate(range(4 * SIZE))
    of_token = model.payload_bytes * parts // SIZE
    assert open_trace(tmp_path / "trace").header.kv_bytes_per_token == of_token


def test_other_adapters_images_and_generations_have_other_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's hashes have adapters and images by name alone, and nothing of a reset."""
    model = ReplayModel()
    mark, pictures = b"", MediaMark()
    plain = model.engine_info

    def engine_info(num_blocks: int) -> EngineInfo:
        return replace(plain(num_blocks), marks=Marked(lambda: mark))

    monkeypatch.setattr(ReplayModel, "engine_info", lambda _, num_blocks: engine_info(num_blocks))
    monkeypatch.setattr(MediaMarks, "of", lambda *_: pictures)
    prompt = range(4 * SIZE + 1)
    with recording(tmp_path / "trace", model=model, prefix_caching=False) as engine:
        engine.generate(prompt, max_tokens=1)
        for mark in (b"adapter", b"its next version"):  # noqa: B007 - the engine reads it
            engine.generate(prompt, max_tokens=1)
        for content in (b"red", b"blue"):
            pictures = MediaMark([(2 * SIZE, content)])
            engine.generate(prompt, max_tokens=1)
        mark, pictures = b"", MediaMark()
        engine.generate(prompt, max_tokens=1)
        assert engine.connector is not None and engine.connector.reset_cache()
        engine.generate(prompt, max_tokens=1)
    none, first, second, red, blue, again, reset = (r.blocks for r in recorded(tmp_path / "trace"))
    assert again == none
    assert not {*none} & {*first} and not {*first} & {*second} and not {*none} & {*reset}
    assert red[:2] == blue[:2] == second[:2], "blocks before an image are those of the text alone"
    assert len({*red, *blue, *second}) == 2 + 3 * 2


def test_what_a_reset_outdates_has_the_ids_that_it_was_computed_under(tmp_path: Path) -> None:
    prompt = range(4 * SIZE + 1)
    with recording(tmp_path / "trace") as engine:
        engine.generate(prompt, max_tokens=1)
        engine.add(prompt, max_tokens=30)
        engine.step()
        assert engine.connector is not None and engine.connector.reset_cache()
        engine.run()
        engine.generate(prompt, max_tokens=1)
    before, during, after = (one.blocks for one in recorded(tmp_path / "trace"))
    assert during == before and not {*during} & {*after}


def test_an_answer_is_the_next_turns_prompt(tmp_path: Path) -> None:
    with recording(tmp_path / "trace") as engine:
        first = engine.generate(range(3 * SIZE + 1), max_tokens=2 * SIZE)
        engine.generate(first.tokens + [7] * SIZE, max_tokens=1)
    asked, again = recorded(tmp_path / "trace")
    both = [*asked.blocks, *asked.answer_blocks]
    assert len(both) == 5 and [*again.blocks[:5]] == both


def test_ids_are_the_same_after_a_restart_and_for_nobody_elses_key(tmp_path: Path) -> None:
    found = []
    for folder, facts in [("a", "m"), ("a", "m"), ("b", "m"), ("a", "other")]:
        with recording(tmp_path / folder, facts={"model": facts}) as engine:
            engine.generate(range(2 * SIZE), max_tokens=1)
        newest = max((tmp_path / folder).glob("*.zst"))
        found.append(recorded(newest)[0].blocks)
    assert found[0] == found[1]
    assert not {*found[0]} & {*found[2]}, "another folder has another key"
    assert not {*found[0]} & {*found[3]}, "another model's KV is other blocks"


def test_who_has_one_salt(tmp_path: Path) -> None:
    with recording(tmp_path / "trace") as engine:
        engine.generate(range(SIZE), max_tokens=1, salt="acme")
        engine.generate(range(SIZE), max_tokens=1, salt="acme")
        engine.generate(range(SIZE), max_tokens=1, salt="other")
    one, two, other = recorded(tmp_path / "trace")
    assert one.salt == two.salt is not None
    assert other.salt not in (None, one.salt)


def test_each_request_once_in_the_order_in_which_they_came(tmp_path: Path) -> None:
    # So few blocks that requests are preempted, and some are aborted in between.
    clock = Clock()
    with recording(tmp_path / "trace", num_blocks=24, now=clock) as engine:
        long = engine.add(range(40), max_tokens=40)
        asked: dict[int, int] = {}
        for number in range(1, 30):
            clock.now += 1.0
            asked[number] = 10 + number
            engine.add([number] * (10 + number), max_tokens=1 + number % 7)
            engine.step()
        aborted = engine.add([99] * 9, max_tokens=9)
        engine.scheduler.abort(aborted.request_id)
        engine.run()
        assert engine.scheduler.preemptions
        assert len(long.output) == 40
    requests = recorded(tmp_path / "trace")
    assert [r.timestamp for r in requests] == [1000.0 * n for n in range(30)]
    assert requests[0].output_length == 40, "the first ended behind others"
    assert [r.input_length for r in requests[1:]] == list(asked.values())
    assert [r.output_length for r in requests[1:]] == [1 + n % 7 for n in asked]


def test_aborted_requests_have_what_was_answered(tmp_path: Path) -> None:
    with recording(tmp_path / "trace") as engine:
        begun = engine.add(range(2 * SIZE), max_tokens=50)
        for _ in range(6):
            engine.step()
        answered = len(begun.output)
        engine.scheduler.abort(begun.request_id)
        engine.run()
    (request,) = recorded(tmp_path / "trace")
    assert 0 < answered == request.output_length


def test_no_token_and_no_text(tmp_path: Path) -> None:
    with recording(tmp_path / "trace") as engine:
        request = engine.generate([271_828] * (2 * SIZE), max_tokens=2, salt="secret-salt")
    (file,) = (tmp_path / "trace").glob("*.zst")
    text = zstandard.ZstdDecompressor().stream_reader(file.read_bytes(), read_across_frames=True)
    lines = text.read().decode().splitlines()
    _, line = map(json.loads, lines)
    assert {"timestamp", "input_length", "output_length", "hash_ids", "salt", "open_since"} == {
        *line
    }
    told = " ".join(lines)
    assert "271828" not in told and "secret" not in told
    for block_hash in request.block_hashes:
        assert block_hash.hex()[:12] not in told
        numbers = {int.from_bytes(block_hash[i : i + 8], "little") for i in range(24)}
        assert not {n >> 11 for n in numbers} & {*line["hash_ids"]}


def test_a_folder_that_can_t_be_used_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with recording(tmp_path / "file") as engine:
        drive(engine, 1)
    assert (tmp_path / "file").read_text() == "no folder"
