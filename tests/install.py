"""Tries the three ways in of the README, each in an empty environment: `make install-test`.

What runs are the README's own lines, in a copy of the checkout. On a CPU vLLM then serves a tiny
model with a chain; CUDA's way is only resolved. Needs a package index, and nothing but Python
beside it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "spec", "tiers")
LIMIT = 1800
"""Seconds for one way, with an index that is slow."""
START_LIMIT = 300
OURS = ("kvtiers", "lmdb", "redis", "zstandard", "xxhash")
"""What vLLM does not bring."""
CHAIN = """\
version: 1
tiers:
  - {type: cpu, capacity: 64MiB}
  - {type: disk, capacity: 64MiB, path: blocks}
"""
OPTIONS = (
    "--dtype float32 --max-model-len 512 --num-gpu-blocks-override 40 --enforce-eager "
    "--skip-tokenizer-init --host 127.0.0.1"
)
MODEL = """
import sys
from pathlib import Path
from tests.engine.vllm.checkpoints import write_model
from tests.engine.vllm.tiny_vllm import LLAMA
print(write_model(Path(sys.argv[1]), LLAMA))
"""


def shown(beginning: str) -> list[str]:
    """The lines of the README's first shell block that has a line with this beginning."""
    blocks: list[str] = re.findall(r"^```sh\n(.*?)^```", README, re.M | re.S)
    return next(b for b in blocks if re.search(f"^{re.escape(beginning)}", b, re.M)).splitlines()


def ways() -> dict[str, str]:
    """The commands of each way in: the lines between comments, in the README's order."""
    parts = re.split(r"^#.*\n", "\n".join(shown("pip install .")) + "\n", flags=re.M)
    return dict(zip(("present", "cuda", "cpu"), parts[1:], strict=True))


class Environment:
    """An empty environment with a copy of the checkout, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.home, self.sources = folder / "venv", folder / "checkout"
        venv.create(self.home, with_pip=True)
        self.sources.mkdir()
        for name in SOURCES:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, self.sources / name)
        self.variables = {
            **{key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
            "PATH": f"{self.home / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "PIP_QUIET": "2",
        }

    def run(self, commands: str, **variables: str) -> str:
        """What some lines of shell print; ends the trial if one fails."""
        print(f"$ {commands.strip()}", flush=True)
        done = subprocess.run(
            ["sh", "-ec", commands],
            cwd=self.sources,
            env={**self.variables, **variables},
            stdout=subprocess.PIPE,
            text=True,
            timeout=LIMIT,
        )
        if done.returncode:
            sys.exit(f"{done.stdout[-4000:]}\nstatus {done.returncode}: {commands}")
        return done.stdout

    def packages(self) -> set[str]:
        """All packages with their versions, but ours."""
        found = self.run("pip freeze").splitlines()
        return {one for one in found if re.split(r"[ =]", one)[0] not in OURS}

    def serve(self, line: str) -> None:
        """Start a server by the README's line, ask twice, and see its tiers open."""
        (self.sources / "chain.yaml").write_text(CHAIN)
        self.run("kvtiers validate chain.yaml")
        model = self.run(f"python -c '{MODEL}' models", PYTHONPATH=str(ROOT)).strip()
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        command = f"exec {line.replace('MODEL', model)} {OPTIONS} --port {port}"
        print(f"$ {command}", flush=True)
        log = self.sources / "server.log"
        with log.open("w") as file:
            server = subprocess.Popen(
                ["sh", "-c", command],
                cwd=self.sources,
                env=self.variables,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        try:
            answers = self._ask(server, f"http://127.0.0.1:{port}", model)
        finally:
            server.terminate()
            server.wait(60)
        text = log.read_text()
        missing = [tier for tier in ("cpu", "disk") if f"tier '{tier}' is open" not in text]
        if answers is None or answers[0] != answers[1] or missing:
            sys.exit(f"{text[-6000:]}\nthe server did not serve: {answers}, not open: {missing}")
        print(f"it serves: {answers[0]}", flush=True)

    def _ask(self, server: subprocess.Popen[bytes], url: str, model: str) -> list[str] | None:
        """Two answers to one prompt; None if there is no server."""
        late = time.monotonic() + START_LIMIT
        while server.poll() is None and time.monotonic() < late:
            with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
                break
            time.sleep(0.5)
        else:
            return None
        prompt = [*range(10, 210)]
        body = {"model": model, "prompt": prompt, "max_tokens": 4, "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), headers
        )
        answers = []
        for _ in range(2):
            with urllib.request.urlopen(request, timeout=120) as answer:
                answers.append(str(json.load(answer)["choices"][0]["token_ids"]))
        return answers


def try_cpu(made: Environment) -> None:
    """From nothing to a server, by the README alone."""
    made.run(ways()["cpu"])
    (line,) = [line for line in shown("python -m vllm") if line.startswith("python -m vllm")]
    made.serve(line)


def try_present(made: Environment) -> None:
    """Where vLLM is, nothing of its environment changes."""
    if not (made.home / "bin" / "vllm").exists():
        made.run(ways()["cpu"])
    made.run(f"pip uninstall -q -y {' '.join(OURS)}")
    before = made.packages()
    made.run(ways()["present"])
    if before - made.packages():
        sys.exit(f"it changed {before - made.packages()}")
    (line,) = [line for line in shown("python -m vllm") if line.startswith("python -m vllm")]
    made.serve(line)


def try_cuda(made: Environment) -> None:
    """Its packages are found and fit together; nothing is installed."""
    made.run(ways()["cuda"].strip() + " --dry-run --report report.json")
    report = json.loads((made.sources / "report.json").read_text())
    versions = {
        one["metadata"]["name"].lower(): one["metadata"]["version"] for one in report["install"]
    }
    if not {"vllm", "torch", "torchvision", "kvtiers"} <= versions.keys():
        sys.exit(f"not all are there: {sorted(versions)}")
    print(f"vllm {versions['vllm']} with torch {versions['torch']}", flush=True)


def main(wanted: list[str]) -> None:
    """Try the ways that are named, or all."""
    tries = {"cpu": try_cpu, "present": try_present, "cuda": try_cuda}
    if unknown := set(wanted) - {*tries}:
        sys.exit(f"no way {unknown}; there are {', '.join(tries)}")
    with tempfile.TemporaryDirectory(prefix="kvtiers-install-") as name:
        environments: dict[str, Environment] = {}
        for way in wanted or tries:
            began = time.monotonic()
            # Where vLLM is present, it was installed by the CPU's way.
            kind = "cuda" if way == "cuda" else "cpu"
            if kind not in environments:
                environments[kind] = Environment(Path(name) / kind)
            tries[way](environments[kind])
            print(f"{way}: the README's way works, {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
