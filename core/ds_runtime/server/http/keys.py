"""API keys: who a caller is, and what he may share with others."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ds_runtime.config import ServerConfig, check_key
from ds_runtime.errors import ConfigError, unreadable

_MOST = 1 << 20  # bytes of a file of keys


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sends a request. `name` is "" where nobody is told from others.

    `operates`: may flush, profile and load adapters. `is_admin`: has the admin key.
    """

    name: str = ""
    operates: bool = True
    is_admin: bool = False

    def own(self, rid: str) -> str:
        """An id that no other caller's request can have."""
        return f"{self.name}/{rid}" if self.name else rid

    def salt(self, cache_salt: str | None) -> str:
        """What the prefix cache tells this caller's prompts by, of a fixed length; "" where all
        share it."""
        if not self.name and cache_salt is None:
            return ""
        return _digest(f"{self.name}\0{'' if cache_salt is None else cache_salt}".encode())


class Keys:
    """The keys that a server takes. None: everybody may come."""

    def __init__(self, keys: Iterable[str] = (), admin: str | None = None) -> None:
        plain = [key for key in dict.fromkeys(keys) if key != admin]
        # Where one key is all there is, all clients are one.
        several = len(plain) + (admin is not None) > 1 or not plain
        self.any, self.has_admin = bool(plain), admin is not None
        self._stranger = Caller("", operates=admin is None)
        self._callers: dict[str, Caller] = {}
        for key in plain:
            mark = _digest(key.encode())
            self._callers[mark] = Caller(mark if several else "", operates=admin is None)
        if admin is not None:
            mark = _digest(admin.encode())
            self._callers[mark] = Caller(mark if several else "", is_admin=True)

    @classmethod
    def of(cls, config: ServerConfig) -> Keys:
        """What the flags and the file say. ConfigError for a file that cannot be used."""
        keys = config.api_key
        if config.api_key_file is not None:
            keys += tuple(read_keys(config.api_key_file))
        return cls(keys, config.admin_api_key)

    def caller(self, sent: Iterable[bytes]) -> Caller | None:
        """Who sends one of these keys; None for nobody that may come. Takes as long for any key
        that is wrong: only digests are compared, under a secret of this process."""
        for key in sent:
            if (found := self._callers.get(_digest(key))) is not None:
                return found
        return None if self.any else self._stranger


def read_keys(path: str) -> list[str]:
    """The keys of a file, one a line; empty lines and those that begin with # are none."""
    where = f"--api-key-file {path}"
    try:
        if Path(path).exists() and not Path(path).is_file():  # a device or a pipe may have no end
            raise ConfigError(f"{where}: is not a regular file; give a file with one key a line")
        with Path(path).open("rb") as file:
            raw = file.read(_MOST + 1)
        lines = [line.strip() for line in raw.decode().splitlines()]
    except OSError as e:
        raise unreadable(where, e, "a file with one key a line") from e
    except UnicodeDecodeError as e:
        raise ConfigError(f"{where}: is not UTF-8 at byte {e.start}; save it as UTF-8") from e
    if len(raw) > _MOST:
        raise ConfigError(f"{where}: has more than {_MOST} bytes: it should hold one key a line")
    for number, line in enumerate(lines, 1):
        if line and not line.startswith("#"):
            check_key(line, f"{where}, line {number}")
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"{where}: holds no key, so that everyone could come: write one a line")
    return keys


_SECRET = secrets.token_bytes(32)


def _digest(value: bytes) -> str:
    return hashlib.blake2b(value, digest_size=16, key=_SECRET).hexdigest()
