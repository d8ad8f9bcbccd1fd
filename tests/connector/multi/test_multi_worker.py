"""Loads and saves by several children: told once, and exactly when the last has ended."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from tests.support.children import Child
from tiers.connector.multi.multi_connector import MultiConnectorMetadata
from tiers.connector.multi.multi_worker import MultiWorker
from tiers.contract.messages import LoadJob, OffloadingConnectorMetadata, TransferResults

CHILDREN = 4
REQUESTS = "abcdef"


@given(
    st.dictionaries(
        st.sampled_from(REQUESTS),
        st.tuples(
            st.sets(st.integers(0, CHILDREN - 1)), st.sets(st.integers(0, CHILDREN - 1))
        ).filter(any),
        min_size=1,
    ),
    st.randoms(use_true_random=False),
)
def test_each_request_ends_once_whatever_the_order(
    in_flight: dict[str, tuple[set[int], set[int]]], order: Random
) -> None:
    """`under_way`: the children that save, and that load, each request."""
    children = [Child(str(number), []) for number in range(CHILDREN)]
    worker = MultiWorker(children)
    extra = {name: len(saves) - 1 for name, (saves, _) in in_flight.items() if len(saves) > 1}
    orders = tuple(
        OffloadingConnectorMetadata(
            [LoadJob(0, name, []) for name, (_, loads) in in_flight.items() if child in loads]
        )
        for child in range(CHILDREN)
    )
    worker.bind_connector_metadata(MultiConnectorMetadata(orders, extra))
    worker.start_load_kv(None)
    ends = [
        (child, what, name)
        for name, both in in_flight.items()
        for what in (0, 1)
        for child in both[what]
    ]
    order.shuffle(ends)
    told: tuple[list[str], list[str]] = ([], [])
    while ends:
        step = [ends.pop() for _ in range(min(len(ends), order.randint(1, 5)))]
        for number, child in enumerate(children):
            mine = [(what, name) for c, what, name in step if c == number]
            child.finished = TransferResults(
                {name for what, name in mine if what == 0},
                {name for what, name in mine if what == 1},
            )
        for kind, names in enumerate(worker.get_finished(set())):
            for name in names or ():
                told[kind].append(name)
                assert not [e for e in ends if e[1:] == (kind, name)], "another child is at it"
    for kind in (0, 1):
        expected = sorted(name for name, both in in_flight.items() if both[kind])
        assert sorted(told[kind]) == expected
