"""How far it is from an engine's call to a tier's own table."""

from __future__ import annotations

from tests import figures

MOST_FRAMES = 13


def test_a_lookup_meets_the_fingerprints_within_few_frames() -> None:
    *_, route = figures.walk("stitched")
    assert route
    assert len(route) <= MOST_FRAMES, "\n".join(route)
