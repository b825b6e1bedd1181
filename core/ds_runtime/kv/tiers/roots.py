"""The names in front of the pages of a realm, where other engines read them, too."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from secrets import token_bytes

from ds_runtime.checkpoint.files import Stamps
from ds_runtime.errors import CheckpointError
from ds_runtime.kv.digest import weights_digest
from ds_runtime.kv.keys import Origin
from ds_runtime.kv.prefix import Realm
from ds_runtime.kv.tiers.host import own_root


class SharedRoots:
    """The names in front of all pages of a realm, alike in every engine whose pages mean the same.
    origin: of the model's own; files: the folder of an adapter, and its stamps, by its key."""

    def __init__(self, origin: Origin, files: Callable[[int], tuple[Path, Stamps] | None]) -> None:
        self._origin, self._files = origin, files
        self._digests: dict[int, str | None] = {}  # of adapters, by their keys
        self._alone = token_bytes(32)

    def __call__(self, realm: Realm) -> bytes:
        """Of an adapter that is gone, or whose files are others now, one that nobody else has."""
        adapter = self._adapter(realm.weights) if realm.weights else ""
        if adapter is None:
            return sha256(self._alone + own_root(realm)).digest()
        return replace(self._origin, adapter=adapter, salt=realm.salt).root()

    def _adapter(self, key: int) -> str | None:
        """Its digest, which is read once: what an engine holds under a key never changes."""
        if key not in self._digests:
            self._digests[key] = None
            if (files := self._files(key)) is not None:
                with suppress(CheckpointError):
                    self._digests[key] = weights_digest(*files)
        return self._digests[key]
