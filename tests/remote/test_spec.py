"""RedisSpec: which URLs it takes, what it says of the others, and that no password shows."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from typing import Any

import pytest
from pydantic import ValidationError

from spec.fields import mask_secrets
from spec.offloading import StoreContext
from tiers.errors import TierUnusable
from tiers.remote.spec import RedisSpec

SECRET = "s3same"
CLUSTER = [("one", 7001), ("two", 6379), ("::1", 7002)]
PLACES = [
    "redis://{}cache:6379/0",
    "unix://{}/run/valkey.sock",
    "redis+cluster://{}one,two",
    "redis+sentinel://{}one,two/main",
    "rediss://{}cache:6379/0",
    "rediss+cluster://{}one,two",
    "rediss+sentinel://{}one,two/main",
]


def spec(**settings: Any) -> RedisSpec:
    return RedisSpec.model_validate(settings)


@pytest.mark.parametrize(
    ("text", "endpoints", "path", "db"),
    [
        ("redis://cache.internal:6379/3", [("cache.internal", 6379)], None, 3),
        ("redis://cache", [("cache", 6379)], None, 0),
        ("redis://cache/", [("cache", 6379)], None, 0),
        ("redis://cache?db=2", [("cache", 6379)], None, 2),
        ("redis://[::1]:7000/1", [("::1", 7000)], None, 1),
        ("unix:///run/valkey.sock", [], "/run/valkey.sock", 0),
        ("unix:///run/a%20b.sock?db=4", [], "/run/a b.sock", 4),
        ("redis+cluster://one:7001,two,[::1]:7002", CLUSTER, None, 0),
        ("redis+sentinel://one,two:7/main/3", [("one", 26379), ("two", 7)], None, 3),
        ("redis+sentinel://one/main?db=3", [("one", 26379)], None, 3),
        ("rediss://cache/3", [("cache", 6379)], None, 3),
        ("rediss+cluster://one:7001,two,[::1]:7002", CLUSTER, None, 0),
        ("rediss+sentinel://one,two:7/main/3", [("one", 26379), ("two", 7)], None, 3),
    ],
)
def test_what_a_url_says(
    text: str, endpoints: list[tuple[str, int]], path: str | None, db: int
) -> None:
    url = spec(url=text).url
    assert (list(url.endpoints), url.path, url.db) == (endpoints, path, db)
    assert (url.username, url.password) == (None, None)
    assert url.is_cluster == ("cluster" in text)
    assert url.is_tls == text.startswith("rediss")
    assert url.service == ("main" if "sentinel" in text else None)
    assert spec(url=str(url)).url == url


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("login", ["me:p%40ss@", ":pw@", "me@", ":@", "@", "a:b@c@", "me:a/b@"])
def test_a_url_with_a_user_or_password_is_told_where_they_go(place: str, login: str) -> None:
    with pytest.raises(ValidationError, match=r"write the user as username: NAME") as caught:
        spec(url=place.format(login))
    assert "password: {file: /run/secrets/redis}" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("valkeys://cache:6379/0", "unknown scheme valkeys://.*redis://.*over TLS, rediss"),
        ("rediss+unix:///path", "unknown scheme rediss\\+unix://"),
        ("redis+sentinel://cache:26379", "no name of a service.*redis\\+sentinel://"),
        ("redis+sentinel://cache:26379/a b", "no name of a service"),
        ("redis+sentinel://a,b:port/main", "port is not a number"),
        ("redis+cluster://cache:6379/3", "a cluster has no db but 0"),
        ("redis+cluster://a:6379,,b:6379", "no host"),
        ("redis://a:6379,b:6379/0", "several hosts.*redis\\+cluster://"),
        ("http://cache", "unknown scheme http://.*redis://"),
        ("cache:6379", "not a URL.*redis://"),
        ("", "not a URL"),
        ("redis://", "no host"),
        ("redis://:6379", "no host"),
        ("redis://cache:port", "port is not a number"),
        ("redis://cache:70000", "port is not a number"),
        ("redis://cache:0", "port is not a number"),
        ("redis://cache/first", "db is not a number"),
        ("redis://cache/-1", "db is not a number"),
        ("redis://cache/1?db=2", "db is given twice"),
        ("redis://cache?timeout=3", "unknown URL parameter 'timeout'"),
        ("redis://ca che", "not a host name"),
        ("redis://" + "a" * 70, "not a host name"),
        ("redis://[::1", "not a URL"),
        ("unix://run/valkey.sock", "absolute path"),
        ("unix://", "no path"),
    ],
)
def test_what_a_url_must_not_be(text: str, says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        spec(url=text)


@pytest.mark.parametrize("value", [None, 6379, {"host": "cache"}, [], b"redis://cache"])
def test_a_url_is_text(value: object) -> None:
    with pytest.raises(ValidationError, match="not a URL"):
        spec(url=value)


@pytest.mark.parametrize(
    "text",
    [
        "redis://:{}@cache:port/0",
        "rediss://me:{}@cache:6379/x",
        "redis://:{}@:6379",
        "redis://:{}@/cache:6379/x",
        "redis://{}@cache",
        "redis://:a/{}@cache",
        "redis://:a#{}@cache",
        "redis://:a?{}@cache",
        "redis://:a@{}@cache",
        "redis://:a b{}@cache:x",
        "redis+cluster://:{}@a,b:x",
        "redis+sentinel://:{}@a,b",
        "redis://:{}@ca che",
        "redis://cache?password={}",
        "unix:///run/valkey.sock?password={}",
        "unix://:{}@run/valkey.sock",
    ],
)
def test_no_error_shows_the_password(text: str) -> None:
    with pytest.raises(ValidationError) as caught:
        spec(url=text.format(SECRET))
    shown = f"{caught.value} {caught.value!r} {caught.value.errors()} {caught.value.json()}"
    assert SECRET not in shown
    assert SECRET not in mask_secrets(text.format(SECRET))


def test_a_spec_never_shows_the_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIVEN", SECRET)
    login = {"username": "me", "password": {"env": "GIVEN"}}
    settings = spec(url="redis://cache:6379/0", ttl="1d", **login)
    store = settings.open(StoreContext(payload_bytes=4096))
    shown = [str(settings), repr(settings), str(settings.url), repr(settings.url)]
    shown += [str(settings.model_dump()), settings.model_dump_json(), str(store), repr(store)]
    assert not [text for text in shown if SECRET in text]
    store.close()


def test_a_spec_survives_copies_between_processes() -> None:
    settings = spec(url="redis://cache:6379/0", ttl="1d")
    assert pickle.loads(pickle.dumps(settings)) == settings
    assert copy.deepcopy(settings) == settings


def test_settings_and_their_defaults() -> None:
    settings = spec(url="redis://cache")
    assert (settings.type, settings.tier_name) == ("redis", "redis")
    assert (settings.ttl, settings.timeout, settings.codec) == (None, 1.0, "none")
    assert spec(url="redis://cache", ttl="1d", timeout="250ms").ttl == 86400
    for wrong in (
        {"ttl": 5},
        {"timeout": "0s"},
        {"codec": "gzip"},
        {"key_prefix": "a b"},
        {"x": 1},
    ):
        with pytest.raises(ValidationError):
            spec(url="redis://cache", **wrong)
    assert RedisSpec.model_json_schema()["properties"]["url"]["type"] == "string"


def test_a_server_that_is_down_is_no_error_at_open() -> None:
    store = spec(url="redis://192.0.2.1:6379").open(StoreContext(payload_bytes=4096))
    store.close()


def test_blocks_no_redis_value_can_hold_are_refused_at_open() -> None:
    with pytest.raises(TierUnusable, match="536870912"):
        spec(url="redis://cache").open(StoreContext(payload_bytes=512 << 20))


def test_reading_a_spec_loads_no_client() -> None:
    code = "import sys, tiers.remote.spec; sys.exit({'redis', 'torch', 'xxhash'} & {*sys.modules})"
    code = code.replace("sys.exit(", "assert not (")
    subprocess.run([sys.executable, "-c", code], check=True)
