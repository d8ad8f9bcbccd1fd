"""Cells of docs/compatibility.json: what a real engine was seen to load, or to be refused."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.engine.vllm.tiny_vllm import EngineFailed

SAID = re.compile(
    r"(?:ValueError: |with error ['\"])(.*(?:kvtiers|KV cache specs).*?)(?:['\"], please|$)",
    re.MULTILINE,
)
"""What kvtiers says; or vLLM itself, of a model that it starts without any KV connector."""


ON_V2 = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"
"""Whether all engines of this run have Model Runner V2 (`make test-v2`)."""


def engine_version() -> str:
    """The minor version of the vLLM that engines of tests run, without importing it."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    text = Path(spec.origin).with_name("_version.py").read_text()
    found = re.search(r"version = '(\d+\.\d+)", text)
    assert found is not None
    return found[1]


class Cells:
    """Writes what tests show to a file, or, without one, nowhere."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def loaded(self, kind: str, ranks: str, tokens: Mapping[str, float]) -> None:
        """Note tokens that tiers loaded. Call it when all answers were found to be right."""
        assert tokens and all(count > 0 for count in tokens.values()), tokens
        self._note(kind, {f"{tier}, {ranks}": int(count) for tier, count in tokens.items()})

    def refused(
        self,
        kind: str,
        why: str,
        ranks: str | None = None,
        who: str = "refused",
        tiers: Sequence[str] = ("cpu", "disk", "redis"),
    ) -> None:
        """Note that something is refused, with the reason that is given."""
        names = ["any"] if ranks is None else [f"{tier}, {ranks}" for tier in tiers]
        self._note(kind, dict.fromkeys(names, f"{who}: {why}"))

    def conversations(self, prompts: int, ours: int, theirs: int) -> None:
        """Note how many of all prompts' tokens were loaded, by us and by vLLM's own connector."""
        self._note("conversations", {"prompts": prompts, "ours": ours, "theirs": theirs})

    def refuses(self, kind: str, ranks: str, start: Callable[[], object]) -> str:
        """Start an engine that kvtiers must refuse; the reason that it gives, which is noted."""
        try:
            start()
        except EngineFailed as failed:
            said = SAID.search(str(failed))
            assert said is not None, failed
            why = said[1] if "kvtiers" in said[1] else f"vLLM with any KV connector: {said[1]}"
            self.refused(kind, why, ranks)
            return why
        raise AssertionError(f"{kind} was not refused")

    def _note(self, kind: str, cells: Mapping[str, int | str]) -> None:
        if self._path is None:
            return
        found = json.loads(self._path.read_text()) if self._path.exists() else {}
        found.setdefault(engine_version(), {}).setdefault(kind, {}).update(cells)
        self._path.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
