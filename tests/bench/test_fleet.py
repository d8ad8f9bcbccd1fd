"""The bench of a fleet: what it counts is right, and it runs over a tier of each kind."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench import fleet
from bench.fleet import MODEL, infinite, main, prompts
from tests.support.process_worker import fresh


def test_an_infinite_cache_has_what_came_before() -> None:
    size = MODEL.block_tokens
    one, other = list(range(3 * size)), [*range(2 * size), *range(900, 900 + size)]
    assert infinite([one, other, one]) == (2 * size + 3 * size, 4)


def test_conversations_grow_and_share_their_beginning() -> None:
    asked = prompts(conversations=9, turns=2)
    assert len(asked) == 18
    assert len({tuple(prompt[:128]) for prompt in asked}) == 8
    hits, _ = infinite(asked)
    assert 0 < hits < sum(map(len, asked))


def test_two_engines_share_a_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster when none is named, or the one that is."""
    monkeypatch.setattr(fleet, "multiprocessing", SimpleNamespace(get_context=lambda _: fresh()))
    few = ["--conversations", "3", "--turns", "2", "--rate", "50", "--json", str(tmp_path / "j")]
    bucket = f"{{type: object, url: 'file://{tmp_path}'}}"
    for tier, name in (([], "cluster"), (["--tier", bucket], "object")):
        main([*tier, "--engines", "2", *few])
        (row,) = json.loads((tmp_path / "j").read_text())
        assert (row["tier"], row["engines"], row["requests"]) == (name, 2, 6)
        assert 0 < row["hits"] <= row["infinite"]
        assert row["stored"] >= 1 and row["announced"] >= 1
