"""Qwen-Bailian's format: ids of single blocks become ids of prefixes."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tiers.traces.open_trace import chained, open_trace


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    line = {
        "chat_id": 159,
        "parent_chat_id": -1,
        "timestamp": 61.114,
        "input_length": 40,
        "output_length": 132,
        "type": "text",
        "turn": 1,
        "hash_ids": [7, 7, 9],
    }
    later = line | {"timestamp": 62.0, "input_length": 48, "parent_chat_id": 159, "turn": 2}
    path.write_text(f"{json.dumps(line)}\n{json.dumps(later)}\n")
    trace = open_trace(path)
    first, second = trace
    assert (trace.header.block_tokens, trace.header.format) == (16, "Qwen-Bailian")
    assert len(first.blocks) == 2
    assert len(set(second.blocks)) == 3, "the same content after another prefix is another block"
    assert list(first.blocks) == list(second.blocks)[:2]
    assert round(second.timestamp) == 886
    assert trace.summary.skipped == {}


PROMPTS = st.lists(st.lists(st.integers(0, 5), max_size=8), max_size=50)


@given(PROMPTS)
def test_ids_are_equal_where_prefixes_are(prompts: list[list[int]]) -> None:
    of_prefix: dict[tuple[int, ...], int] = {}
    for prompt in prompts:
        for depth, link in enumerate(chained(prompt), 1):
            assert of_prefix.setdefault(tuple(prompt[:depth]), link) == link
    assert len(set(of_prefix.values())) == len(of_prefix)


def test_many_prefixes_of_few_ids_do_not_meet() -> None:
    # Sequential ids are the least mixed ones: 16 to the power of 4 prefixes and all shorter ones.
    links: set[int] = set()
    for first in range(16):
        for rest in range(16**3):
            links.update(chained([first, rest >> 8, rest >> 4 & 15, rest & 15]))
    assert len(links) == 16 + 16**2 + 16**3 + 16**4


def test_ids_are_the_same_in_every_process() -> None:
    assert list(chained([1, 2**63])) == [12649090065610618527, 8267529445695686123]
