"""RedisUrl: where a Redis or Valkey server is, as a value that never shows its password."""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Annotated, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

from pydantic import PlainSerializer, PlainValidator, SecretStr, WithJsonSchema

from spec.fields import checked, mask_secrets, refuse_variables

WHAT_WORKS = (
    "redis://host[:port][/db], unix:///path[?db=n], redis+cluster://host[:port][,host[:port]...] "
    "or redis+sentinel://host[:port][,host[:port]...]/service[/db]; over TLS, rediss in place of "
    "redis"
)
_NO_URL = f"not a URL; write it like {WHAT_WORKS}"
# No brackets are looked for: of Python's later versions urlsplit takes none beside other hosts. Nor
# does this quote text that it can't read, which may be a piece of a password.
_URL = re.compile(r"([a-z][a-z0-9+.-]*)://([^/?#]*)([^?#]*)(?:\?([^#]*))?(?:#(.*))?", re.S)
DEFAULT_PORT = 6379
DEFAULT_SENTINEL_PORT = 26379
_TLS = "rediss"
LOGIN = (
    "write the user as username: NAME and the place of the password as password: {file: "
    "/run/secrets/redis} or {env: NAME}, and the URL without them and their @"
)


class Endpoint(NamedTuple):
    """Where something listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def _is_loopback(endpoint: Endpoint) -> bool:
    try:
        return ip_address(endpoint.host).is_loopback
    except ValueError:
        return endpoint.host.lower() == "localhost"


@dataclass(frozen=True)
class RedisUrl:
    """A server on TCP or on a unix socket (`path`), a Cluster, or a master that Sentinel names.

    `endpoints`: the server, some nodes of the cluster, or the sentinels; none for a unix socket.
    `service`: what the sentinels call the master. User and password, which no written URL has,
    are the servers' own, not the sentinels'; `is_tls` holds for the sentinels too. str, repr and
    JSON show *** for the password; it is never part of an error message.
    """

    endpoints: tuple[Endpoint, ...] = ()
    path: str | None = None
    db: int = 0
    username: str | None = None
    password: SecretStr | None = None
    service: str | None = None
    is_cluster: bool = False
    is_tls: bool = False

    @property
    def is_local(self) -> bool:
        """Whether it is reached from its own host alone: by a unix socket, or as localhost."""
        return all(map(_is_loopback, self.endpoints))

    def __str__(self) -> str:
        user = self.username or ""
        who = f"{user}:***@" if self.password else f"{user}@" if user else ""
        if self.path is not None:
            return f"unix://{who}{self.path}?db={self.db}"
        where = f"{who}{','.join(map(str, self.endpoints))}"
        scheme = _TLS if self.is_tls else "redis"
        if self.is_cluster:
            return f"{scheme}+cluster://{where}"
        if self.service is not None:
            return f"{scheme}+sentinel://{where}/{self.service}/{self.db}"
        return f"{scheme}://{where}/{self.db}"

    def __repr__(self) -> str:
        return f"RedisUrl({str(self)!r})"


def parse_url(value: object) -> RedisUrl:
    """Read a URL as in WHAT_WORKS. Raises ValueError, whose message shows no password."""
    # As of a block of YAML, which ends in a newline.
    found = _URL.fullmatch(re.sub(r"[\t\r\n]", "", value) if isinstance(value, str) else "")
    if found is None:
        raise ValueError(_NO_URL)
    scheme, hosts, path, query, fragment = found.groups(default="")
    if not re.fullmatch(r"rediss?(\+cluster|\+sentinel)?|unix", scheme):
        raise ValueError(f"unknown scheme {scheme}://; what works is {WHAT_WORKS}")
    if "@" in found[0]:
        # Files are read by more people than servers are, and end up in version control.
        raise ValueError(LOGIN)
    if fragment:
        raise ValueError(_NO_URL)
    refuse_variables(found[0])
    base, _, kind = scheme.partition("+")
    db = _query(query)
    if scheme == "unix":
        return RedisUrl(path=_socket(hosts, path), db=db or 0)
    port = DEFAULT_SENTINEL_PORT if kind == "sentinel" else DEFAULT_PORT
    endpoints = tuple(_endpoint(host, port) for host in hosts.split(","))
    if len(endpoints) > 1 and not kind:
        raise ValueError(f"several hosts where one is meant; what works is {WHAT_WORKS}")
    path, service = path.removeprefix("/"), None
    if kind == "sentinel":
        service, _, path = path.partition("/")
        if not re.fullmatch(r"[\w.-]+", service, re.ASCII):
            raise ValueError(f"no name of a service; what works is {WHAT_WORKS}")
    if path and db is not None:
        raise ValueError("the db is given twice; write it after the host, like /0")
    db = _db(path) if path else db or 0
    is_cluster = kind == "cluster"
    if is_cluster and db:
        raise ValueError("a cluster has no db but 0")
    is_tls = base == _TLS
    return RedisUrl(endpoints, None, db, service=service, is_cluster=is_cluster, is_tls=is_tls)


def _endpoint(text: str, default_port: int) -> Endpoint:
    try:
        parts = urlsplit(f"//{text}")
    except ValueError:
        raise ValueError(_NO_URL) from None
    try:
        port = default_port if parts.port is None else parts.port
    except ValueError:
        port = 0
    if port == 0:
        raise ValueError("the port is not a number from 1 to 65535")
    return Endpoint(_host(parts.hostname), port)


def _host(host: str | None) -> str:
    if not host:
        raise ValueError(f"no host; write it like {WHAT_WORKS}")
    try:
        host.encode("idna")  # what a connection would do, and fail at, later
    except UnicodeError:
        raise ValueError("not a host name") from None
    if not host.isprintable() or any(char in " \\\"'<>" for char in host):
        raise ValueError("not a host name")
    return host


def _socket(host: str, path: str) -> str:
    if host:
        raise ValueError("a unix socket needs an absolute path; write it like unix:///path")
    path = unquote(path)
    if not path.strip("/") or "\0" in path:
        raise ValueError("no path; write it like unix:///path")
    return path


def _query(text: str) -> int | None:
    query = parse_qsl(text, keep_blank_values=True)
    unknown = sorted({name for name, _ in query} - {"db"})
    if any("pass" in name or "user" in name for name in unknown):
        raise ValueError(LOGIN)
    if unknown:
        raise ValueError(f"unknown URL parameter {unknown[0]!r}; only db is known")
    return _db(query[-1][1]) if query else None


def _db(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 5):
        raise ValueError("the db is not a number, like 0")
    return int(text)


def _validate(value: object) -> RedisUrl:
    shown = mask_secrets(value) if isinstance(value, str) else f"a {type(value).__name__}"
    return value if isinstance(value, RedisUrl) else checked(parse_url, value, shown)


RedisUrlField = Annotated[
    RedisUrl,
    PlainValidator(_validate),
    PlainSerializer(str),
    WithJsonSchema(
        {
            "type": "string",
            "pattern": r"^(rediss?(\+cluster|\+sentinel)?|unix)://",
            "examples": [
                "redis://cache.internal:6379/0",
                "rediss://cache.internal:6380/0",
                "unix:///run/valkey.sock?db=0",
                "redis+cluster://node1:6379,node2:6379",
                "redis+sentinel://host1:26379,host2:26379/main/0",
            ],
        }
    ),
]
"""A RedisUrl in a spec, written as a string."""
