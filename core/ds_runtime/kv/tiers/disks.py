"""The disks of an engine: one for each group of ranks, over one folder."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from ds_runtime.config import EngineConfig
from ds_runtime.config.paths import user_path
from ds_runtime.kv.tiers.copies import HostCopies
from ds_runtime.kv.tiers.disk import PATIENCE, Disk
from ds_runtime.kv.tiers.folder import DiskFolder
from ds_runtime.kv.tiers.hand import DiskHand
from ds_runtime.kv.tiers.host import HostTier
from ds_runtime.kv.tiers.linked import DiskFollower, DiskLink, LinkedHands
from ds_runtime.parallel.mesh import Mesh


class Disks:
    """As `Disk`, for all groups."""

    def __init__(self, every: Sequence[Disk]) -> None:
        self._every = every

    @property
    def lags(self) -> bool:
        """Whether anything is on its way."""
        return any(one.lags for one in self._every)

    @property
    def stopped(self) -> str:
        """Why nothing is written any more; "" while it is."""
        return next((one.stopped for one in self._every if one.stopped), "")

    @property
    def bytes_written(self) -> int:
        """By all ranks."""
        return sum(one.bytes_written for one in self._every)

    @property
    def bytes_read(self) -> int:
        """By all ranks."""
        return sum(one.bytes_read for one in self._every)

    def go_on(self, seconds: float) -> None:
        """Nothing else is to be done: wait a little for what is on its way."""
        for one in self._every:
            one.go_on(seconds if one.lags else 0.0)

    def poll(self, idle: bool = False, seconds: float = 0.0) -> None:
        """As Disk."""
        for one in self._every:
            one.poll(idle, seconds if one.busy else 0.0)

    def seconds(self, nbytes: int) -> float:
        """To read this many bytes, as measured on rank 0: see `DiskFolder`."""
        return self._every[0].folder.seconds(nbytes)

    def drain(self, seconds: float = PATIENCE) -> bool:
        """As Disk."""
        until, drained = time.monotonic() + seconds, True
        for one in self._every:
            drained &= one.drain(until - time.monotonic())
        return drained

    def close(self, settle: Callable[[], bool], unsettled: Callable[[], int]) -> None:
        """Write what is on its way, for `PATIENCE` seconds at most, and leave; a line says what was
        not written. settle: puts more on its way; whether it did. unsettled: how many it has not
        put there yet."""
        until = time.monotonic() + PATIENCE
        while self.drain(until - time.monotonic()) and settle():
            pass
        self.poll(idle=True)  # what has ended while others were waited for
        left = sum(one.left for one in self._every)  # the first to close ends the link of all
        if not self.stopped:  # else a line has said that nothing is written any more
            left += unsettled()
        for one in self._every:
            one.close(0.0)
        if left:
            said = f"{left} pages were not written within {PATIENCE:g} s: they are computed again"
            print(f"warning: --disk-cache {self._folder}: {said}", file=sys.stderr, flush=True)

    @property
    def _folder(self) -> Path:
        return self._every[0].folder.folder


Link = tuple[Callable[[msgspec.Struct], None], Callable[[int], list[bytes]]]  # see `DiskLink`


def check_folder(config: EngineConfig) -> None:
    """Raises ConfigError for a `--disk-cache` that cannot be, before any weight is read."""
    if config.disk_cache is not None:
        _folder(config)


def disks_of(
    config: EngineConfig, tiers: Sequence[HostTier], memory: HostCopies, link: Link | None
) -> Disks:
    """Rank 0's, for a tier of each group. memory: its own; link: to other ranks, None without any.
    Raises ConfigError for a folder that cannot be."""
    folder, mesh = _folder(config), Mesh.of(config)
    own = DiskHand(folder, memory)
    if link is None:
        disks = [Disk(folder, own)]
    else:
        ends, beside = DiskLink(*link), mesh.tp // mesh.attn_dp - 1
        first = LinkedHands(ends, 0, own, beside)
        others = [LinkedHands(ends, n, None, beside + 1) for n in range(1, len(tiers))]
        disks = [Disk(folder, hands) for hands in (first, *others)]
    for tier, disk in zip(tiers, disks, strict=True):
        tier.disk = disk
    return Disks(disks)


def follower_of(config: EngineConfig, rank: int, memory: HostCopies) -> DiskFollower:
    """Another rank's. Latents are alike on all ranks of a group, of whom the first writes them;
    keys and values of heads are each rank's own."""
    mesh = Mesh.of(config)
    group, number = divmod(rank, mesh.tp // mesh.attn_dp)
    part = number if config.disable_mla else 0
    hand = DiskHand(_folder(config), memory, writes=number == 0 or part > 0, part=part)
    return DiskFollower(hand, group)


def _folder(config: EngineConfig) -> DiskFolder:
    assert config.disk_cache is not None
    return DiskFolder(user_path(config.disk_cache, "--disk-cache"), config.disk_cache_size)
