"""Keys of pages: a sha256 chain over their tokens. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import sha256
from struct import pack


def page_keys(root: bytes, tokens: Sequence[int], page_size: int) -> Iterator[bytes]:
    """The key of every full page: of the one before it, and of its tokens."""
    key = root
    for start in range(0, len(tokens) // page_size * page_size, page_size):
        key = page_key(key, tokens[start : start + page_size])
        yield key


def page_key(above: bytes, tokens: Sequence[int]) -> bytes:
    """The key of a full page of `tokens` after another one, whose key is `above`."""
    return sha256(above + pack(f"<{len(tokens)}i", *tokens)).digest()
