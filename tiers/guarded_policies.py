"""The guard around a plugin's policies: the first fault ends the policy, and the default goes on.

They run on the engine's scheduler thread, so nothing can be done about one that hangs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from spec.errors import describe_error
from spec.policies import AdmissionPolicy, EvictionPolicy
from tiers.errors import TierError, ends_process

P = TypeVar("P", EvictionPolicy, AdmissionPolicy)
T = TypeVar("T")

MOST_QUEUES = 64

logger = logging.getLogger(__name__)


class _Asked(Generic[P]):
    """A policy until its first fault, then the default. `name` is for the log. `warning`: what has
    become of it, for the operator; empty: nothing."""

    def __init__(self, make: Callable[[], P], default: P, name: str) -> None:
        self.policy: P | None = None
        self.default: P = default
        self._name = name
        self.warning = ""
        self.policy = self.ask(lambda _: make(), None)

    def ask(self, call: Callable[[P], T], otherwise: T) -> T:
        """What the policy answers; `otherwise` if it fails."""
        try:
            return call(self.default if self.policy is None else self.policy)
        # The one place for policies: nothing else may reach the engine, as a panic of Rust.
        except BaseException as error:
            if ends_process(error):
                raise
            self.policy = None
            instead = type(self.default).__name__
            self.warning = (
                f"{self._name} has failed, and {instead} decides instead: {describe_error(error)}"
            )
            logger.error("%s", self.warning, exc_info=error)
            return otherwise


class GuardedEviction(EvictionPolicy):
    """A plugin's policy. After its first fault all blocks enter queue 1, and what the other queues
    still hold is evicted first, unless it is used."""

    def __init__(
        self, policy: type[EvictionPolicy], capacity: int, default: EvictionPolicy, name: str
    ) -> None:
        self.asked = _Asked(lambda: with_queues(policy(capacity)), default, name)
        self.queues = 1 if self.asked.policy is None else self.asked.policy.queues  # type: ignore[misc]

    def resize(self, capacity: int) -> None:
        self.asked.ask(lambda policy: policy.resize(capacity), None)

    def enter(self, key: bytes) -> int:
        return self._queue(lambda policy: policy.enter(key))

    def used(self, queue: int) -> int:
        return self._queue(lambda policy: policy.used(queue))

    def next(self, lengths: Sequence[int]) -> int:
        last = max(queue for queue, length in enumerate(lengths, 1) if length)
        if self.asked.policy is None:
            return last
        return self.asked.ask(lambda policy: queue_of(lengths, policy.next(lengths)), last)

    def evicted(self, key: bytes, queue: int) -> None:
        self.asked.ask(lambda policy: policy.evicted(key, queue), None)

    def _queue(self, choose: Callable[[EvictionPolicy], int]) -> int:
        return self.asked.ask(lambda policy: within(self.queues, choose(policy)), 1)


class GuardedAdmission(AdmissionPolicy):
    """A plugin's policy. After its first fault the default decides."""

    def __init__(
        self, policy: type[AdmissionPolicy], default: AdmissionPolicy, threshold: int, name: str
    ) -> None:
        self.asked = _Asked(lambda: policy(threshold), default, name)
        super().__init__(threshold)

    @property
    def threshold(self) -> int:
        return self.asked.default.threshold

    @threshold.setter
    def threshold(self, threshold: int) -> None:
        self.asked.default.threshold = threshold
        self.asked.ask(lambda policy: setattr(policy, "threshold", threshold), None)

    def admits(self, key: bytes) -> bool:
        return self.asked.ask(lambda policy: _is_bool(policy.admits(key)), True)

    def stored(self, key: bytes) -> None:
        self.asked.ask(lambda policy: policy.stored(key), None)


def with_queues(policy: EvictionPolicy) -> EvictionPolicy:
    if type(policy.queues) is not int or not 1 <= policy.queues <= MOST_QUEUES:
        raise TierError(f"queues is {policy.queues!r:.100}; write 1 to {MOST_QUEUES}")
    return policy


def within(queues: int, answer: object) -> int:
    if not isinstance(answer, int) or isinstance(answer, bool) or not 1 <= answer <= queues:
        raise TierError(f"it answered {answer!r:.100}, and its queues are 1 to {queues}")
    return answer


def queue_of(lengths: Sequence[int], answer: object) -> int:
    queue = within(len(lengths), answer)
    if not lengths[queue - 1]:
        raise TierError(f"next answered {queue}, an empty queue")
    return queue


def _is_bool(answer: object) -> bool:
    if not isinstance(answer, bool):
        raise TierError(f"admits answered {answer!r:.100}, not True or False")
    return answer
