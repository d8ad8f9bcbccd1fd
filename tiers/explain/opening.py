"""How a chain's explanations are opened: what is kept, and who may ask."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from spec.explain import ExplainSpec
from tiers.explain.explanations import Explanations
from tiers.explain.questions import answers
from tiers.explain.server import ExplainServer, FolderRefused

logger = logging.getLogger(__name__)


def open_explanations(
    spec: ExplainSpec | None, names: Sequence[str], block_tokens: int
) -> Explanations | None:
    """What tells why requests of a chain of these tiers are served as they are; None: nothing does.

    A folder that can't be used is one line in the log: the engine serves without.
    """
    if spec is None:
        return None
    explanations = Explanations(names, block_tokens, spec.requests, spec.memory)
    try:
        server = ExplainServer(spec.folder, answers(explanations))
    except (FolderRefused, OSError) as error:
        logger.warning("requests are not explained: no socket in explain.folder: %s", error)
        return None
    logger.info("`kvtiers explain --folder %s` tells why requests are served so", spec.folder)
    explanations.on_close(server.close)
    return explanations
