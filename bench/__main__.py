"""Measure kvtiers beside the hardware and other projects.

python -m bench all --json out.json
python -m bench disk remote --folder /mnt/nvme
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.main import SUITES, Scale, run, show
from bench.report import read_json


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("suites", nargs="+", choices=("all", *SUITES))
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--compare", type=Path, help="show the rows beside those of this --json")
    parser.add_argument("--folder", type=Path, help="measure disks here, not in a temporary folder")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds of each case")
    parser.add_argument("--smoke", action="store_true", help="check only that every suite runs")
    parser.add_argument("--blocks", type=int, help="disk: only its index, with this many blocks")
    args = parser.parse_args()
    before = None if args.compare is None else read_json(args.compare)[1]
    wanted = SUITES if args.suites == ["all"] else tuple(dict.fromkeys(args.suites))
    with TemporaryDirectory(prefix="kvtiers-bench-", dir=args.folder) as made:
        scale = Scale(args.smoke, Path(made), args.rounds, args.blocks)
        rows = run(wanted, scale, lambda line: print(line, file=sys.stderr), args.json)
    show(rows, before)


if __name__ == "__main__":
    main()
