"""Are the weights those that a generation's keys stand for? Each loading or storing step looks.

| a generation is | what happens | what follows |
|---|---|---|
| begun | its first step comes: what all parts show before is what it stands for | unchanged |
| unchanged | each step that loads or stores looks at the next part | unchanged or over |
| over | a look differed: nothing of it is loaded or stored | the scheduler begins the next |

It is over as well once the memory of the paged KV was taken away without a reset of the engine.
The first generation, which has no tag, stands for the weights that were there at the start.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from concurrent.futures import Future

from tiers.contract.marks import NO_ADAPTERS, LoadedAdapters
from tiers.contract.weight_reports import Look, Seen, Watch, WeightOrders, WeightReport, Weights

logger = logging.getLogger(__name__)

MOST_OVER = 4096


class WeightVerdict:
    """Whether the jobs of a step are of their generation's weights, by a look at those.

    Any thread may ask. `is_shared`: other ranks have looked, too, and the scheduler decides by what
    all of them saw.
    """

    def __init__(self, generation: _Generation, look: Look, part: int, is_shared: bool) -> None:
        self._generation, self.look, self._part = generation, look, part
        self.here: Future[bool] = Future()
        self.everywhere: Future[bool] = Future() if is_shared else self.here
        self._is_shared = is_shared

    def unchanged(self) -> bool:
        """Whether this rank's weights are the generation's; waits for the device."""
        self._generation.judge(self)
        return self.here.result()

    def unchanged_everywhere(self) -> bool:
        """Whether those of all ranks are: one whose own are as they were may compute with what
        others made of new ones. Waits for the scheduler, which says so in a later step."""
        return self.unchanged() and self.everywhere.result()

    def waits_for_others(self) -> bool:
        """Whether `unchanged_everywhere` would wait for the scheduler."""
        return self._is_shared and not self.everywhere.done()

    def judge(self) -> bool:
        """Compare what is seen with what the generation stands for."""
        generation = self._generation
        try:
            shown = generation.shown[self._part]
            unchanged = not generation.is_over and self.look.seen() == shown.seen()
        except RuntimeError:  # a device that failed shows nothing
            unchanged = False
        generation.is_over |= not unchanged
        self.here.set_result(unchanged)
        return unchanged


class _Generation:
    """The `looks` of one generation that are not judged yet. `tag`: the end of its keys. `shown`:
    what the weights that it stands for show, of each part."""

    def __init__(self, tag: bytes, weights: Weights) -> None:
        self.tag = tag
        self.is_over = False
        self.shown = [weights.look(part) for part in range(weights.parts)]
        self.looks: deque[WeightVerdict] = deque()
        # Looks are judged in order: else one after the weights have been changed back could be
        # believed before the one that differed is judged.
        self._judging = threading.Lock()

    def judge(self, upto: WeightVerdict) -> None:
        """Judge the looks up to this one; waits for the device."""
        with self._judging:
            while not upto.here.done():
                self.looks.popleft().judge()

    def judge_ready(self) -> None:
        """Judge those that need no waiting, unless a tier's thread is about to."""
        if self._judging.acquire(blocking=False):
            try:
                while self.looks and self.looks[0].look.ready():
                    self.looks.popleft().judge()
            finally:
                self._judging.release()


class WeightWatch(Watch):
    """Looks at a worker's weights in each step that loads or stores; one look serves all tiers.
    Reports also what the worker has loaded as `adapters`.

    The engine's thread calls it, and tiers' threads ask its verdicts.
    """

    def __init__(
        self, weights: Weights, ranks: int, adapters: LoadedAdapters = NO_ADAPTERS, rank: int = 0
    ) -> None:
        self.adapters = adapters
        self._rank = rank
        self._weights = weights
        self._is_shared = ranks > 1
        self._step, self._is_computed = -1, True
        self._is_kv_gone = False
        self._missed: dict[int, int] = {}
        self._generation: _Generation | None = None
        self._over: dict[bytes, None] = {}
        """The last of those that are over, in their order; orders of longer ago have ended."""
        self._reported: bytes | None = None
        self._part = 0
        self._number: int | None = None
        self._looks: dict[tuple[bytes, bool], WeightVerdict] = {}
        self._unreported: dict[int, WeightVerdict | None] = {}
        self._awaited: dict[int, WeightVerdict] = {}

    def begin(self) -> None:
        """Begin the first generation, of the weights as they were loaded."""
        if self._generation is None:
            self._generation = _Generation(b"", self._weights)

    def bind(self, orders: WeightOrders) -> None:
        self._number = orders.number
        self._looks.clear()
        self._is_kv_gone &= not orders.is_first
        self._follow(orders)
        if orders.tag is not None:
            self._of(orders.tag)
        if self._is_shared and orders.number is not None:
            self._unreported[orders.number] = None
        for number, unchanged in orders.verdicts.items():
            verdict = self._awaited.pop(number, None)
            if verdict is not None:
                verdict.everywhere.set_result(unchanged)

    def _follow(self, orders: WeightOrders) -> None:
        """Store nothing again once a step has failed, or was left out. Those behind it, which may
        have been queued before, compute with KV that it never made."""
        if orders.step is None:
            return
        missed = range(self._step + 1, orders.step)
        self._missed |= dict.fromkeys(missed, 1)
        if missed and self._is_shared:
            # Others wait for what was seen in these, and here nobody hears what they brought.
            self._unreported |= dict.fromkeys(missed)
            self.close()
        if (missed or not self._is_computed) and not self.stopped:
            self.stopped = "a step of the engine failed: start it again"
            logger.error(
                "a step of this engine failed: kvtiers stores nothing from now on, since what "
                "later steps compute may rest on it. Start the engine again"
            )
        self._step, self._is_computed = orders.step, orders.tag is None

    def computed(self) -> None:
        self._is_computed = True

    def kv_gone(self) -> None:
        self._is_kv_gone = True

    @property
    def may_store(self) -> bool:
        return self._is_computed and not self.stopped

    def loads(self, tag: bytes) -> WeightVerdict:
        """Look before blocks of a generation are loaded."""
        return self._look(tag, stores=False)

    def stores(self, tag: bytes) -> WeightVerdict:
        """Look when a step is computed that stores blocks of a generation."""
        return self._look(tag, stores=True)

    def _look(self, tag: bytes, stores: bool) -> WeightVerdict:
        verdict = self._looks.get((tag, stores))
        if verdict is None:
            generation = self._of(tag)
            self._part = (self._part + 1) % self._weights.parts
            is_shared = stores and self._is_shared
            look = self._weights.look(self._part)
            verdict = WeightVerdict(generation, look, self._part, is_shared)
            generation.looks.append(verdict)
            self._looks[tag, stores] = verdict
            if is_shared and self._number is not None:
                self._unreported[self._number] = self._awaited[self._number] = verdict
        return verdict

    def _of(self, tag: bytes) -> _Generation:
        """The generation of a job's keys, which may be the next one."""
        now = self._generation
        if now is not None and now.tag == tag:
            now.is_over |= self._is_kv_gone
            return now
        made = _Generation(tag, self._weights)
        if tag in self._over:
            made.is_over = True  # an order from before a reset: what it stood for is gone
            return made
        if now is not None:
            self._over[now.tag] = None
            if len(self._over) > MOST_OVER:
                del self._over[next(iter(self._over))]
        self._generation, self._is_kv_gone = made, False
        return made

    def report(self) -> WeightReport | None:
        generation, over = self._generation, None
        if generation is not None:
            generation.judge_ready()
            if generation.is_over and self._reported != generation.tag:
                over = self._reported = generation.tag
        seen: dict[int, Seen] = {}
        for number, verdict in [*self._unreported.items()]:
            if verdict is None and number != self._number:
                seen[number] = Seen(1, unchanged=False)  # its step has looked at nothing
            elif verdict is not None and verdict.here.done():
                seen[number] = Seen(1, verdict.here.result())
        for number in seen:
            del self._unreported[number]
        loaded = self.adapters.report()
        missed, self._missed = self._missed, {}
        if over is None and not seen and not loaded and not missed:
            return None
        return WeightReport(over, seen, {self._rank: loaded} if loaded else {}, missed)

    def close(self) -> None:
        """Release those who wait for the scheduler, which decides nothing any more."""
        for verdict in self._awaited.values():
            verdict.everywhere.set_result(False)
        self._awaited.clear()
