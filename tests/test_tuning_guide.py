"""docs/tuning.md shows commands that run, with the output that they have."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.shown import PAGES, commands, executed, without_speeds


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_outputs_are_those_of_the_commands(tmp_path: Path, page: Path) -> None:
    """If this fails since an output is another now: python -m docs.shown"""
    text = page.read_text()
    assert without_speeds(executed(text, tmp_path)) == without_speeds(text)


def test_what_is_looked_for_is_found(tmp_path: Path) -> None:
    page = "```yaml\n# a.yaml\nb: 1\n```\n```yaml\nc: 1\n```\n```console\n$ cat a.yaml\nold\n```\n"
    assert executed(page, tmp_path) == page.replace("old", "# a.yaml\nb: 1")
    assert [file.name for file in tmp_path.iterdir()] == ["a.yaml"]
    assert commands("$ one \\\n  more\nout\n$ two\n") == ["one \\\n  more", "two"]
    with pytest.raises(RuntimeError, match="status 3"):
        executed("```console\n$ exit 3\n```\n", tmp_path)


def test_only_what_hangs_on_speed_may_differ() -> None:
    told = (
        "2 requests were served, {} from cpu, {} from disk\n"
        "  40 tokens = {} cpu + {} disk + 8 computed\n"
        "    cpu: {} tokens, it loaded the blocks; {} ms (queue {}, load 0)\n"
        "    ms: lookup {}, load 6.4\n"
    )
    one = told.format("1,500", 500, 20, 12, 20, 6.3, 1.7, 0.7)
    assert without_speeds(one) == without_speeds(told.format(480, "1,520", 4, 28, 4, 9, 11.2, 31.0))
    alone = one.replace("20 cpu + 12 disk", "32 disk").replace("20 tokens", "0 tokens")
    alone = re.sub("it loaded the blocks.*", "another tier serves these blocks", alone)
    assert without_speeds(alone) == without_speeds(one)
    for other in (one.replace("500 from", "501 from"), one.replace("12 disk", "16 disk")):
        assert without_speeds(other) != without_speeds(one)
    assert without_speeds(one.replace("8 computed", "4 computed")) != without_speeds(one)
