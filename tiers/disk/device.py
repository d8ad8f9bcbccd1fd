"""The device behind a folder, and the life that is left in it, as far as the system shows it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from spec.findings import DoctorFinding
from tiers.paths import mount_of

TOOL = "smartctl"
TOOL_SECONDS = 5.0
WORN = 80
"""Percent of the endurance from which a device is worth a warning."""

_ASK = f"run this as root where {TOOL} (smartmontools) is, or ask the cloud's console"


def findings(place: Path, sys: Path = Path("/sys")) -> Iterator[DoctorFinding]:
    """Findings about the devices of the file system at an existing folder. `sys`: sysfs."""
    devices = list(_devices(place, sys))
    if not devices:
        yield DoctorFinding(
            "can't tell", "which device its file system is on, and the life left in it"
        )
    for device in devices:
        if _read(device / "queue/rotational") == "1":
            yield DoctorFinding(
                "note",
                f"{device.name} turns, by its own account, which virtual disks often give: blocks "
                "are read at random",
                "name a folder on an SSD, or measure it: kvtiers bench",
                "where loading is slower than computing, requests compute",
            )
        yield _life(device)


def _devices(place: Path, sys: Path) -> Iterator[Path]:
    """The whole devices in sysfs, those below a mapped one or an array."""
    number = os.stat(place).st_dev
    if os.major(number) == 0:  # of the file system itself, as Btrfs has them
        source = Path(mount_of(place).device)
        number = os.stat(source).st_rdev if source.is_absolute() and source.exists() else 0
    found = sys / f"dev/block/{os.major(number)}:{os.minor(number)}"
    if number and found.exists():
        yield from _below(found.resolve())


def _below(device: Path) -> Iterator[Path]:
    if (device / "partition").exists():
        device = device.parent
    parts = sorted(device.glob("slaves/*"))
    for part in parts:
        yield from _below(part.resolve())
    if not parts:
        yield device


def _life(device: Path) -> DoctorFinding:
    used = _of_emmc(_read(device / "device/life_time"))
    note = ""
    if used is None:
        used, note = _by_tool(device.name)
    if used is None:
        return DoctorFinding("can't tell", f"how worn {device.name} is{note}", _ASK, "nothing")
    if used < WORN and not note:
        return DoctorFinding("fine", f"{device.name} has used {used}% of its endurance")
    return DoctorFinding(
        "warning",
        f"{device.name} has used {used}% of its endurance{note}",
        "replace it, or spare it: write_budget: 500GB/day, store_threshold: 2",
        "fewer blocks are stored",
    )


def _of_emmc(text: str) -> int | None:
    """Percent used of an eMMC, whose two estimates are in tenths."""
    try:
        return max(10 * int(part, 16) for part in text.split())
    except ValueError:
        return None


def _by_tool(name: str) -> tuple[int | None, str]:
    """Percent used as the tool reads it, and a remark."""
    tool = shutil.which(TOOL)
    if tool is None:
        return None, f": {TOOL} is not installed"
    try:
        ran = subprocess.run(
            [tool, "--json", "--all", f"/dev/{name}"],
            capture_output=True,
            timeout=TOOL_SECONDS,
            check=False,
        )
        return percent_used(json.loads(ran.stdout))
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        return None, f": {TOOL} gave no answer ({type(error).__name__})"


def percent_used(answer: Mapping[str, Any]) -> tuple[int | None, str]:
    """Percent used, and a remark, from what `smartctl --json --all` prints."""
    log = answer.get("nvme_smart_health_information_log", {})
    used = log.get("percentage_used", answer.get("endurance_used", {}).get("current_percent"))
    if used is None:
        messages = answer.get("smartctl", {}).get("messages", [])
        return None, "".join(f": {each.get('string', '')}" for each in messages[:1])
    if log.get("critical_warning"):
        return int(used), ", and reports a critical warning"
    return int(used), ""


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
