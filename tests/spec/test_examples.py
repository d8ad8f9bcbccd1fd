"""The chains of spec/examples/ validate, and serve an engine when they are scaled down."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

import spec
from spec.load import load_chain
from tests.support.replay import ReplayEngine
from tests.support.replay_chains import MODEL, SLOT, close, drive, measured
from tests.support.topologies import cluster
from tiers.cli.chain import validate
from tiers.connector.policy import request_state

EXAMPLES = sorted((Path(spec.__file__).parent / "examples").glob("*.yaml"))
KEYS = "/run/secrets/kvtiers-keys"
RANKS = {"nvme-tp8": 8}


@pytest.fixture(params=EXAMPLES, ids=lambda path: path.stem)
def example(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of an example whose secrets are there."""
    path: Path = request.param
    (tmp_path / "keys").write_text("17" * 32)
    copy = tmp_path / path.name
    copy.write_text(path.read_text().replace(KEYS, str(tmp_path / "keys")))
    return copy


def test_there_is_one_for_each_of_eight_situations() -> None:
    assert len(EXAMPLES) == 8


def test_an_example_says_why_in_three_lines_and_validates(
    example: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = example.read_text().splitlines()
    assert all(line.startswith("# ") for line in lines[:3]) and lines[3] == "version: 1"
    validate(example)
    assert "load_policy stitched" in capsys.readouterr().out


def scaled(example: Path, servers: ExitStack, ranks: int) -> dict[str, Any]:
    """What the example says, with sizes for the replay model, and places that exist."""
    chain: dict[str, Any] = yaml.safe_load(example.read_text())
    chain["staging"] = 64 * SLOT * ranks
    for tier in chain["tiers"]:
        if tier["type"] == "redis":
            nodes = servers.enter_context(cluster())
            ports = ",".join(f"127.0.0.1:{node.port}" for node in nodes)
            tier |= {"url": f"redis+cluster://{ports}", "timeout": "30s"}
            continue
        if tier["type"] == "object":
            pytest.importorskip("obstore")
            tier |= {"url": f"file://{example.parent}/bucket", "region": None}
            continue
        blocks = 20 if tier["type"] == "cpu" else 256
        tier["capacity"] = blocks * SLOT * ranks
        if "path" in tier:
            (example.parent / tier["type"]).mkdir(0o700)
            tier["path"] = str(example.parent / tier["type"])
    return chain


def test_an_example_serves_an_engine(example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A busy machine must not make misses of hits that are counted on.
    monkeypatch.setattr(request_state, "LOOKUP_SECONDS", 30.0)
    ranks = RANKS.get(example.stem, 1)
    with ExitStack() as servers:
        chain = load_chain(scaled(example, servers, ranks) | {"max_wait": "60s"})
        engine = ReplayEngine(chain, MODEL, num_blocks=24, prefix_caching=False, world_size=ranks)
        for _ in range(2):
            drive(engine, seed=1, world_size=ranks)
            engine.settle()
        for tier in chain.tiers:
            assert measured(engine, "stored_blocks", tier.tier_name) > 0
            assert measured(engine, "loaded_blocks", tier.tier_name) > 0
        close(engine)
