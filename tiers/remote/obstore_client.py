"""obstore's client, as the settings of the object tier ask for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, LocalStore, S3Store

from spec.secret import Secret
from tiers.errors import TierUnusable

_STORES: Mapping[str, Callable[..., Any]] = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}


class ClientSettings(NamedTuple):
    """What a client is made of. `config`: by obstore's names. `timeout`: for connecting, and
    `transfer`: for a request that moves a pack; in seconds."""

    url: str
    config: Mapping[str, str]
    secrets: Mapping[str, Secret]
    timeout: float
    transfer: float


def open_client(settings: ClientSettings) -> Any:
    """Make obstore's store; connects to nothing. Reads credentials. Raises TierUnusable."""
    parts = urlsplit(settings.url)
    try:
        if parts.scheme == "file":
            return LocalStore(parts.path, mkdir=True)
        secrets = {name: secret.reveal() for name, secret in settings.secrets.items()}
        seconds = timedelta(seconds=settings.timeout)
        return _STORES[parts.scheme](
            parts.netloc,
            config={**settings.config, **secrets},
            client_options={
                "timeout": timedelta(seconds=settings.transfer),
                "connect_timeout": seconds,
                "allow_http": settings.config.get("endpoint", "").startswith("http://"),
            },
            retry_config={"max_retries": 0},  # whoever calls it has a budget
        )
    except (BaseError, ValueError, OSError) as error:
        # Not chained, and without a text that may quote a secret.
        shown = type(error).__name__ if settings.secrets else str(error).partition("\n")[0]
        raise TierUnusable(f"{settings.url}: the client can't be made: {shown}") from None
