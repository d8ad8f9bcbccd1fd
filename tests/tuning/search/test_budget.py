"""A budget says what is wrong with it, by file, line and key."""

from __future__ import annotations

from pathlib import Path

import pytest

from spec.errors import SpecError
from tiers.tuning.search.budget import load_budget

GOOD = """\
media:
  - {type: cpu, limit: 64GB}
  - {type: disk, limit: 2TB, settings: {path: /var/lib/kvtiers}}
machine:
  kv_bytes_per_token: 131072
  engine_cache: 4GB
  prefill_rate: 20000
  tiers:
    cpu: {load_bandwidth: 20GB/s, store_bandwidth: 20GB/s}
    disk: {load_bandwidth: 5GB/s, store_bandwidth: 3GB/s}
"""


def problems(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "budget.yaml"
    path.write_text(text)
    with pytest.raises(SpecError) as caught:
        load_budget(path)
    return [line.replace(f"{tmp_path}/", "") for line in caught.value.problems]


def test_a_budget_is_read(tmp_path: Path) -> None:
    (tmp_path / "budget.yaml").write_text(GOOD)
    found = load_budget(tmp_path / "budget.yaml")
    assert [(medium.type, medium.limit) for medium in found.media] == [
        ("cpu", 64 * 10**9),
        ("disk", 2 * 10**12),
    ]
    assert found.objective == "mean_ttft"


def test_the_machine_may_be_a_file_beside_it(tmp_path: Path) -> None:
    media, _, machine = GOOD.partition("machine:\n")
    lines = "".join(line.removeprefix("  ") + "\n" for line in machine.splitlines())
    (tmp_path / "machine.yaml").write_text(lines)
    (tmp_path / "budget.yaml").write_text(media + "machine: machine.yaml\n")
    found = load_budget(tmp_path / "budget.yaml")
    assert found.machine.tiers["disk"].load_bandwidth == 5e9
    (told,) = problems(tmp_path, media + "machine: gone.yaml\n")
    assert told.startswith("budget.yaml:4: machine: found 'gone.yaml'; ")


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ("limit: 64GB", "limit: lots", "budget.yaml:2: media[0].limit: found 'lots'; use one of B"),
        ("limit: 64GB", "limti: 64GB", "budget.yaml:2: media[0].limti: found an unknown key; did"),
        (
            "    cpu: {load_bandwidth",
            "    cpu: {loud_bandwidth",
            "budget.yaml:9: machine.tiers.cpu.loud_bandwidth: found an unknown key; did you mean "
            "load_bandwidth?",
        ),
        ("type: cpu", "type: cup", "budget.yaml:2: media[0].type: found 'cup'; did you mean cpu?"),
        ("type: cpu", "type: disk", "budget.yaml:2: media[0].settings: found"),
        (
            "{path: /var/lib/kvtiers}",
            "{}",
            "budget.yaml:3: media[1].settings: found an empty mapping; path: add it",
        ),
        (
            "{path: /var/lib/kvtiers}",
            "{path: /a, capacity: 3}",
            "budget.yaml:3: media[1].settings: found a mapping; remove capacity, which the search",
        ),
        (
            "  - {type: disk",
            "  - {type: cpu, limit: 1GB}\n  - {type: disk",
            "budget.yaml:1: media: found a list; there are two of type cpu; keep one of them",
        ),
        (
            "    disk: {",
            "    dosk: {",
            "budget.yaml:4: machine: found a mapping; add a profile of disk to tiers",
        ),
        ("20000", "lots", "budget.yaml:7: machine.prefill_rate: found 'lots'; "),
        ("131072", "10GB", "budget.yaml:5: machine.kv_bytes_per_token: found '10GB'; "),
        (
            "machine:",
            "gpu_price_per_month: .inf\nmachine:",
            "budget.yaml:4: gpu_price_per_month: found .inf; input should be a finite number",
        ),
        (
            "    disk: {",
            "    disk: {price_per_gb_month: .inf, ",
            "budget.yaml:10: machine.tiers.disk.price_per_gb_month: found .inf; input should",
        ),
        ("media:", "objective: best\nmedia:", "budget.yaml:1: objective: found 'best'; "),
        (
            "media:",
            "objective: cost\nmedia:",
            "budget.yaml:1: found a mapping; add gpu_price_per_month, or a TTFT",
        ),
    ],
)
def test_what_is_wrong(tmp_path: Path, before: str, after: str, told: str) -> None:
    if after == "type: disk":
        text = GOOD.replace("type: cpu, limit", "type: disk, settings: {}, limit", 1)
    else:
        text = GOOD.replace(before, after, 1)
    assert any(line.startswith(told) for line in problems(tmp_path, text)), problems(tmp_path, text)
