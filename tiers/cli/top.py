"""`kvtiers top`: the tiers and requests of running engines, on a terminal."""

from __future__ import annotations

import sys
from contextlib import closing

from tiers.cli.arguments import ControlFolder, EngineName, refused, require_extra


def top(engine: EngineName = None, folder: ControlFolder = None) -> None:
    """Watch the tiers and the requests of running engines.

    It shows the tiers as `kvtiers status` does, each second, and more of the selected one. Keys:
    left and right change the engine, r shows the last and the slowest requests, Enter shows why a
    request was served as it was, q ends. Pressed twice, p pauses the selected tier or has it go on,
    and d has it store nothing more. It needs a terminal, best of 80x24, and textual.

    \b
    pip install 'kvtiers[top]'
    kvtiers top
    kvtiers top --from engine-4711
    """
    from tiers.control.ask_engines import sockets
    from tiers.control.control_server import runtime_folder

    require_extra("textual", "top")
    # Textual reads the one and draws on the other.
    if not all(stream and stream.isatty() for stream in (sys.__stdin__, sys.__stderr__)):
        raise refused("top draws on a terminal, and this is none; use `kvtiers status`")
    folder = folder or runtime_folder()
    sockets(folder, engine)  # or it raises, since there is no engine

    from tiers.cli.top_screen import Top
    from tiers.control.watch_engines import EnginesWatch

    with closing(EnginesWatch(folder, engine)) as watch:
        Top(watch).run(mouse=False)  # so that the terminal's own selection copies a name
