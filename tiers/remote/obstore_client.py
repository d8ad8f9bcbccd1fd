"""obstore's client, as the settings of the object tier ask for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, LocalStore, S3Store

from spec.secret import Secret
from tiers.errors import TierUnusable

_STORES: Mapping[str, Callable[..., Any]] = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}


def open_client(
    url: str,
    config: Mapping[str, str],
    secrets: Mapping[str, Secret],
    connect_seconds: float,
    transfer_seconds: float,
) -> Any:
    """Make obstore's store. Reads credentials, connects to nothing. Raises TierUnusable.

    `config`, `secrets`: by obstore's names. `transfer_seconds`: of a request that moves a pack.
    """
    parts = urlsplit(url)
    try:
        if parts.scheme == "file":
            return LocalStore(parts.path, automatic_cleanup=True, mkdir=True)
        revealed = {name: secret.reveal() for name, secret in secrets.items()}
        return _STORES[parts.scheme](
            parts.netloc,
            config={**config, **revealed},
            client_options={
                "timeout": timedelta(seconds=transfer_seconds),
                "connect_timeout": timedelta(seconds=connect_seconds),
                "allow_http": config.get("endpoint", "").startswith("http://"),
            },
            retry_config={"max_retries": 0},  # whoever calls it has a budget
        )
    except (BaseError, ValueError, OSError) as error:
        # Not chained, and without a text that may quote a secret.
        shown = type(error).__name__ if secrets else str(error).partition("\n")[0]
        raise TierUnusable(f"{url}: the client can't be made: {shown}") from None
