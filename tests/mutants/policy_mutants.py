"""Defects of the policies: eviction, which the cpu tier's are, and admission."""

from __future__ import annotations

from tests.mutants.mutant import Source

LRU = Source("lru", "tiers/cpu/eviction.py")
ARC = Source("arc", "tiers/cpu/eviction.py")
QUEUES = Source("arc", "tiers/host/arc_queues.py")
ADMISSION = Source("admission", "tiers/connector/scheduler/admission.py")

ENTER = "        return 1\n\n    def used(self, queue: int) -> int:\n        return 1\n"
USED = "    def used(self, queue: int) -> int:\n        return AGAIN\n"
TOOK = "        count = self._counts.pop(key, 0) + 1\n"
CLASS = "    queues: ClassVar[int] = 1\n"
MADE = "        self._arc: Arc[bytes] = Arc(capacity)\n"

MUTANTS = (
    LRU.but("answers", "it enters no queue", ENTER, ENTER.replace("return 1", "return 0", 1)),
    LRU.but(
        "answers",
        "it enters a queue that it has not",
        ENTER,
        ENTER.replace("return 1", "return 2", 1),
    ),
    LRU.but(
        "answers",
        "what is used leaves all queues",
        ENTER,
        "        return 1\n\n    def used(self, queue: int) -> int:\n        return queue + 1\n",
    ),
    LRU.but("answers", "it has no queues", CLASS, CLASS.replace("1", "0")),
    LRU.but("answers", "it has too many queues", CLASS, CLASS.replace("= 1", "= 65")),
    LRU.but(
        "answers",
        "it evicts from no queue",
        "    def next(self, lengths: Sequence[int]) -> int:\n        return 1\n",
        "    def next(self, lengths: Sequence[int]) -> int:\n        return 0\n",
    ),
    LRU.but(
        "order",
        "two queues that are filled in turn",
        CLASS,
        "    queues: ClassVar[int] = 2\n    _turn = 0\n",
        ENTER,
        "        self._turn += 1\n        return 1 + self._turn % 2\n\n    def used(self, queue: int) -> int:\n        return queue\n",
    ),
    LRU.but(
        "order",
        "what is used is evicted first",
        CLASS,
        "    queues: ClassVar[int] = 2\n",
        ENTER,
        "        return 2\n\n    def used(self, queue: int) -> int:\n        return 1\n",
        "    def next(self, lengths: Sequence[int]) -> int:\n        return 1\n",
        "    def next(self, lengths: Sequence[int]) -> int:\n        return 1 if lengths[0] else 2\n",
    ),
    LRU.but(
        "memory",
        "every key is kept",
        ENTER,
        "        self.__dict__.setdefault('all', {})[key] = bytes(64)\n" + ENTER,
    ),
    LRU.but(
        "memory",
        "every evicted key is kept",
        CLASS,
        CLASS
        + "\n    def evicted(self, key: bytes, queue: int) -> None:\n        self.__dict__.setdefault('all', {})[key] = bytes(64)\n",
    ),
    ARC.but(
        "answers",
        "its queue of those used again is not its own",
        USED,
        USED.replace("AGAIN", "AGAIN + 1"),
    ),
    ARC.but(
        "answers",
        "it has one queue",
        "    queues: ClassVar[int] = 2\n",
        "    queues: ClassVar[int] = 1\n",
    ),
    ARC.but(
        "answers",
        "it evicts from a queue that is empty",
        "        return self._arc.next(lengths[0], lengths[1])\n",
        "        return ONCE\n",
    ),
    ARC.but(
        "order", "what is used stays among those used once", USED, USED.replace("AGAIN", "ONCE")
    ),
    ARC.but(
        "order",
        "what is used again is used once",
        USED,
        USED.replace("AGAIN", "ONCE if queue == AGAIN else AGAIN"),
    ),
    ARC.but(
        "order",
        "lengths are exchanged",
        "        return self._arc.next(lengths[0], lengths[1])\n",
        "        return 3 - self._arc.next(lengths[1], lengths[0])\n",
    ),
    ARC.but(
        "order",
        "what came back is used once",
        "        return AGAIN if self._arc.enter(key) else ONCE\n",
        "        self._arc.enter(key)\n        return ONCE\n",
    ),
    ARC.but(
        "order",
        "all that is new was used again",
        "        return AGAIN if self._arc.enter(key) else ONCE\n",
        "        self._arc.enter(key)\n        return AGAIN\n",
    ),
    ARC.but(
        "order",
        "evicted blocks are not remembered",
        "        self._arc.evicted(queue, key)\n",
        "        pass\n",
    ),
    ARC.but(
        "order",
        "evicted blocks are those of the other queue",
        "        self._arc.evicted(queue, key)\n",
        "        self._arc.evicted(3 - queue, key)\n",
    ),
    ARC.but(
        "size",
        "another size is not followed",
        "        self._arc.resize(capacity)\n",
        "        pass\n",
    ),
    ARC.but(
        "size",
        "its history is that of another size",
        MADE,
        MADE.replace("Arc(capacity)", "Arc(8 * capacity)"),
    ),
    QUEUES.but(
        "order",
        "those used again go first",
        "        return ONCE if once and (once > self._share or not again) else AGAIN\n",
        "        return AGAIN if again else ONCE\n",
    ),
    QUEUES.but(
        "order",
        "those used once have no share",
        "            self._share = min(self._capacity, self._share + grown)\n",
        "            pass\n",
    ),
    QUEUES.but(
        "order",
        "a share never shrinks",
        "            self._share = max(0.0, self._share - shrunk)\n",
        "            pass\n",
    ),
    QUEUES.but(
        "order",
        "a share has no bound",
        "            self._share = min(self._capacity, self._share + grown)\n",
        "            self._share = self._share + grown\n",
        survives="it learns somewhat later when traffic changes, which no trace of the kit shows",
    ),
    QUEUES.but(
        "answers",
        "an empty queue is evicted from",
        "        return ONCE if once and (once > self._share or not again) else AGAIN\n",
        "        return ONCE if once > self._share else AGAIN\n",
    ),
    QUEUES.but(
        "memory",
        "its history is never shortened",
        "        if self._count >= self._half:\n",
        "        if False:\n",
    ),
    QUEUES.but(
        "memory",
        "its history is a hundred times as long",
        "        self._half = max(1.0, blocks // 2)\n        self._young",
        "        self._half = max(1.0, 100 * blocks)\n        self._young",
    ),
    QUEUES.but(
        "size",
        "a smaller history is as long as before",
        "        self._half = max(1.0, blocks // 2)\n\n    def add",
        "        pass\n\n    def add",
    ),
    QUEUES.but(
        "order",
        "what came back is remembered on",
        "        young, old = self._young.pop(key, 0), self._old.pop(key, 0)\n",
        "        young, old = self._young.get(key, 0), self._old.get(key, 0)\n",
    ),
    ADMISSION.but(
        "answers",
        "it answers a count",
        "        return count >= self.threshold\n",
        "        return max(0, 1 + count - self.threshold)  # type: ignore[return-value]\n",
    ),
    ADMISSION.but(
        "answers",
        "it answers nothing",
        "        return count >= self.threshold\n",
        "        return None  # type: ignore[return-value]\n",
    ),
    ADMISSION.but(
        "answers",
        "nothing is admitted",
        "        return count >= self.threshold\n",
        "        return False\n",
    ),
    ADMISSION.but(
        "answers",
        "nothing is admitted at once",
        "        if self.threshold == 1:\n            return True\n",
        "        if self.threshold == 1:\n            return False\n",
    ),
    ADMISSION.but(
        "answers",
        "all is admitted",
        "        return count >= self.threshold\n",
        "        return True\n",
    ),
    ADMISSION.but(
        "answers",
        "it admits one request too late",
        "        return count >= self.threshold\n",
        "        return count > self.threshold\n",
    ),
    ADMISSION.but(
        "answers",
        "it admits one request too soon",
        "        return count >= self.threshold\n",
        "        return count >= self.threshold - 1\n",
    ),
    ADMISSION.but(
        "size",
        "the threshold is the first one",
        "        self._counts: OrderedDict[bytes, int] = OrderedDict()\n",
        "        self._counts: OrderedDict[bytes, int] = OrderedDict()\n        self._first = threshold\n",
        "        return count >= self.threshold\n",
        "        return count >= self._first\n",
    ),
    ADMISSION.but("order", "a count is not kept", "        self._counts[key] = count\n", ""),
    ADMISSION.but(
        "order",
        "what is stored is counted on",
        "        self._counts.pop(key, None)\n\n\ndef",
        "        pass\n\n\ndef",
    ),
    ADMISSION.but(
        "order",
        "the newest count is forgotten",
        "            self._counts.popitem(last=False)\n",
        "            self._counts.popitem()\n",
    ),
    ADMISSION.but(
        "order",
        "all counts are forgotten at once",
        "            self._counts.popitem(last=False)\n",
        "            self._counts.clear()\n",
    ),
    ADMISSION.but(
        "order",
        "asking again does not renew a count",
        TOOK,
        "        count = self._counts.get(key, 0) + 1\n",
    ),
    ADMISSION.but(
        "memory",
        "counts are kept for ever",
        "            self._counts.popitem(last=False)\n",
        "            pass\n",
    ),
)
