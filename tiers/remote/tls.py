"""TLS: how a server is made sure of, and who we are to it."""

from __future__ import annotations

import ssl
from typing import Annotated, NoReturn

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator


def _whole(path: str) -> str:
    if not path.startswith("/") or "\0" in path:
        raise ValueError("write the file's whole path, like /etc/ssl/redis/ca.pem")
    return path


PemFile = Annotated[str, AfterValidator(_whole)]


class TlsSpec(BaseModel):
    """Settings of TLS, for URLs with a scheme of rediss, rediss+cluster or rediss+sentinel."""

    model_config = ConfigDict(frozen=True, extra="forbid")

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
    """What connections are wrapped in: TLS 1.2 at least, the named authorities and no others.
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
