"""A plugin of pytest, `-p bench.device_cases`: only tests that need a CUDA device.

The others run on any machine, most of them for long, with the model of streams; `make test` has
them.
"""

from __future__ import annotations

import pytest

REASON = "needs a CUDA device"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the others."""
    others = [item for item in items if not needs_device(item)]
    items[:] = [item for item in items if needs_device(item)]
    config.hook.pytest_deselected(items=others)


def needs_device(item: pytest.Item) -> bool:
    """Whether it would be skipped where there is no device."""
    return any(mark.kwargs.get("reason") == REASON for mark in item.iter_markers("skipif"))
