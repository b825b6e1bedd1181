"""How many pages and states host memory holds on one rank. Pure arithmetic; torch-free."""

from __future__ import annotations

from typing import NamedTuple

from ds_runtime.common.progress import amount
from ds_runtime.config import EngineConfig
from ds_runtime.errors import ConfigError
from ds_runtime.kv.budget import KvMemory

GB = 10**9


class HostRoom(NamedTuple):
    """Slots for pages, and for snapshots of states: in the proportion that the device has them."""

    pages: int = 0
    states: int = 0

    @staticmethod
    def of(config: EngineConfig, memory: KvMemory) -> HostRoom:
        """None of either unless they are asked for. Raises ConfigError for room for no page."""
        if not config.enable_hierarchical_cache:
            return HostRoom()
        ratio = config.hicache_ratio
        kept = memory.pages * memory.sizes.page + memory.snapshots * memory.sizes.state
        if config.hicache_size:
            ratio = config.hicache_size * GB / kept
        made = HostRoom(int(ratio * memory.pages), int(ratio * memory.snapshots))
        if not made.pages or (memory.snapshots and not made.states):
            raise ConfigError(
                f"--hicache-ratio {ratio:g}: of {amount(kept)} on the device, host memory would "
                "hold no page, or no state: give more"
            )
        return made

    def refused(self, why: Exception) -> ConfigError:
        """The error where the platform cannot allocate the slots. why: what it raised."""
        return ConfigError(
            f"--enable-hierarchical-cache: no host memory for {self.pages} pages and "
            f"{self.states} states: lower --hicache-ratio or --hicache-size: {why}"
        )

    def check(self, config: EngineConfig, memory: KvMemory, apart: bool) -> None:
        """Raises ConfigError for more than there is. apart: the device has memory of its own, of
        which `memory` tells; then nothing is known of the host's.
        """
        needed = self.pages * memory.sizes.page + self.states * memory.sizes.state
        left = max(0, memory.free - memory.total)
        if apart or needed <= left:
            return
        size, ratio = config.hicache_size, config.hicache_ratio
        flag = f"--hicache-size {size}" if size else f"--hicache-ratio {ratio:g}"
        fits = f"{ratio * left / needed:.2g}"
        remedy = "0 and a --hicache-ratio" if size and left < GB else f"{left // GB}"
        raise ConfigError(
            f"{flag}: asks for {amount(needed)} of host memory; after a KV cache of "
            f"{amount(memory.total)}, {amount(left)} are free: give --hicache-"
            + (f"size {remedy}" if size else f"ratio {fits}")
            + ", or lower --kv-memory"
        )
