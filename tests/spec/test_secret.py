"""Secret: read from where a chain says, refused with a line that helps, and shown by nobody."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spec.load import SpecError, load_chain
from spec.secret import parse_secret

SECRET = "s3same-0pen"


def chain(password: str) -> str:
    return (
        f"version: 1\ntiers:\n  - type: redis\n    url: redis://cache\n    password: {password}\n"
    )


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUR_SECRET", SECRET)
    monkeypatch.setenv("OUR_EMPTY", "")
    monkeypatch.delenv("OUR_MISSING", raising=False)


@pytest.mark.parametrize("text", [SECRET, f"{SECRET}\n", f"{SECRET}\r\n"])
def test_a_file_gives_the_secret_without_its_line_end(tmp_path: Path, text: str) -> None:
    (tmp_path / "secret").write_bytes(text.encode())
    assert parse_secret({"file": str(tmp_path / "secret")}).reveal() == SECRET


def test_a_secret_is_read_anew_when_it_is_revealed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret").write_text("old")
    in_file, in_env = (
        parse_secret({"file": str(tmp_path / "secret")}),
        parse_secret({"env": "OUR_SECRET"}),
    )
    (tmp_path / "secret").write_text("new")
    monkeypatch.setenv("OUR_SECRET", "newer")
    assert (in_file.reveal(), in_env.reveal()) == ("new", "newer")


@pytest.mark.parametrize(
    ("password", "says"),
    [
        ("{env: OUR_MISSING}", "set the environment variable OUR_MISSING, which is not set here"),
        ("{env: OUR_EMPTY}", "write the secret to the environment variable OUR_EMPTY, which holds"),
        ("{file: /no/such}", "let the file /no/such be read, which failed: No such file"),
        ("{file: /}", "let the file / be read, which failed: Is a directory"),
        ("{file: /dev/zero}", "name another than the file /dev/zero"),
        ("{file: /dev/null}", "write the secret to the file /dev/null, which holds none"),
        ("{file: secret}", "write the file's whole path"),
        ("{file: /bin/sh}", "save the file /bin/sh as UTF-8, which it is not"),
        (SECRET, "write {file: /run/secrets/name} or {env: NAME}"),
        (f"[{SECRET}]", "write {file: /run/secrets/name} or {env: NAME}"),
        ("{}", "write {file: /run/secrets/name} or {env: NAME}"),
        ("{file: /a, env: B}", "write {file: /run/secrets/name} or {env: NAME}"),
        (f"{{value: {SECRET}}}", "write {file: /run/secrets/name} or {env: NAME}"),
        ("{env: A=B}", "write {file: /run/secrets/name} or {env: NAME}"),
        ("{env: 7}", "write {file: /run/secrets/name} or {env: NAME}"),
    ],
)
def test_what_is_no_secret_is_one_line_with_file_line_and_key(
    tmp_path: Path, password: str, says: str
) -> None:
    path = tmp_path / "chain.yaml"
    path.write_text(chain(password))
    with pytest.raises(SpecError) as caught:
        load_chain(path)
    [line] = str(caught.value).splitlines()
    assert line.startswith(f"{path}:5: tiers[0].password: found ")
    assert says in line
    assert SECRET not in f"{caught.value!r} {caught.value.__cause__!r} {line}"


@pytest.mark.parametrize("where", [{"env": "OUR_SECRET"}, {"file": "{}"}])
def test_a_chain_keeps_where_the_secret_is_and_never_what_it_is(
    tmp_path: Path, where: dict[str, Any]
) -> None:
    (tmp_path / "secret").write_text(SECRET)
    where = {kind: text.format(tmp_path / "secret") for kind, text in where.items()}
    path = tmp_path / "chain.yaml"
    path.write_text(chain(json.dumps(where)))
    made = load_chain(path)
    dumped = made.model_dump(mode="json")
    assert dumped["tiers"][0]["password"] == where
    assert load_chain({"version": 1, "tiers": [dumped["tiers"][0]]}).tiers == made.tiers
    for shown in (str(made), repr(made), str(made.model_dump()), made.model_dump_json()):
        assert SECRET not in shown
