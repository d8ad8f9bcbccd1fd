"""`python -m tests.mutants`: run the kit on the mutants, and print what it caught."""

from __future__ import annotations

import argparse
from collections import Counter

from tests.mutants import __doc__ as about
from tests.mutants.kits import REPLACED, open_kits
from tests.mutants.run import Outcome, try_mutants
from tests.mutants.table import MUTANTS, SAMPLE


def main() -> None:
    """Print a line for each mutant, and the sums."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", default="1/1", help="like 2/4: the second quarter of them")
    parser.add_argument("--only", default="", help="those whose words have this")
    parser.add_argument("--store", default="", help="those of this store")
    parser.add_argument("--sample", action="store_true", help="a few that are caught soon")
    asked = parser.parse_args()
    part, parts = map(int, asked.part.split("/"))
    some = SAMPLE if asked.sample else MUTANTS
    chosen = [m for m in some if asked.only in m.what and asked.store in m.store]
    outcomes = []
    with open_kits({mutant.store for mutant in chosen}) as kits:
        for outcome in try_mutants(chosen[part - 1 :: parts], kits, REPLACED):
            outcomes.append(outcome)
            print(_line(outcome), flush=True)
    _sums(outcomes)


def _line(outcome: Outcome) -> str:
    mutant = outcome.mutant
    fate = f"{outcome.test}: {outcome.why.splitlines()[0]}" if outcome.is_caught else outcome.why
    if not outcome.is_caught:
        equal = mutant.equal and f"equivalent: {mutant.equal}"
        fate = f"SURVIVED {fate}{equal}{mutant.survives}"
    return f"{mutant.store} {mutant.kind}: {mutant.what} [{outcome.seconds:.1f} s]\n    {fate:.160}"


def _sums(outcomes: list[Outcome]) -> None:
    told = [outcome for outcome in outcomes if not outcome.mutant.equal]
    for name in ("store", "kind"):
        total = Counter(getattr(outcome.mutant, name) for outcome in told)
        caught = Counter(getattr(o.mutant, name) for o in told if o.is_caught)
        for one, count in total.items():
            print(f"{one}: {caught[one]} of {count} caught")
    caught_all = sum(outcome.is_caught for outcome in told)
    print(f"all: {caught_all} of {len(told)}, and {len(outcomes) - len(told)} equivalent")


if __name__ == "__main__":
    main()
