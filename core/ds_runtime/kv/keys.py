"""Names of pages that mean the same in every engine: a sha256 chain over tokens.

Two engines may exchange pages only if all that their bytes depend on is the same. That is the root
of the chain; what follows are tokens, page by page.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from struct import pack


@dataclass(frozen=True, slots=True)
class Origin:
    """What the bytes of a page depend on beside its tokens. weights, adapter: digests of files;
    layouts: tags by the names of cache groups; dtypes: of the caches; salt: a client's own.
    """

    weights: str
    layouts: tuple[tuple[str, str], ...]
    dtypes: tuple[str, ...]
    page_size: int
    adapter: str = ""
    salt: str = ""

    def root(self) -> bytes:
        """The key in front of all pages: 32 bytes. Different origins have different ones."""
        pairs = [word for pair in self.layouts for word in pair]
        fields = (
            [self.weights],
            pairs,
            self.dtypes,
            [str(self.page_size)],
            [self.adapter, self.salt],
        )
        found = hashlib.sha256()
        for words in fields:
            found.update(pack("<I", len(words)))
            for word in words:
                held = word.encode()
                found.update(pack("<I", len(held)) + held)
        return found.digest()


def page_keys(root: bytes, tokens: Sequence[int], page_size: int) -> Iterator[bytes]:
    """The key of every full page: of the one before it, and of its tokens."""
    key = root
    for start in range(0, len(tokens) // page_size * page_size, page_size):
        page = tokens[start : start + page_size]
        key = hashlib.sha256(key + pack(f"<{page_size}i", *page)).digest()
        yield key
