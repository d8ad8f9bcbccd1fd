"""The engine's settings that decide whether others find what is stored."""

from __future__ import annotations

import pytest

from spec.load import load_chain
from tiers.doctor.software import examine_hashes

SEED = {"PYTHONHASHSEED": "0"}


@pytest.mark.parametrize(
    ("algorithm", "environ", "gravity", "found"),
    [
        ("sha256", {}, "fine", "the same in every process"),
        ("sha256", SEED, "fine", "set the same wherever blocks are to be found"),
        ("xxhash", SEED, "fine", "set the same wherever blocks are to be found"),
        ("xxhash", {}, "warning", "xxhash begins at random in each process"),
        ("", {}, "can't tell", "they do with vLLM's default"),
    ],
)
def test_hashes(algorithm: str, environ: dict[str, str], gravity: str, found: str) -> None:
    """A seed counts under every algorithm: one engine with it finds nothing of those without."""
    host = {"type": "cpu", "capacity": "1MiB"}
    chains = (
        load_chain({"version": 1, "tiers": tiers})
        for tiers in ([host], [host, {"type": "redis", "url": "redis://cache"}])
    )
    alone, shared = (list(examine_hashes(chain, environ, algorithm)) for chain in chains)
    assert not alone, "nobody else could find what is in memory"
    assert [(each.gravity, found in each.found) for each in shared] == [(gravity, True)]
