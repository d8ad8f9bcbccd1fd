"""The remote tier's settings."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, NoReturn

from pydantic import AfterValidator, BaseModel, Field, SecretStr, ValidationInfo, field_validator

from spec.fields import ByteSize, Duration
from spec.findings import DoctorFinding
from spec.offloading import StoreContext, StoreSpec
from spec.secret import Secret, SecretField
from tiers.remote.redis.url import RedisUrl, RedisUrlField, parse_url

if TYPE_CHECKING:
    from tiers.remote.redis.pools import ConnectionSettings
    from tiers.remote.redis.records import RedisRecords
    from tiers.remote.redis.redis_store import RedisStore

logger = logging.getLogger(__name__)


def _whole(path: str) -> str:
    if not path.startswith("/") or "\0" in path:
        raise ValueError("write the file's whole path, like /etc/ssl/redis/ca.pem")
    return path


PemFile = Annotated[str, AfterValidator(_whole)]


class TlsSpec(BaseModel, frozen=True, extra="forbid"):
    """Settings of TLS, for URLs with a scheme of rediss, rediss+cluster or rediss+sentinel."""

    ca_file: PemFile | None = Field(
        default=None,
        examples=["/etc/ssl/redis/ca.pem"],
        description="PEM file of the authorities that the server's certificate is checked "
        "against. Unset: the system's.",
    )
    cert_file: PemFile | None = Field(
        default=None, description="PEM file of our own certificate, if the server asks for one."
    )
    key_file: PemFile | None = Field(
        default=None, description="PEM file of its private key. Unset: it is in cert_file."
    )
    verify: bool = Field(
        default=True,
        description="Refuse a server whose certificate no authority confirms or that names another "
        "host. false: anybody on the network path can read and change blocks.",
    )

    @field_validator("key_file", mode="after")
    @classmethod
    def _has_certificate(cls, key_file: str | None, info: ValidationInfo) -> str | None:
        if key_file is not None and info.data.get("cert_file", "") is None:
            raise ValueError("add cert_file, the certificate that this key belongs to")
        return key_file


def context_of(spec: TlsSpec) -> ssl.SSLContext:
    """The TLS of connections: version 1.2 at least, the named authorities and no others.
    Raises ValueError, which names the file that can't be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # verifies, the host's name too
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if not spec.verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    try:
        if spec.ca_file is None:
            context.load_default_certs()
        else:
            context.load_verify_locations(spec.ca_file)
    except OSError as error:
        raise ValueError(f"tls: no certificates in ca_file {spec.ca_file} ({error})") from None
    if spec.cert_file is not None:
        try:
            context.load_cert_chain(spec.cert_file, spec.key_file, password=_no_passphrase)
        except (OSError, ValueError) as error:
            files = " and ".join(filter(None, (spec.cert_file, spec.key_file)))
            raise ValueError(f"tls: no certificate and key in {files} ({error})") from None
    return context


def _no_passphrase() -> NoReturn:
    # Without it OpenSSL would ask whoever sits at the terminal, and wait.
    raise ValueError("the key is encrypted; keys with a passphrase are not supported")


SOCKET = "socket"
"""What the server of a tier that was moved listens on, in its folder."""


class RedisSpec(StoreSpec):
    """A Redis or Valkey server, Cluster or Sentinel service that several engines share."""

    identity: ClassVar[tuple[str, ...]] = ("url", "key_prefix")
    verifies: ClassVar[bool] = True

    type: Literal["redis"] = "redis"
    url: RedisUrlField = Field(
        description="The server: redis://host:port/db, unix:///path, "
        "redis+cluster://host:port,... or redis+sentinel://host:port,.../service/db. Over TLS "
        "write rediss in place of redis."
    )
    username: Annotated[str, Field(min_length=1)] | None = Field(
        default=None, description="The user of the server's access control list; needs password."
    )
    password: SecretField | None = Field(
        default=None,
        validate_default=True,
        description="Where to read the password: {file: /run/secrets/redis} or "
        "{env: REDIS_PASSWORD}. A file is read again when the server refuses what was read.",
    )
    tls: TlsSpec | None = Field(
        default=None,
        description="Settings of TLS, optional; allowed with a rediss URL only. Files are read "
        "again when a certificate is refused.",
    )
    ttl: Duration | None = Field(
        default=None,
        description="Keep a block this long after it was last stored or offered; a "
        "load does not renew it. Unset: until the server evicts it.",
    )
    maxmemory: ByteSize | None = Field(
        default=None,
        description="Bytes that the server keeps for blocks before it evicts some, as its own "
        "maxmemory says. It changes nothing here; curves, replays and searches go by it.",
    )
    timeout: Duration = Field(
        default=1.0,
        description="Limit for one request to the server, connecting included; half of it for one "
        "node of a cluster. A transfer has one second more for every 32 MiB.",
    )
    key_prefix: Annotated[str, Field(pattern=r"^[!-~]+$", max_length=128)] = Field(
        default="kvtiers", description="Begin every key with this and a colon."
    )
    codec: Literal["none", "zstd", "byteplanes", "auto"] = Field(
        default="none",
        description="Compress blocks without loss, for links slower than about 700 MB/s. "
        "byteplanes: for bfloat16 and float16. auto: byteplanes where it pays.",
    )

    @field_validator("password", mode="after")
    @classmethod
    def _whole_login(cls, password: Secret | None, info: ValidationInfo) -> Secret | None:
        if password is None and info.data.get("username"):
            raise ValueError("add password, like {file: /run/secrets/redis}, to the username")
        return password

    @field_validator("tls", mode="after")
    @classmethod
    def _goes_with_url(cls, tls: TlsSpec | None, info: ValidationInfo) -> TlsSpec | None:
        url = info.data.get("url")
        if tls is not None and isinstance(url, RedisUrl) and not url.is_tls:
            raise ValueError("write rediss in the URL in place of redis, or remove this")
        return tls

    @property
    def host_local(self) -> bool:
        return self.url.is_local

    def scratch(self, folder: Path) -> RedisSpec:
        """The tier over a server that listens on `folder/socket`; the tool starts one."""
        login = {"tls": None, "username": None, "password": None}
        return self.model_copy(update={"url": parse_url(f"unix://{folder}/{SOCKET}"), **login})

    def open(self, site: StoreContext) -> RedisStore:
        """Open the store, without connecting. Raises TierUnusable when a block is larger than a
        Redis value can be, or when the password or a file of TLS can't be read."""
        from tiers.codec import Encoder
        from tiers.remote.redis.redis_store import RedisStore

        return RedisStore(
            self.connection,
            site.payload_bytes,
            Encoder(self.codec, self.tier_name),
            key_prefix=self.key_prefix,
            timeout=self.timeout,
            ttl=self.ttl,
        )

    def records(self) -> RedisRecords:
        from tiers.remote.redis.records import RedisRecords

        return RedisRecords(self.connection, self.key_prefix, self.timeout, self.ttl)

    def marks(self) -> RedisRecords:
        return self.records()

    def connection(self) -> ConnectionSettings:
        """Make the settings of connections. Raises TierUnusable when the password or a file of TLS
        can't be read."""
        from tiers.errors import TierUnusable
        from tiers.remote.redis.pools import ConnectionSettings

        url = self.url
        try:
            if self.password is not None:
                secret = SecretStr(self.password.reveal())
                url = replace(url, username=self.username, password=secret)
            return ConnectionSettings(url, self._tls_context())
        except ValueError as error:
            raise TierUnusable(str(error)) from None

    def examine(self) -> Iterator[DoctorFinding]:
        from tiers.remote.redis.examine import PIECE, ExaminedTier, examine

        def opened(ttl: float | None) -> RedisStore:
            return self.model_copy(update={"ttl": ttl, "codec": "none"}).open(StoreContext(PIECE))

        cert_file = None if self.tls is None else self.tls.cert_file
        names = self.username or "default", self.key_prefix, cert_file
        return examine(ExaminedTier(self.connection(), self.timeout, self.ttl, *names, opened))

    def _tls_context(self) -> ssl.SSLContext | None:
        """The TLS of connections, or None. Raises ValueError for an unreadable file."""
        if not self.url.is_tls:
            return None
        tls = self.tls or TlsSpec()
        if not tls.verify:
            logger.warning(
                "tier %s: tls.verify is false: anybody on the network path to %s can pose as the "
                "server, and read and change blocks",
                self.tier_name,
                self.url,
            )
        return context_of(tls)
