"""The engine's own resets of its prefix cache, of which it tells no connector."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)


def before_resets(cache: Any, tell: Callable[[], object]) -> None:
    """Call `tell` before each reset of the engine's prefix cache, whether that succeeds or not.

    Training loops change weights in place and reset that cache alone, which by default does not
    reach connectors. `cache`: what the engine hands to connectors, its cache manager or, in vLLM
    before 0.30, its block pool; or its scheduler.
    """
    reset = getattr(cache, "reset_prefix_cache", None)
    if reset is None:
        logger.warning(
            "this vLLM does not show when it resets its prefix cache: after a change of weights, "
            "reset with reset_connector=True"
        )
        return

    def reset_prefix_cache(*args: Any, **kwargs: Any) -> Any:
        tell()
        return reset(*args, **kwargs)

    cache.reset_prefix_cache = reset_prefix_cache
