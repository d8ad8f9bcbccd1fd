"""docs/faults.md is what the tests break."""

from __future__ import annotations

from tests.fault_matrix import PAGE, Row, marked, page, problems, symptoms


def test_the_page_is_that_of_the_table() -> None:
    assert PAGE.read_text() == page(), "python -m tests.fault_matrix"


def test_each_row_has_tests_and_each_test_a_row() -> None:
    rows = [row for of_symptom in symptoms().values() for row in of_symptom]
    assert problems(rows, list(marked())) == []


def test_a_row_without_a_test_and_a_test_without_a_row_are_found() -> None:
    rows = [Row("fire", "a miss", []), Row("flood", "a miss", ["test_wet", "test_gone"])]
    found = problems([*rows, Row("rain", "a miss", ["test_wet"])], ["test_wet", "test_new"])
    assert [problem.split(":")[0] for problem in found] == [
        "fire",
        "test_new",
        "test_wet",
        "test_gone",
    ]
