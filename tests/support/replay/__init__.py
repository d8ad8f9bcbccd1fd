"""The replay engine, as tests need it.

Its requests may be more than its blocks, so that they are preempted; they may be aborted, and a
step may compute the token that the one before samples. Its models may have windows, states of
recurrent layers, and ranks.
"""

from tests.support.replay.engine import ReplayEngine
from tests.support.replay.model import ReplayModel, answer
from tests.support.replay.scheduler import ReplayRequest

__all__ = ["ReplayEngine", "ReplayModel", "ReplayRequest", "answer"]
