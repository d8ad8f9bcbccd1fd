"""What tests of wrappers leave open is closed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tiers.wrappers import opening
from tiers.wrappers.reopening import Reopening


@pytest.fixture(autouse=True)
def closes_stores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close the stores that a test has opened: a thread watches each."""
    stores: list[Reopening] = []

    def make(*args: Any) -> Reopening:
        stores.append(Reopening(*args))
        return stores[-1]

    monkeypatch.setattr(opening, "Reopening", make)
    yield
    for store in stores:
        store.close()
