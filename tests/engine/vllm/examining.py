"""Examines models: each line of standard input is one, with an engine's arguments and environment,
and each answer a line."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from spec.load import load_chain
from tiers.doctor.examine import examine_model


def main() -> None:
    chain = Path(sys.argv[1])
    for line in sys.stdin:
        model, arguments, environ = json.loads(line)
        os.environ.update(environ)
        found = examine_model(Path(model), arguments, chain, load_chain(chain), environ)
        print("found", json.dumps([[each.gravity, each.found, each.change] for each in found]))


if __name__ == "__main__":
    main()
