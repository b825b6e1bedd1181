"""Addresses: a server as its clients are told of it, checked, and hosts that are this machine."""

from __future__ import annotations

from ipaddress import ip_address
from typing import NamedTuple
from urllib.parse import urlsplit

from ds_runtime.errors import ConfigError


class Address(NamedTuple):
    """Where a server listens. netloc: host and port as written, without credentials. prefix: of
    its paths, without the slash at the end and without /v1.
    """

    tls: bool
    host: str
    port: int | None
    netloc: str
    prefix: str

    @staticmethod
    def of(base_url: str, flag: str = "--base-url") -> Address:
        """Raises ConfigError, which names `flag`, for what is no http or https URL, or has a
        query."""
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
            raise ConfigError(
                f"{flag} {base_url!r}: write scheme and host, like http://127.0.0.1:30000, "
                "with or without /v1"
            )
        try:
            port = parts.port
        except ValueError as e:
            raise ConfigError(f"{flag} {base_url!r}: {e}") from e
        netloc, prefix = parts.netloc.rpartition("@")[2], parts.path.rstrip("/")
        return Address(
            parts.scheme == "https", parts.hostname, port, netloc, prefix.removesuffix("/v1")
        )


def is_loopback(host: str) -> bool:
    """Whether a host as it is written is this machine alone: "localhost", or such a number."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def checked_key(api_key: str | None, flag: str = "--api-key") -> str | None:
    """The key, if a header can carry it; else raises ConfigError, which names `flag`."""
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise ConfigError(f"{flag}: must be printable ASCII, on one line")
    return api_key
