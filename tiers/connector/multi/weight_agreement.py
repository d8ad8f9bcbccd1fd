"""WeightAgreement: what all ranks together saw of the weights, look by look."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from tiers.contract.generation import Generation
from tiers.contract.messages import OffloadingConnectorMetadata
from tiers.contract.weight_reports import Seen, WeightOrders, WeightReport


class WeightAgreement:
    """Numbers the looks of steps that store, and tells each rank what all of them saw.

    What a rank stores may be found by others only when every rank saw its weights unchanged: a
    stage of a pipeline computes with what the stage before has made of new weights. One rank alone
    needs nobody's word. Used by the scheduler's thread alone.
    """

    def __init__(self, ranks: int, generation: Generation) -> None:
        self._ranks = ranks
        self._generation = generation
        self._numbers = itertools.count()
        self._seen: dict[int, Seen] = {}
        self._verdicts: dict[int, bool] = {}

    def orders(self, metadata: Sequence[Any]) -> WeightOrders:
        """What a step with these orders of the tiers says of looks."""
        if self._ranks == 1:
            return WeightOrders()
        tiers = [one for one in metadata if isinstance(one, OffloadingConnectorMetadata)]
        number = None
        if any(tier.reqs_to_store for tier in tiers):
            number = next(self._numbers)
            self._seen[number] = Seen(0, alike=True)
        verdicts, self._verdicts = self._verdicts, {}
        return WeightOrders(number, verdicts)

    def heard(self, report: WeightReport | None) -> bool:
        """Take in what ranks saw; whether the weights of the current generation are others now."""
        if report is None:
            return False
        for number, seen in report.seen.items():
            if number not in self._seen:
                continue  # it is decided
            whole = self._seen[number] = seen.fold(self._seen[number])
            if not whole.alike or whole.ranks == self._ranks:
                del self._seen[number]
                self._verdicts[number] = whole.alike
        return report.over is not None and report.over == self._generation.tag

    @property
    def waits(self) -> bool:
        """Whether ranks wait for what only a step can tell them."""
        return bool(self._seen or self._verdicts)
