"""Queues of slots: many moved at once are as if moved one by one."""

from __future__ import annotations

import random

from tiers.cpu.queues import SlotQueues

QUEUES = (1, 2, 3)


def order(queues: SlotQueues, queue: int) -> list[int]:
    """The slots of a queue, the one that is longest in it first."""
    left, slots = queues.length(queue), []
    copy = [slot for slot in queues.slots() if queues.where[slot] == queue]
    assert left == len(copy)
    while left:
        slots.append(queues.first(queue))
        queues.remove(slots[-1])
        left -= 1
    for slot in slots:
        queues.append(slot, queue)
    assert sorted(slots) == copy
    return slots


def test_slots_that_move_together_are_in_the_order_of_moving_them_one_by_one() -> None:
    """In runs of neighbours or not, of one queue or several, some of them twice."""
    rng = random.Random(1)
    for _ in range(400):
        num_slots = rng.randint(1, 12)
        together, single = (SlotQueues(num_slots, len(QUEUES)) for _ in range(2))
        for slot in range(num_slots):
            for queues in (together, single):
                queues.append(slot, 1 + slot % 3 * (num_slots % 2))
        for _ in range(20):
            line = order(together, together.where[rng.randrange(num_slots)])
            start = rng.randrange(len(line))
            slots = line[start : start + rng.randint(0, 6)]
            slots += rng.choices(range(num_slots), k=rng.randint(0, 3))
            queue = rng.choice(QUEUES)
            together.move_all(slots, queue)
            for slot in slots:
                single.move(slot, queue)
            assert [order(together, one) for one in QUEUES] == [
                order(single, one) for one in QUEUES
            ]
            assert together.where == single.where
