"""The remote tier over TLS in front of real servers: who is let in, and who is not."""

from __future__ import annotations

import logging
import socket
import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from spec.offloading import StoreContext
from tests.remote.redis.tls_front import Authority, TlsFront
from tests.support.clock import wait_for
from tests.support.redis_verbs import PAYLOAD, get, is_up, opened, put
from tests.support.servers import RedisServer, binaries, free_port
from tests.support.topologies import Sentinel, cluster
from tiers.errors import TierUnavailable, TierUnusable
from tiers.remote.spec import RedisSpec
from tiers.testing import make_key
from tiers.wrappers.guard import Guarded


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "strangers")


def url_of(front: TlsFront) -> str:
    return f"rediss://127.0.0.1:{front.port}"


def trusting(authority: Authority) -> dict[str, Any]:
    return {"tls": {"ca_file": str(authority.ca_file)}}


@pytest.mark.parametrize("payload_bytes", [4096, PAYLOAD, 2 << 20])
def test_blocks_travel_over_tls(
    shared_server: RedisServer, ours: Authority, payload_bytes: int
) -> None:
    keys = [make_key() for _ in range(20)]
    with (
        TlsFront(shared_server.port, ours.certify("127.0.0.1")) as front,
        opened(url_of(front), payload_bytes, **trusting(ours)) as store,
    ):
        assert put(store, *keys, payload_bytes=payload_bytes) == [True] * 20
        got = get(store, make_key(), *keys, payload_bytes=payload_bytes)
        assert got == [False] + [True] * 20
        store.drop(keys)
        assert store.has(keys) == [False] * 20


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("authority", "certificate is not accepted: .*(self.signed|unable to get)"),
        ("unknown", "certificate is not accepted"),
        ("host", "certificate is not accepted: .*(mismatch|not valid for)"),
        ("plain", "no TLS with this server"),
    ],
)
@pytest.mark.fault
def test_a_server_that_can_not_be_made_sure_of_is_unavailable(
    shared_server: RedisServer,
    ours: Authority,
    strangers: Authority,
    caplog: pytest.LogCaptureFixture,
    wrong: str,
    says: str,
) -> None:
    certificate = ours.certify("cache.internal" if wrong == "host" else "127.0.0.1")
    settings = {} if wrong == "unknown" else trusting(strangers if wrong == "authority" else ours)
    with TlsFront(shared_server.port, certificate) as front:
        port = shared_server.port if wrong == "plain" else front.port
        with opened(f"rediss://127.0.0.1:{port}", timeout="1s", **settings) as store:
            with pytest.raises(TierUnavailable, match=says):
                store.has([make_key()])
            guarded = Guarded(store, "remote")
            assert guarded.has([make_key()]) == [False]
            assert not is_up(guarded)
            assert "down" in caplog.text


def test_a_client_without_tls_gets_nothing_from_a_server_with_it(
    shared_server: RedisServer, ours: Authority
) -> None:
    with (
        TlsFront(shared_server.port, ours.certify("127.0.0.1")) as front,
        opened(f"redis://127.0.0.1:{front.port}") as store,
        pytest.raises(TierUnavailable),
    ):
        store.has([make_key()])


def test_unverified_tls_works_and_is_said_loudly(
    shared_server: RedisServer, strangers: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    key = make_key()
    with (
        TlsFront(shared_server.port, strangers.certify("elsewhere")) as front,
        opened(url_of(front), tls={"verify": False}) as store,
    ):
        assert put(store, key) == [True]
        assert get(store, key) == [True]
    assert [r.levelno for r in caplog.records if "verify is false" in r.message] == [
        logging.WARNING
    ]


@pytest.mark.fault
def test_an_authority_that_changes_while_an_engine_serves_is_read_again(
    shared_server: RedisServer, ours: Authority, strangers: Authority, tmp_path: Path
) -> None:
    file, key = tmp_path / "ca.pem", make_key()
    file.write_bytes(ours.ca_file.read_bytes())
    settings: dict[str, Any] = {"timeout": "2s", "tls": {"ca_file": str(file)}}
    with (
        TlsFront(shared_server.port, ours.certify("127.0.0.1")) as front,
        opened(url_of(front), **settings) as store,
    ):
        assert put(store, key) == [True]
        front.show(strangers.certify("127.0.0.1"))
        shared_server.client().client_kill_filter(_type="normal", skipme=True)

        def is_refused() -> bool:
            with pytest.raises(TierUnavailable) as error:
                store.has([key])
            return "certificate is not accepted" in str(error.value)

        wait_for(is_refused)  # the first may still find the connection that was cut
        file.write_bytes(strangers.ca_file.read_bytes())
        with suppress(TierUnavailable):
            store.has([key])
        assert get(store, key) == [True]


@pytest.mark.fault
@pytest.mark.parametrize("says_why", [True, False])
def test_a_certificate_of_ours_that_is_renewed_is_read_again(
    shared_server: RedisServer,
    ours: Authority,
    strangers: Authority,
    tmp_path: Path,
    says_why: bool,
) -> None:
    files = tmp_path / "tls.crt", tmp_path / "tls.key"

    def write(authority: Authority) -> None:
        for file, made in zip(files, authority.certify("engine"), strict=True):
            file.write_bytes(made.read_bytes())

    write(strangers)
    named = {"cert_file": str(files[0]), "key_file": str(files[1])}
    settings: dict[str, Any] = {"timeout": "2s", "tls": {"ca_file": str(ours.ca_file), **named}}
    certificate, key = ours.certify("127.0.0.1"), make_key()
    trusted, refuses = tmp_path / "trusted.pem", "" if says_why else "strangers"
    authorities = [ours] if says_why else [ours, strangers]
    trusted.write_bytes(b"".join(one.ca_file.read_bytes() for one in authorities))
    with (
        TlsFront(shared_server.port, certificate, client_ca=trusted, refuses=refuses) as front,
        opened(url_of(front), **settings) as store,
    ):
        with pytest.raises(TierUnavailable):
            store.has([key])
        write(ours)
        with suppress(TierUnavailable):
            store.has([key])
        assert put(store, key) == [True]


def test_client_certificates(
    shared_server: RedisServer, ours: Authority, strangers: Authority
) -> None:
    server_side = ours.certify("127.0.0.1")
    key = make_key()

    def with_certificate(authority: Authority) -> dict[str, Any]:
        cert_file, key_file = map(str, authority.certify("engine"))
        files = {"cert_file": cert_file, "key_file": key_file}
        return {"tls": {"ca_file": str(ours.ca_file), **files}}

    with TlsFront(shared_server.port, server_side, client_ca=ours.ca_file) as front:
        with opened(url_of(front), **with_certificate(ours)) as store:
            assert put(store, key) == [True]
            assert get(store, key) == [True]
        for settings in (trusting(ours), with_certificate(strangers)):
            with opened(url_of(front), **settings) as store, pytest.raises(TierUnavailable):
                store.has([key])


def test_files_of_tls_that_are_of_no_use_are_named_at_open(ours: Authority, tmp_path: Path) -> None:
    cert_file, key_file = map(str, ours.certify("engine"))
    other_key = str(ours.certify("other")[1])
    empty = tmp_path / "empty.pem"
    empty.touch()
    for tls, says in (
        ({"ca_file": "/no/such.pem"}, "no certificates in ca_file /no/such.pem"),
        ({"ca_file": str(empty)}, f"no certificates in ca_file {empty}"),
        ({"cert_file": "/no/such.pem"}, "no certificate and key in /no/such.pem"),
        ({"cert_file": cert_file, "key_file": other_key}, f"{cert_file} and {other_key}"),
    ):
        spec = RedisSpec.model_validate({"url": "rediss://cache", "tls": tls})
        with pytest.raises(TierUnusable, match=says):
            spec.open(StoreContext(payload_bytes=PAYLOAD))
    with pytest.raises(ValueError, match="add cert_file"):
        RedisSpec.model_validate({"url": "rediss://cache", "tls": {"key_file": key_file}})
    with pytest.raises(ValueError, match="whole path"):
        RedisSpec.model_validate({"url": "rediss://cache", "tls": {"ca_file": "ca.pem"}})
    with pytest.raises(ValueError, match="write rediss"):
        RedisSpec.model_validate({"url": "redis://cache", "tls": {}})


@pytest.mark.fault
def test_dripped_replies_over_tls_hold_no_verb(shared_server: RedisServer, ours: Authority) -> None:
    key = make_key()
    with (
        TlsFront(shared_server.port, ours.certify("127.0.0.1")) as front,
        opened(url_of(front), timeout="500ms", **trusting(ours)) as store,
    ):
        put(store, key)
        front.drip = 0.02
        ended = threading.Event()

        def work() -> None:
            with pytest.raises(TierUnavailable):
                get(store, key)
            ended.set()

        threading.Thread(target=work, daemon=True).start()
        assert ended.wait(20)
        front.drip = None
        assert get(store, key) == [True]


@pytest.mark.fault
def test_a_handshake_that_is_never_answered_is_unavailable() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        opened(f"rediss://127.0.0.1:{silent.getsockname()[1]}", timeout="300ms") as store,
        pytest.raises(TierUnavailable, match="handshake is not answered"),
    ):
        store.has([make_key()])


def test_a_cluster_over_tls(ours: Authority) -> None:
    keys = [make_key() for _ in range(30)]
    certificate = ours.certify("127.0.0.1")
    announced = [free_port() for _ in range(3)]
    with cluster(announced=announced) as nodes, ExitStack() as stack:
        for node, port in zip(nodes, announced, strict=True):
            stack.enter_context(TlsFront(node.port, certificate, port=port))
        url = f"rediss+cluster://127.0.0.1:{announced[1]}"
        with opened(url, **trusting(ours)) as store:
            assert put(store, *keys) == [True] * 30
            assert get(store, make_key(), *keys) == [False] + [True] * 30
        assert all(node.client().dbsize() for node in nodes)


def test_a_master_that_sentinel_names_over_tls(ours: Authority) -> None:
    key = make_key()
    certificate = ours.certify("127.0.0.1")
    with ExitStack() as stack:
        master = stack.enter_context(RedisServer(binaries()["valkey"]))
        front = TlsFront(master.port, certificate, also_plain=True)
        stack.enter_context(front)  # the sentinel itself speaks plain
        sentinel = stack.enter_context(Sentinel(front, "main"))
        before = stack.enter_context(TlsFront(sentinel.port, certificate))
        url = f"rediss+sentinel://127.0.0.1:{before.port}/main"
        store = stack.enter_context(opened(url, **trusting(ours)))
        assert put(store, key) == [True]
        assert get(store, key) == [True]
