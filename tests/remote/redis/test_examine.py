"""The remote tier's findings, on real servers that are wrong; nothing is left on them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from spec.findings import DoctorFinding
from tests.remote.redis.tls_front import Authority, TlsFront
from tests.support.servers import RedisServer, binaries, free_port
from tests.support.topologies import Sentinel, cluster
from tiers.remote import trial
from tiers.remote.spec import RedisSpec

SECRET = "hunter2-hunter2"
ACL = ("~kvtiers:*", "+get", "+set", "+exists", "+touch", "+pexpire", "+unlink")


@pytest.fixture(scope="module")
def valkey() -> Iterator[RedisServer]:
    """A server whose settings tests change, each what it needs."""
    with RedisServer(binaries()["valkey"], maxmemory="200mb") as server:
        yield server


@pytest.fixture
def password(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "secret").write_text(SECRET)
    return {"file": str(tmp_path / "secret")}


def findings(url: str, **settings: Any) -> list[DoctorFinding]:
    found = list(RedisSpec.model_validate({"url": url, "timeout": "5s", **settings}).examine())
    assert SECRET not in repr(found)
    return found


def by_gravity(url: str, **settings: Any) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for each in findings(url, **settings):
        found.setdefault(each.gravity, []).append(each.found)
    return found


def test_a_good_server_is_left_as_it_was(
    valkey: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client: Any = valkey.client()
    client.config_set("maxmemory-policy", "allkeys-lru")
    client.set("other", "value")
    for url in (valkey.url, valkey.unix_url):
        found = by_gravity(url)
        assert set(found) == {"fine"}, found
        version, memory, trips, rates = found["fine"]
        assert ": valkey " in version and "of 200MiB used, policy allkeys-lru" in memory
        assert "a look-up takes" in trips and "GB/s" in rates
        assert client.keys("*") == [b"other"]
    monkeypatch.setattr(trial, "SLOWEST", math.inf)
    (slow,) = by_gravity(valkey.url)["warning"]
    assert "one at a time: requests would time out or miss" in slow


@pytest.mark.parametrize(
    ("memory", "policy", "ttl", "gravity", "says"),
    [
        ("0", "allkeys-lru", "1d", "warning", "maxmemory is not set"),
        ("200mb", "noeviction", "1d", "warning", "noeviction: once full it refuses to store"),
        ("200mb", "volatile-lru", None, "warning", "keys with a ttl alone, and this tier's have"),
    ],
)
def test_memory_and_policy_against_ttl(
    valkey: RedisServer, memory: str, policy: str, ttl: str | None, gravity: str, says: str
) -> None:
    client: Any = valkey.client()
    client.config_set("maxmemory", memory)
    client.config_set("maxmemory-policy", policy)
    found = by_gravity(valkey.url, ttl=ttl)
    assert set(found) == {"fine", gravity} and len(found[gravity]) == 1
    assert says in found[gravity][0]
    if policy == "volatile-lru":
        assert set(by_gravity(valkey.url, ttl="1d")) == {"fine"}


def test_a_full_server_that_evicts_nothing(valkey: RedisServer) -> None:
    client: Any = valkey.client()
    client.config_set("maxmemory-policy", "noeviction")
    client.config_set("maxmemory", client.info("memory")["used_memory"] + (256 << 10))
    try:
        (error,) = [each for each in findings(valkey.url) if each.gravity == "error"]
    finally:
        client.config_set("maxmemory", "200mb")
    assert error.found == "it refused 1 of 1 MiB: it is out of memory"
    assert "allkeys-lru" in error.change


def test_the_least_that_a_user_may_do(valkey: RedisServer, password: dict[str, str]) -> None:
    client: Any = valkey.client()
    client.execute_command("ACL", "SETUSER", "engine", "reset", "on", f">{SECRET}", *ACL)
    settings = {"username": "engine", "password": password}
    found = by_gravity(valkey.url, ttl="1d", **settings)
    assert set(found) == {"fine", "can't tell"}, found
    assert "INFO is refused (" in found["can't tell"][0]
    client.execute_command("ACL", "SETUSER", "engine", "-pexpire")
    assert "error" not in by_gravity(valkey.url, **settings)  # without a ttl none is renewed
    client.execute_command("ACL", "SETUSER", "engine", "-touch")
    found = by_gravity(valkey.url, **settings)
    assert "error" not in found and "TOUCH is refused" in found["warning"][0]
    for missing in ("get", "set", "exists", "unlink", "pexpire"):
        user = ("ACL", "SETUSER", "engine", "reset", "on", f">{SECRET}", *ACL, f"-{missing}")
        client.execute_command(*user)
        (error,) = [
            each for each in findings(valkey.url, ttl="1d", **settings) if each.gravity == "error"
        ]
        assert f"'{missing}'" in error.found.lower()
        assert error.change == f"ACL SETUSER engine {' '.join(ACL)}"
    assert [key for key in client.keys("*") if key != b"other"] == []


def test_keys_under_another_prefix(valkey: RedisServer, password: dict[str, str]) -> None:
    client: Any = valkey.client()
    client.execute_command("ACL", "SETUSER", "engine", "reset", "on", f">{SECRET}", *ACL)
    settings = {"username": "engine", "password": password, "key_prefix": "kv"}
    (error,) = [each for each in findings(valkey.url, **settings) if each.gravity == "error"]
    assert "ACL SETUSER engine ~kv:* " in error.change


def test_servers_that_do_not_let_us_in(password: dict[str, str], tmp_path: Path) -> None:
    with RedisServer(binaries()["valkey"], password=SECRET) as server:
        (error,) = findings(server.url)
        assert (error.gravity, "refused the user or password" in error.found) == ("error", True)
        assert "username and password" in error.change
        assert "error" not in by_gravity(server.url, password=password)
        server.hang()
        (error,) = findings(server.url, password=password, timeout="500ms")
        assert error.gravity == "error" and "no answer within 500ms" in error.found
        server.resume()
    (error,) = findings(f"redis://127.0.0.1:{free_port()}")
    assert error.gravity == "error" and "Connection refused" in error.found


def test_dates_of_certificates(shared_server: RedisServer, tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ours")
    certificate = authority.certify("127.0.0.1")  # for a day
    url, tls = "rediss://127.0.0.1:{}", {"ca_file": str(authority.ca_file)}
    own = {**tls, "cert_file": str(certificate[0]), "key_file": str(certificate[1])}
    with TlsFront(shared_server.port, certificate) as front:
        found = by_gravity(url.format(front.port), tls=own)
        ours, theirs = sorted(text for text in found["warning"] if "valid for" in text)
        assert "server's certificate is valid for 1 days" in ours
        assert f"cert_file {certificate[0]} is valid for 1 days" in theirs
        unknown = by_gravity(url.format(front.port), tls={"verify": False})["can't tell"]
        assert "until when" in unknown[0]
        (error,) = findings(url.format(shared_server.port), tls=tls, timeout="500ms")
        assert "no TLS with this server" in error.found and "tls.ca_file" in error.change
        # By one that has ended a server may have refused us.
        date, error = findings(url.format(shared_server.port), tls=own, timeout="500ms")
        assert "cert_file" in date.found and error.gravity == "error"
    announced = [free_port() for _ in range(3)]
    with cluster(announced=announced) as nodes, ExitStack() as stack:
        for node, port in zip(nodes, announced, strict=True):
            stack.enter_context(TlsFront(node.port, certificate, port=port))
        found = by_gravity(f"rediss+cluster://127.0.0.1:{announced[1]}", tls=own)
        assert sum("cert_file" in text for text in found["warning"]) == 1
        assert sum("server's certificate" in text for text in found["warning"]) == 3


def test_a_cluster_with_a_node_down() -> None:
    with cluster(masters=3, cluster_require_full_coverage="no") as nodes:
        url = f"redis+cluster://127.0.0.1:{nodes[0].port}"
        assert "3 masters have all hash slots" in by_gravity(url)["fine"]
        (error, *_) = [each for each in findings(nodes[0].url) if each.gravity == "error"]
        assert "is a node of a Cluster" in error.found and "redis+cluster://" in error.change
        nodes[1].kill()
        found = by_gravity(url)
        assert any("Connection refused" in text for text in found["warning"])
        nodes[2].client().flushall()
        assert nodes[0].client().keys("*") == nodes[2].client().keys("*") == []


def test_the_master_that_a_sentinel_names(valkey: RedisServer) -> None:
    with Sentinel(valkey, "blocks") as sentinel:
        url = f"redis+sentinel://127.0.0.1:{sentinel.port}/blocks/0"
        assert "error" not in by_gravity(url)
        (error,) = findings(url.replace("blocks", "others"))
        assert error.gravity == "error" and "no sentinel names a master" in error.found
