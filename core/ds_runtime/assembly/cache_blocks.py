"""How the memory of the caches is divided: states of requests, snapshots of these, then pages.

Torch-free. `plan` and the start divide it alike.
"""

from __future__ import annotations

from typing import NamedTuple

from ds_runtime.config import EngineConfig
from ds_runtime.ops.contracts.caches import CacheSizes

SHARE = 15  # percent of the caches that snapshots take at most, if nobody says how many there are


class CacheBlocks(NamedTuple):
    """Of one rank. states: a block for every request that runs, a spare one, and snapshots."""

    pages: int
    snapshots: int = 0
    states: int = 0

    @staticmethod
    def of(
        config: EngineConfig, sizes: CacheSizes, given: int, most: int | None = None
    ) -> CacheBlocks:
        """What `given` bytes hold, with `most` pages at most. No page where states take all."""
        running = config.max_running_requests + 1 if sizes.state else 0

        def pages(snapshots: int) -> int:
            room = max(0, given - (running + snapshots) * sizes.state) // sizes.page
            return room if most is None else min(room, most)

        snapshots = 0
        if sizes.state and not config.disable_radix_cache:
            snapshots = config.state_snapshots or 0
            if config.state_snapshots is None:
                snapshots = max(0, SHARE * given) // (100 * sizes.state)
                others = pages(snapshots) * sizes.page + running * sizes.state
                rest = (100 - SHARE) * sizes.state
                snapshots = min(snapshots, SHARE * others // rest)  # a share of what is kept
        return CacheBlocks(pages(snapshots), snapshots, running + snapshots)
