"""How a chain's explanations are opened: what is kept, and who may ask."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from spec.explain import ExplainSpec
from tiers.explain.accounts import Accounts
from tiers.explain.explanations import Explanations
from tiers.explain.questions import answers
from tiers.explain.server import ExplainServer, FolderRefused
from tiers.explain.spans import Spans, engine_tracer

logger = logging.getLogger(__name__)


def open_explanations(
    spec: ExplainSpec | None, names: Sequence[str], block_tokens: int
) -> Explanations | None:
    """What tells why requests of a chain of these tiers are served as they are; None: nothing does.

    A folder that can't be used is one line in the log: the engine serves without.
    """
    if spec is None:
        return None
    tracer = engine_tracer()
    spans = None if tracer is None else Spans(tracer, Accounts(names, block_tokens), block_tokens)
    tell = None if spans is None else spans.ended
    explanations = Explanations(names, block_tokens, spec.requests, spec.memory, tell)
    if spans is not None:
        explanations.on_close(spans.close)
    try:
        server = ExplainServer(spec.folder, answers(explanations))
    except (FolderRefused, OSError) as error:
        logger.warning("`kvtiers explain` finds nothing: no socket in explain.folder: %s", error)
        return explanations if spans is not None else None
    logger.info("`kvtiers explain --folder %s` tells why requests are served so", spec.folder)
    explanations.on_close(server.close)
    return explanations
