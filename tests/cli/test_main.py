"""`kvtiers validate`, `config` and `schema` on chains that are right, and the command itself."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from spec.load import load_chain
from spec.schema import chain_schema

README = """\
version: 1
tiers:                 # load priority: first is tried first
  - {type: cpu,   capacity: 8GiB}
  - {type: disk,  capacity: 200GiB, path: /var/lib/kvtiers}
  - {type: redis, url: "redis://cache.internal:6379/0", ttl: 1d}
"""
TWO_DISKS = """\
version: 1
tiers:
  - {type: disk, capacity: 100GB, path: /nvme/kv}
  - {type: disk, capacity: 2TB, path: /hdd/kv}
"""
ALL_SET = """\
version: 1
load_policy: first
promote: false
staging: 1GiB
salt: team-a
tiers:
  - {type: cpu, name: ram, capacity: 1073741824}
  - {type: redis, name: shared, url: "unix:///run/valkey.sock?db=3", ttl: 90s, timeout: 250ms,
     key_prefix: kv, codec: zstd}
  - {type: redis, url: "redis://cache", username: me, password: {env: PASSWORD}}
"""
GOOD = {"readme": README, "two disks": TWO_DISKS, "all set": ALL_SET}
Run = Callable[..., tuple[int, str, str]]
KVTIERS = str(Path(sys.executable).parent / "kvtiers")


@pytest.fixture
def chain(tmp_path: Path) -> Callable[[str], Path]:
    """Write a chain's file."""

    def write(text: str) -> Path:
        path = tmp_path / "chain.yaml"
        path.write_text(text)
        return path

    return write


def test_validate_prints_the_chain_as_it_is_understood(kvtiers: Run, chain: Any) -> None:
    assert kvtiers("validate", chain(README)) == (
        0,
        "order  name   type   settings\n"
        "1      cpu    cpu    capacity 8GiB, verify never, eviction lru, store_threshold 1, "
        "admission threshold\n"
        "2      disk   disk   capacity 200GiB, path /var/lib/kvtiers, io auto, "
        "durability none, store_threshold 1, admission threshold, deadline 10s, loads_at_once 2, "
        "store_process auto\n"
        "3      redis  redis  url redis://cache.internal:6379/0, ttl 1d, timeout 1s, "
        "key_prefix kvtiers, codec none, store_threshold 1, admission threshold, deadline 10s, "
        "loads_at_once 2, store_process auto\n"
        "version 1, load_policy stitched, load_when sooner, promote true, store all, max_wait 10s, "
        "tenants none, report_cached_tokens true, max_retained 0.25, on_reset forget, "
        "trust_client_ids false, "
        "events (self_describing_kv_events true, "
        "locality false, ownership false), control (name engine), "
        "salt none\n",
        "",
    )


def test_validate_names_two_disks_apart(kvtiers: Run, chain: Any) -> None:
    _, out, _ = kvtiers("validate", chain(TWO_DISKS))
    assert [line.split()[1] for line in out.splitlines()[1:3]] == ["disk", "disk-2"]


@pytest.fixture
def password(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ALL_SET names."""
    monkeypatch.setenv("PASSWORD", "hunter2")


@pytest.mark.usefixtures("password")
def test_validate_shows_no_secret(kvtiers: Run, chain: Any) -> None:
    status, out, err = kvtiers("validate", chain(ALL_SET))
    assert status == 0 and "hunter2" not in out + err and "team-a" not in out + err
    assert "password (env PASSWORD)" in out
    assert "promote false, store all, max_wait 10s, tenants none, report_cached" in out
    assert "staging 1GiB" in out
    assert "ownership false), control (name engine), salt ***" in out


def test_validate_folds_settings_on_a_terminal_and_nowhere_else(chain: Any) -> None:
    command = [KVTIERS, "validate", str(chain(README))]
    plain = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert plain.isascii() and "\x1b" not in plain
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    subprocess.run(command, stdout=theirs, check=True, env=environment)
    os.close(theirs)
    drawn = os.read(ours, 1 << 16).decode()
    os.close(ours)
    head, *rows = drawn.splitlines()
    assert max(map(len, rows[:-1])) <= 80 < max(map(len, plain.splitlines()))
    settings = " ".join(row[head.index("settings") :].strip() for row in rows)
    assert "url redis://cache.internal:6379/0" in settings


@pytest.mark.usefixtures("password")
def test_config_prints_one_line_for_vllm_that_names_the_file(
    kvtiers: Run, chain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = chain(ALL_SET)
    monkeypatch.chdir(path.parent)
    status, out, err = kvtiers("config", "chain.yaml")
    assert (status, err, out.count("\n"), out.count(" ")) == (0, "", 1, 0)
    assert "hunter2" not in out
    assert json.loads(out) == {
        "kv_connector": "KVTiersConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"chain": str(path)},
    }


@pytest.mark.parametrize(("given", "place"), [("pipe", "-"), ("file", "/dev/stdin")])
def test_config_names_no_standard_input(chain: Any, given: str, place: str) -> None:
    """Its name was handed to vLLM, which finds nothing there, or something else."""
    command = f'"{KVTIERS}" config {place}'
    path = chain(README)
    line = f'cat "{path}" | {command}' if given == "pipe" else f'{command} < "{path}"'
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("/dev/stdin: found no file; vLLM opens it again")


def test_validate_reads_standard_input_and_answers_in_json(chain: Any) -> None:
    def validated(text: str) -> tuple[int, Any, str]:
        command = [KVTIERS, "validate", "-", "--json"]
        done = subprocess.run(command, input=text, capture_output=True, text=True)
        return done.returncode, json.loads(done.stdout), done.stderr

    status, told, err = validated(README)
    assert (status, err, told["chain"]["tiers"][1]["path"]) == (0, "", "/var/lib/kvtiers")
    assert told["chain"]["max_wait"] == "10s"
    status, told, err = validated(README.replace("8GiB", "8XB"))
    assert (status, err, len(told["problems"])) == (2, "", 1)
    assert told["problems"][0].startswith("/dev/stdin:3: tiers[0].capacity: found '8XB'; use one")


@pytest.mark.usefixtures("password")
def test_validates_json_shows_no_secret(kvtiers: Run, chain: Any) -> None:
    status, out, err = kvtiers("validate", chain(ALL_SET), "--json")
    assert status == 0 and "hunter2" not in out + err and "team-a" not in out + err


def test_config_of_a_broken_chain_prints_no_json(kvtiers: Run, chain: Any) -> None:
    status, out, err = kvtiers("config", chain("version: 1\n"))
    assert (status, out) == (2, "") and "tiers: found nothing" in err


def test_schema_is_for_the_whole_document(kvtiers: Run) -> None:
    status, out, err = kvtiers("schema")
    schema = json.loads(out)
    assert (status, err) == (0, "") and schema == chain_schema()
    assert set(schema["properties"]) == {
        "version",
        "tiers",
        "load_policy",
        "load_when",
        "promote",
        "store",
        "max_wait",
        "tenants",
        "report_cached_tokens",
        "warm",
        "max_retained",
        "staging",
        "on_reset",
        "trust_client_ids",
        "events",
        "record",
        "control",
        "explain",
        "ghosts",
        "salt",
    }
    assert schema["$defs"]["RecordSpec"]["additionalProperties"] is False
    assert set(schema["required"]) == {"version", "tiers"}
    types = {choice["$ref"] for choice in schema["properties"]["tiers"]["items"]["oneOf"]}
    assert {"#/$defs/cpu", "#/$defs/disk", "#/$defs/redis"} <= types
    for name in ("cpu", "disk", "redis"):
        tier = schema["$defs"][name]
        assert tier["properties"]["type"]["const"] == name and "type" in tier["required"]
        assert tier["additionalProperties"] is False
        assert all("description" in field for field in tier["properties"].values())
    assert schema["properties"]["max_wait"]["default"] == "10s"


@pytest.fixture(scope="module")
def validator() -> Any:
    """Of the schema, which is one."""
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator.check_schema(chain_schema())
    return jsonschema.Draft202012Validator(chain_schema())


@pytest.mark.usefixtures("password")
@pytest.mark.parametrize("text", GOOD.values(), ids=GOOD)
def test_schema_takes_what_validate_takes(chain: Any, validator: Any, text: str) -> None:
    load_chain(chain(text))
    validator.validate(yaml.safe_load(text))


@pytest.mark.parametrize(
    ("was", "then"),
    [
        ("version: 1", "version: 2"),
        ("version: 1\n", ""),
        ("8GiB", "8Gib"),
        ("8GiB", "-8GiB"),
        ("8GiB", "0"),
        ("capacity: 8GiB", "capcity: 8GiB"),
        ("type: cpu", "type: gpu"),
        ("type: cpu, ", ""),
        ("path: /var", "path: 3 #"),
        ("redis://", "http://"),
        ("ttl: 1d", "ttl: 1"),
        ("ttl: 1d", "ttl: 0s"),
        ("ttl: 1d", "codec: zst"),
        ("tiers:", "tiers: []\nload_policy: last\nx:"),
    ],
)
def test_schema_refuses_what_validate_refuses(
    kvtiers: Run, chain: Any, validator: Any, was: str, then: str
) -> None:
    text = README.replace(was, then, 1)
    if "#" in then:
        text = text.replace("/lib/kvtiers}", "\n  }")
    assert kvtiers("validate", chain(text))[0] == 2
    assert not validator.is_valid(yaml.safe_load(text))


def test_help_names_every_command(kvtiers: Run) -> None:
    status, out, _ = kvtiers("--help")
    assert status == 0 and out.isascii()
    assert all(f"\n  {command} " in out for command in ("validate", "config", "schema", "bench"))


def test_version(kvtiers: Run) -> None:
    from importlib.metadata import version

    assert kvtiers("--version") == (0, f"kvtiers {version('kvtiers')}\n", "")


@pytest.mark.parametrize("arguments", [(), ("validate",), ("vlidate", "x"), ("config", "a", "b")])
def test_a_command_line_that_is_not_understood(kvtiers: Run, arguments: tuple[str, ...]) -> None:
    status, out, err = kvtiers(*arguments)
    assert status == 2 and "Usage: kvtiers" in out + err and "Traceback" not in err


@pytest.mark.parametrize("arguments", [["--help"], ["schema"], ["validate", "FILE"]])
def test_no_command_loads_an_engine_or_a_client_to_talk(chain: Any, arguments: list[str]) -> None:
    heavy = ["torch", "vllm", "lmdb", "redis", "zstandard", "numpy", "transformers", "rich"]
    arguments = [str(chain(README)) if word == "FILE" else word for word in arguments]
    code = (
        f"import sys; sys.argv[1:] = {arguments!r}\n"
        "from tiers.cli.main import main\n"
        "try: main()\n"
        f"finally: print(*(set({heavy!r}) & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr.strip()) == (0, "")


@pytest.mark.parametrize(("typed", "completed"), [("va", "validate"), ("tune --bud", "--budget")])
def test_a_shell_completes_commands_and_options(typed: str, completed: str) -> None:
    words = f"kvtiers {typed}"
    script = f"""
        PATH={Path(KVTIERS).parent}:$PATH
        eval "$(kvtiers --show-completion)"
        COMP_WORDS=({words}) COMP_CWORD={words.count(" ")}
        _kvtiers_completion kvtiers
        echo "$COMPREPLY"
    """
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == f"{completed}\n"
