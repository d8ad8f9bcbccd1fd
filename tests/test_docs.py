"""What docs/ says of tests is so: each one that a page names is there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from spec import chain
from spec.load import load_chain
from tests.test_readme import blocks
from tiers import block
from tiers.connector.policy import request_params
from tiers.disk.index import index
from tiers.remote.packs import pack
from tiers.traces import recorded

ROOT = Path(__file__).parent.parent
SECRET = ROOT / "LICENSE"
"""A file that stands for one with a password."""
PAGES = sorted((ROOT / "docs").rglob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tests_that_a_page_names_exist(page: Path) -> None:
    for file, test in re.findall(r"`([\w/]+\.py)::(\w+)`", page.read_text()):
        assert f"def {test}(" in (ROOT / "tests" / file).read_text(), f"{file}::{test}"


FILES = {
    file.name
    for part in ("spec", "tiers", "tests", "bench", "docs")
    for file in (ROOT / part).rglob("*.py")
}
ELSEWHERE = {"test_multi_connector.py"}
"""A file of vLLM's."""


def missing_files(page: str) -> list[str]:
    """The paths and names of Python files in a page's code marks that lead nowhere."""
    named = re.findall(r"`((?:spec|tiers|tests|bench)/[\w./-]*|[\w./-]+\.py)[`:]", page)
    bases = (ROOT, ROOT / "tests")
    return [
        name
        for name in named
        if not any((base / name).exists() for base in bases)
        and not ("/" not in name and name in FILES | ELSEWHERE)
    ]


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.stem)
def test_files_that_a_page_names_exist(page: Path) -> None:
    assert missing_files(page.read_text()) == []


def test_a_file_that_is_gone_is_found() -> None:
    gone = ["tiers/guard.py", "tiers/attic/", "gone.py"]
    page = "`tiers/store.py`, `tiers/guard.py`, `tiers/attic/`, `guard.py` and `gone.py`"
    assert missing_files(page) == gone


def test_every_claim_of_the_threat_model_names_its_test() -> None:
    """But for what an attacker can do."""
    page = (ROOT / "docs" / "security.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ") and "|---" not in line]
    denied = re.compile(r"\| (can't|nor|a reader finds no|a writer can't)")
    claims = [row for row in rows if denied.match(row)]
    assert len(claims) >= 20
    assert [row for row in claims if "::" not in row] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_json_that_a_page_shows_is_json(page: Path) -> None:
    for shown in blocks(page.read_text()):
        if shown.language == "json":
            json.loads(shown.text)


CHAIN = {
    "version": 1,
    "tiers": [
        {"type": "cpu", "capacity": "1GiB"},
        {"type": "disk", "capacity": "9GiB", "path": "/kv"},
    ],
}
"""What keys of a chain that a page shows are tried in."""


def chain_of(shown: str) -> dict[str, Any] | None:
    """The chain that some YAML is a part of, if it is: keys of the chain, or tiers of it."""
    found = yaml.safe_load(shown)
    if isinstance(found, list):
        return {**CHAIN, "tiers": found}
    known = {*chain.ChainSpec.model_fields, "version"}
    return {**CHAIN, **found} if known >= found.keys() else None


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.name in ("operations.md", "events.md", "hints.md")],
    ids=lambda page: page.stem,
)
def test_yaml_that_a_page_shows_is_of_a_chain(page: Path, tmp_path: Path) -> None:
    shown = [one for one in blocks(page.read_text()) if one.language == "yaml"]
    assert shown
    for one in shown:
        parts = chain_of(one.text)
        assert parts is not None, f"line {one.line}"
        load_chain(yaml.safe_load(json.dumps(parts).replace("/run/secrets/redis", str(SECRET))))


DECISIONS = sorted((ROOT / "docs" / "decisions").iterdir())


def problems_of_decision(page: str) -> list[str]:
    """What a page of docs/decisions lacks: its title, its status, or brevity."""
    title, _, rest = page.partition("\n\n")
    status, _, body = rest.partition("\n\n")
    day = r"\d{4}-\d\d-\d\d"
    rules = {
        "# N. The decision in one line": re.fullmatch(r"# \d+\. .+", title),
        "Status: in force. Date: 2026-01-31, changed 2026-02-28. Replaces: nothing.": re.fullmatch(
            rf"Status: .+\. Date: {day}(, changed {day})?\. Replaces: .+\.", status
        ),
        "at most 250 words below these": len(body.split()) <= 250,
    }
    return [rule for rule, kept in rules.items() if not kept]


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.stem)
def test_a_decision_says_itself_its_status_and_little_more(page: Path) -> None:
    assert problems_of_decision(page.read_text()) == []


def test_a_decision_that_is_long_or_has_no_status_is_found() -> None:
    assert len(problems_of_decision("# Riddle\n\nOnce upon a time.\n\n" + "word " * 251)) == 3


def test_decisions_are_few() -> None:
    """Change the page that decides the same question; git keeps what it said before."""
    assert len(DECISIONS) <= 26


WORDS = {"benchmarks.md": 1500, "faults.md": 1850, "route.md": 1600, "operations.md": 2000}


@pytest.mark.parametrize(("page", "words"), WORDS.items(), ids=WORDS)
def test_a_page_stays_as_short_as_it_was_made(page: str, words: int) -> None:
    assert len((ROOT / "docs" / page).read_text().split()) <= words


def test_the_upgrade_page_has_the_formats_of_this_version() -> None:
    page = (ROOT / "docs" / "upgrade.md").read_text()
    formats = {
        "chain YAML": f"`version: {chain.FORMAT_VERSION}`",
        "records, on all tiers": str(block.FORMAT_VERSION),
        "KV, of which an earlier one may be wrong": str(block.KV_REVISION),
        "packs of the object and shared tiers": str(pack.PACK_VERSION),
        "index of the disk tier": str(index.INDEX_FORMAT),
        "recordings": f"`{recorded.FORMAT}` {recorded.VERSION}",
        "hints": f'`"{request_params.VERSION}"`',
    }
    for what, version in formats.items():
        assert f"| {what} | {version} |" in page


def test_the_changelog_is_one_text_for_users() -> None:
    """After a merge it may fail: git keeps both sides. Leave the new text and your lines."""
    page = (ROOT / "CHANGELOG.md").read_text()
    headings = re.findall(r"^#+ .*$", page, re.M)
    assert len(headings) == len(set(headings)) and len(page.split()) <= 1900


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 125


@pytest.mark.parametrize(
    "page",
    [*PAGES, *(ROOT / name for name in ("README.md", "CHANGELOG.md", "deploy/README.md"))],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / link).exists(), link
