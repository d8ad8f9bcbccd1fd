"""ObjectSpec: which places it takes, what it says of the others, and that no secret shows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from spec.offloading import StoreContext
from tiers.errors import TierUnusable
from tiers.remote.object_spec import ObjectSpec

SECRET = "s3same"
LACKING = """
import os, resource, sys, threading
from spec.offloading import StoreContext
from tiers.errors import TierNotOpen
from tiers.remote.object_spec import ObjectSpec

spec = ObjectSpec(url=f"file://{sys.argv[1]}")
limit, start = resource.getrlimit(resource.RLIMIT_NOFILE), threading.Thread.start
# What it imports needs descriptors, too.
import tiers.remote.object.obstore_bucket, tiers.remote.packs.pack_store

def refuse(self):
    raise RuntimeError("can't start new thread")

for lacks in ("descriptors", "threads"):
    if lacks == "threads":
        threading.Thread.start = refuse
    else:
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, limit[1]))
    try:
        spec.open(StoreContext(512))
    except TierNotOpen as error:
        print(error)
    resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    threading.Thread.start = start
store = spec.open(StoreContext(512))
print(store.has([bytes(40)]))
store.close()
"""


def spec(**settings: Any) -> ObjectSpec:
    return ObjectSpec.model_validate(settings)


@pytest.mark.parametrize(
    ("url", "local"),
    [
        ("s3://kv-cache/llama/8b", False),
        ("s3://kv-cache", False),
        ("gs://kv/x_1", False),
        ("az://kv", False),
        ("file:///mnt/kv", None),
    ],
)
def test_places(url: str, local: bool | None) -> None:
    made = spec(url=url)
    assert made.url == url and made.host_local is local


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"url": "s3:///x"}, "s3://bucket/prefix"),
        ({"url": "http://host/bucket"}, "s3://bucket/prefix"),
        ({"url": "file://host/mnt"}, "whole path"),
        ({"url": f"s3://id:{SECRET}@kv"}, "secrets"),
        ({"url": "s3://kv?x=1"}, "query"),
        ({"url": "s3://kv/a b"}, "letters"),
        ({"url": "s3://kv", "options": {"secret_access_key": SECRET}}, "secrets"),
        ({"url": "s3://kv", "options": {"account_key": SECRET}}, "secrets"),
        ({"url": "s3://kv", "options": {"endpoint": f"https://x/?sig={SECRET}"}}, "secrets"),
        ({"url": "s3://kv", "options": {"proxy_url": f"http://{SECRET}@proxy"}}, "secrets"),
        ({"url": "s3://kv", "options": {"proxy_url": f"kv:{SECRET}@proxy:80"}}, "secrets"),
        ({"url": "s3://kv", "secrets": {"token": SECRET}}, "env"),
        ({"url": "s3://kv", "endpoint": "ftp://x"}, "http"),
        ({"url": "s3://kv", "capacity": "much"}, "capacity"),
        ({"url": "s3://kv", "path": "/kv"}, "path"),
        ({"url": "file:///kv", "endpoint": "http://x"}, "a folder, which has none"),
        ({"url": "file:///kv", "region": "eu-west-1"}, "a folder, which has none"),
        ({"url": "file:///kv", "options": {"x": "y"}}, "a folder, which has none"),
        ({"url": "file:///kv", "secrets": {"token": {"env": "PATH"}}}, "a folder, which has none"),
    ],
)
def test_what_it_refuses_and_no_secret_of_it(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError) as caught:
        spec(**settings)
    text = str(caught.value.errors(include_input=False, include_url=False))
    assert said in text and SECRET not in text


@pytest.mark.parametrize("value", ["ops@corp.example", "kvtiers (ops@corp.example)", "mail: a@b"])
def test_an_address_of_mail_is_no_secret(value: str) -> None:
    assert spec(url="s3://kv", options={"user_agent": value}).options == {"user_agent": value}


def test_no_secret_is_in_a_spec_or_in_what_its_client_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore")
    monkeypatch.setenv("KV_SECRET", SECRET)
    secrets = {"secret_access_key": {"env": "KV_SECRET"}, "no_such_setting": {"env": "KV_SECRET"}}
    made = spec(url="s3://kv", secrets=secrets)
    assert SECRET not in made.model_dump_json() + repr(made)
    with pytest.raises(TierUnusable) as caught:
        made.open(StoreContext(4096))
    assert "s3://kv" in str(caught.value) and SECRET not in str(caught.value)


def test_without_the_extra_it_names_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delitem(sys.modules, "tiers.remote.object.obstore_bucket", raising=False)
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(TierUnusable, match=r"kvtiers\[object\]"):
        spec(url=f"file://{tmp_path}").open(StoreContext(4096))


@pytest.mark.fault
def test_a_process_without_descriptors_or_threads_for_obstore_has_it_later(tmp_path: Path) -> None:
    """obstore tries to begin its own once in a process, and would panic for ever."""
    script = [sys.executable, "-c", LACKING, str(tmp_path)]
    ran = subprocess.run(script, capture_output=True, text=True, timeout=60, check=False)
    assert "panicked" not in ran.stderr, ran.stderr
    assert "Too many open files" in ran.stdout and "can't start new thread" in ran.stdout
    assert ran.stdout.endswith("[False]\n"), ran.stdout + ran.stderr
