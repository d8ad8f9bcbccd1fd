"""docs/faults.md is what the tests say."""

from __future__ import annotations

from tests import fault_matrix


def test_the_page_is_that_of_the_tests() -> None:
    assert fault_matrix.PAGE.read_text() == fault_matrix.page(), "python tests/fault_matrix.py"


def test_every_row_says_something_and_no_two_are_one() -> None:
    rows = fault_matrix.rows()
    assert all(row.fault and row.outcome and "|" not in "".join(row[:3]) for row in rows)
    assert len({row.test for row in rows}) == len(rows)
    assert {row.tier for row in rows} == set(fault_matrix.TIERS)
