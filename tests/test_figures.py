"""The figures of the house are those of the code."""

from __future__ import annotations

import ast

from tests import figures


def test_what_a_prompt_runs_through_is_seen() -> None:
    looked, stored, loaded, route = figures.walk("longest")
    assert {"tiers/disk/index/fingerprint_index.py"} < {file for file, _ in looked}
    assert looked < loaded and len(looked) > 50 and len(route) > 5
    only = {name for _, name in loaded - stored}, {name for _, name in stored - loaded}
    assert "DiskStore.get" in only[0] and "DiskStore.put" in only[1], "on the threads of stores too"


def test_the_house_grows_no_larger_by_the_way() -> None:
    name = "lines of tiers and spec"
    assert figures.sizes()[name] <= figures.CEILINGS[name]


def test_a_circle_is_one_of_any_length() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}}
    assert figures.on_circles(graph) == {"a", "b", "c"}


def test_only_code_counts() -> None:
    text = '"""What."""\n\n# why\ndef f():\n    """Give."""\n    return 1\n'
    assert figures._code_lines(ast.parse(text), text) == 2
