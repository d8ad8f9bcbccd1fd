"""Which tier serves."""

from __future__ import annotations

from tiers.connector.policy import Choice, first

LOOKING = (None, False)
NOTHING = (0, False)


def test_the_first_that_has_tokens_serves() -> None:
    assert first([NOTHING, (3, True), (7, True)]) == Choice(1, 3, True)


def test_nobody_has_any() -> None:
    assert first([NOTHING, NOTHING]) == Choice(None, 0, False)


def test_a_lower_tier_that_is_looking_does_not_delay_a_higher_one() -> None:
    assert first([(3, True), LOOKING]) == Choice(0, 3, True)


def test_a_higher_tier_that_is_looking_is_waited_for() -> None:
    assert first([LOOKING, (3, True)]) == Choice(None, None, False)


def test_tiers_below_the_one_that_serves_are_not_asked() -> None:
    def answers():
        yield (3, True)
        raise AssertionError("asked a lower tier for nothing")

    assert first(answers()).child == 0


def test_tiers_below_one_that_is_looking_are_asked_so_that_lookups_overlap() -> None:
    asked = []

    def answers():
        for child in range(3):
            asked.append(child)
            yield LOOKING

    assert first(answers()).tokens is None
    assert asked == [0, 1, 2]
