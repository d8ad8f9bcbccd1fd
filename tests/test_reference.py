"""The generated pages of docs/ say what the code says."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from docs.reference import PAGES
from spec.schema import chain_schema


@pytest.mark.parametrize(("page", "make"), PAGES.items(), ids=lambda one: getattr(one, "stem", ""))
def test_a_page_is_as_it_is_generated(page: Path, make: Callable[[], str]) -> None:
    assert page.read_text() == make(), "run python -m docs.reference"


def test_every_part_that_the_schema_refers_to_is_there() -> None:
    schema = chain_schema()
    names = set(re.findall(r'"#/\$defs/([^"]+)"', json.dumps(schema)))
    assert names and names <= set(schema["$defs"])
