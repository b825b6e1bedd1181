"""What pages and snapshots need to know of a request."""

from __future__ import annotations

from typing import Protocol

from ds_runtime.kv.prefix import Node, Realm
from ds_runtime.kv.tiers.disk import Fetch


class Holder(Protocol):
    """A request, as the engine has it. Lengths and counts are in tokens, but for num_shared: the
    first `num_shared` of `pages` are in the prefix cache, the last of them at `node`. snapshot:
    its block that no node has yet, −1 for none, which stands for its first `snapshot_at` tokens.
    branches: where else in its prompt one is due, in tokens.
    num_loaded: pages that came from below the device when it began to run. fetch: what was asked
    of the disk for it. on_device: its last token was sampled there. max_shared: that may enter
    the prefix cache.
    """

    order: tuple[int, int]
    row: int
    pages: list[int]
    node: Node | None
    num_shared: int
    num_computed: int
    on_device: bool
    snapshot: int
    snapshot_at: int
    branches: set[int]
    max_shared: int | None
    cached_tokens: int | None
    num_loaded: int
    fetch: Fetch | None

    @property
    def is_running(self) -> bool: ...
    @property
    def realm(self) -> Realm: ...
    @property
    def prompt_len(self) -> int: ...
    @property
    def total_len(self) -> int: ...

    def tokens(self, start: int, stop: int) -> list[int]:
        """Of prompt and output."""
        ...

    def beginning(self, index: int, page_size: int) -> int:
        """A hash of all tokens up to the end of a full page of the prompt, and of its realm."""
        ...
