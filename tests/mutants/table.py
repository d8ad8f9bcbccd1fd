"""All mutants."""

from __future__ import annotations

from tests.mutants import (
    disk_mutants,
    packs_mutants,
    policy_mutants,
    redis_mutants,
    shared_mutants,
    template_mutants,
)
from tests.mutants.mutant import Mutant

MUTANTS: tuple[Mutant, ...] = (
    *template_mutants.MUTANTS,
    *disk_mutants.MUTANTS,
    *redis_mutants.MUTANTS,
    *packs_mutants.MUTANTS,
    *shared_mutants.MUTANTS,
    *policy_mutants.MUTANTS,
)

_SAMPLED = (
    "the newest goes first",
    "has answers 500 keys",
    "usage says twice the blocks",
    "put swallows errors",
    "put keeps the caller's memory",
    "a file stays open",
    "host_local is False",
)
SAMPLE = tuple(m for m in MUTANTS if m.store == "template" and m.what in _SAMPLED)
"""Mutants for `make test`: what the kit did not find when it was first tried."""
