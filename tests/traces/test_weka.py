"""WEKA's format: conversations, nested requests, ids local to a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tiers.errors import TraceError
from tiers.traces.open_trace import open_trace


def call(t: float, *ids: int, **more: object) -> dict[str, Any]:
    return {"t": t, "type": "s", "in": 64 * len(ids) + 3, "out": 1, "hash_ids": list(ids), **more}


def conversation(*requests: dict[str, Any], **more: object) -> dict[str, Any]:
    return {"id": "a", "block_size": 64, "hash_id_scope": "local", "requests": requests, **more}


def written(folder: Path, *conversations: dict[str, Any], indent: int | None = None) -> Path:
    for number, one in enumerate(conversations):
        (folder / f"trace_{number}.json").write_text(json.dumps(one, indent=indent))
    return folder


def test_ids_are_local_to_a_conversation(tmp_path: Path) -> None:
    one = conversation(call(0, 1, 2), call(1.5, 1, 2, 3))
    trace = open_trace(written(tmp_path, one, one, indent=2))
    assert (trace.header.block_tokens, trace.header.format) == (64, "WEKA")
    first, second, third, fourth = sorted(trace, key=lambda r: (r.blocks[0], r.timestamp))
    assert [r.timestamp for r in (first, second, third, fourth)] == [0, 1500, 0, 1500]
    assert set(second.blocks) > set(first.blocks)
    assert not set(second.blocks) & set(fourth.blocks)
    assert trace.summary.bytes_read == trace.file_bytes
    assert first.input_length == 131


def test_a_global_scope_shares_ids(tmp_path: Path) -> None:
    one = conversation(call(0, 1, 2), hash_id_scope="global")
    assert [[*r.blocks] for r in open_trace(written(tmp_path, one, one))] == [[1, 2], [1, 2]]


@pytest.mark.parametrize("nested", [(0.0, 3.0), (10.0, 13.0)], ids=["relative", "absolute"])
def test_times_of_subagents(tmp_path: Path, nested: tuple[float, ...]) -> None:
    marker = {"t": 10, "type": "subagent", "requests": [call(t, 1, 5) for t in nested]}
    trace = open_trace(written(tmp_path, conversation(call(0, 1), marker, call(11, 1, 2))))
    assert [(r.timestamp, len(r.blocks)) for r in trace] == [
        (0, 1),
        (10_000, 2),
        (11_000, 2),
        (13_000, 2),
    ]


def test_conversations_run_so_many_at_a_time(tmp_path: Path) -> None:
    one = conversation(call(5, 1), call(7, 1, 2))
    folder = written(tmp_path, one, one, one)
    starts = {}
    for at_a_time in (1, 2, 3):
        trace = open_trace(folder, conversations=at_a_time)
        starts[at_a_time] = [r.timestamp for r in trace if len(r.blocks) == 1]
    assert starts == {1: [0, 2000, 4000], 2: [0, 0, 2000], 3: [0, 0, 0]}


def test_more_at_a_time_than_there_are_takes_no_time(tmp_path: Path) -> None:
    folder = written(tmp_path, *[conversation(call(5, 1))] * 3)
    assert [r.timestamp for r in open_trace(folder, conversations=10**15)] == [0, 0, 0]


def test_a_conversation_a_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f"{json.dumps(conversation(call(0, 1)))}\n" for _ in range(3)))
    assert len(list(open_trace(path))) == 3


def nest(depth: int) -> dict[str, Any]:
    one = call(0, 1)
    for _ in range(depth):
        one = {"t": 0, "type": "subagent", "requests": [one]}
    return conversation(one)


BAD = {
    "no requests": (conversation(requests=None), "requests must be a list, not None"),
    "other size": (conversation(block_size=32), "its block_size is 32, but 64 in the first"),
    "no object": (conversation(requests=[5]), r"requests\[0\] must be an object, not 5"),
    "negative": (conversation(call(0, 1), call(-1, 2)), r"requests\[1\]: t must be a number"),
    "id": (conversation(call(0, 2**40)), r"requests\[0\]: hash_ids must be under 2\*\*40"),
    "deep": (nest(20), "subagents are nested deeper than 16"),
    "scope": (conversation(hash_id_scope=3), "its hash_id_scope must be local or global, not 3"),
}


@pytest.mark.parametrize(("bad", "why"), BAD.values(), ids=BAD)
def test_a_bad_conversation_is_named(tmp_path: Path, bad: dict[str, Any], why: str) -> None:
    good = conversation(call(0, 1))
    folder = written(tmp_path, good, bad, good)
    with pytest.raises(TraceError, match=f"trace_1.json:1: .*{why}"):
        list(open_trace(folder))


def test_a_last_conversation_that_was_cut_off_is_said(tmp_path: Path) -> None:
    """As a line of any other trace."""
    path, line = tmp_path / "a.jsonl", json.dumps(conversation(call(0, 1)))
    path.write_text(f"{line}\n{line[:-9]}")
    trace = open_trace(path)
    assert len(list(trace)) == 1
    assert trace.summary.skipped == {"last lines that were cut off": 1}


def test_requests_without_ids_are_counted(tmp_path: Path) -> None:
    without = {"t": 1, "type": "n", "in": 5, "out": 1}
    trace = open_trace(written(tmp_path, conversation(call(0, 1), without)))
    assert len(list(trace)) == 1
    assert trace.summary.skipped == {"requests without hash_ids": 1}
    assert trace.summary.notes == ["arequests[1]"]
