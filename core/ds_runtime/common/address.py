"""Addresses of servers and origins of web pages, checked, and hosts that are this machine."""

from __future__ import annotations

import re
from ipaddress import IPv6Address, ip_address
from typing import NamedTuple
from urllib.parse import urlsplit

from ds_runtime.errors import ConfigError

_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
HOST = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")  # or an IPv4 address
_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://(\[[0-9a-f:.]+\]|[^\s/?#@:\\\[\]]+)(?::([0-9]{1,5}))?")
_PORTS = {"http": 80, "https": 443}  # that browsers leave out


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


def check_origin(origin: str, flag: str = "--cors-origins") -> None:
    """Raises ConfigError, which names `flag`, for what no browser sends as the origin of a page:
    a server compares it letter by letter.
    """
    sent = _origin(origin)
    if origin not in ("*", sent):
        raise ConfigError(
            f"{flag} {origin!r}: write '*', or scheme and host as browsers send them, like "
            f"{sent or 'https://chat.example.com'}"
        )


def _origin(text: str) -> str | None:
    """How a browser sends it: in ASCII and lower case, without a scheme's own port. None if it is
    no origin (RFC 6454)."""
    if (found := _ORIGIN.fullmatch(text.lower())) is None:
        return None
    scheme, host, port = found.groups()
    try:
        host = f"[{IPv6Address(host[1:-1])}]" if host[0] == "[" else host.encode("idna").decode()
    except ValueError:  # UnicodeError is one
        return None
    if (host[0] != "[" and not HOST.fullmatch(host)) or int(port or 0) > 65535:
        return None
    whole = port is None or int(port) == _PORTS.get(scheme)
    return f"{scheme}://{host}" if whole else f"{scheme}://{host}:{int(port)}"
