"""Arguments that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ChainFile = Annotated[
    Path, typer.Argument(metavar="FILE", help="A chain's YAML.", show_default=False)
]
"""The path of a chain; whether it can be read is for `load_chain` to say."""
