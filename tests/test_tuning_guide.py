"""docs/tuning.md shows commands that run, with the output that they have."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.shown import PAGES, commands, executed, without_times


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_outputs_are_those_of_the_commands(tmp_path: Path, page: Path) -> None:
    """If this fails since an output is another now: python -m docs.shown"""
    text = page.read_text()
    assert without_times(executed(text, tmp_path)) == without_times(text)


def test_what_is_looked_for_is_found(tmp_path: Path) -> None:
    page = "```yaml\n# a.yaml\nb: 1\n```\n```yaml\nc: 1\n```\n```console\n$ cat a.yaml\nold\n```\n"
    assert executed(page, tmp_path) == page.replace("old", "# a.yaml\nb: 1")
    assert [file.name for file in tmp_path.iterdir()] == ["a.yaml"]
    assert commands("$ one \\\n  more\nout\n$ two\n") == ["one \\\n  more", "two"]
    with pytest.raises(RuntimeError, match="status 3"):
        executed("```console\n$ exit 3\n```\n", tmp_path)


def test_only_milliseconds_may_differ() -> None:
    told = "    cpu: 40 tokens, it loaded; {} ms (queue {}, load 0)\n    ms: lookup {}, load 6.4\n"
    assert without_times(told.format(6.3, 1.7, 0.7)) == without_times(told.format(9, 11.2, 31.0))
    other = told.replace("40 tokens", "44 tokens").format(6.3, 1.7, 0.7)
    assert without_times(other) != without_times(told.format(6.3, 1.7, 0.7))
