"""What docs/connectors.md tells to write, for tests that run it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[3] / "docs" / "connectors.md"


def recipe(title: str, number: int = 0, **places: Any) -> dict[str, Any]:
    """The KV transfer config that a part of the page shows; the first, or another by its number.

    `places`: what stands in a test for what an operator has: values of keys, wherever they are.
    Raises AssertionError where the page has no such key.
    """
    (part,) = re.findall(rf"^## {title}.*?\n(.*?)(?:^## |\Z)", PAGE.read_text(), re.M | re.S)
    shown = json.loads(re.findall(r"^```json\n(.*?)^```", part, re.M | re.S)[number])
    left = set(places)

    def placed(value: Any) -> Any:
        if isinstance(value, list):
            return [placed(one) for one in value]
        if not isinstance(value, dict):
            return value
        left.difference_update(value)
        return {key: places[key] if key in places else placed(one) for key, one in value.items()}

    config: dict[str, Any] = placed(shown)
    assert not left, f"{title} has no {left}"
    return config
