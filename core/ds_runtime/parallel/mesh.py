"""Where each rank stands: named axes, hosts, and the ranks of every group. Torch-free.

The ranks of a pipeline stage are the axis `tp`: FFNs, embedding and head are divided among them.
Attention divides the same ranks anew: into `attn_dp` groups by sequences, inside these by context
(`cp`), and inside these by heads (`attn_tp`), among neighbours of whom `dcp` share a cache. Routed
experts divide them by number (`ep`). Every axis is a count and a stride of ranks, so that each has
groups which partition all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias, get_args

from ds_runtime.config import EngineConfig
from ds_runtime.errors import ConfigError

AxisName: TypeAlias = Literal["pp", "tp", "ep", "attn_dp", "attn_tp", "cp", "dcp"]
AXES: tuple[AxisName, ...] = get_args(AxisName)
"""All axes, in the order in which every rank makes their groups."""

Group: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class Mesh:
    """All ranks of an engine. hosts: how many machines they are on, the same number on each, in the
    order of the ranks. Raises ConfigError where the axes do not divide each other.
    """

    tp: int = 1
    attn_dp: int = 1
    pp: int = 1
    ep: int = 1
    cp: int = 1
    dcp: int = 1
    hosts: int = 1

    def __post_init__(self) -> None:
        if least := [name for name, n in vars(self).items() if n < 1]:
            raise ConfigError(
                f"{least[0]} {getattr(self, least[0])}: an axis has at least one rank"
            )
        parts = (
            (f"{self.tp} ranks", self.tp, "groups of attention", self.attn_dp * self.cp),
            (f"{self.tp} ranks", self.tp, "shares of experts", self.ep),
            (f"{self.attn_tp} ranks of attention", self.attn_tp, "shares of a cache", self.dcp),
            (f"{self.size} ranks", self.size, "hosts", self.hosts),
        )
        for whole, count, what, by in parts:
            if count % by:
                raise ConfigError(f"{whole} do not divide into {by} {what}: give a multiple")

    @classmethod
    def of(cls, config: EngineConfig) -> Mesh:
        """The mesh of an engine with these settings."""
        return cls(config.tp, config.attn_dp, ep=config.expert_parts, hosts=config.nnodes)

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.pp * self.tp

    @property
    def attn_tp(self) -> int:
        """Ranks that divide the heads of attention."""
        return max(1, self.tp // (self.attn_dp * self.cp))

    @property
    def per_host(self) -> int:
        """Ranks of each host."""
        return self.size // self.hosts

    @cached_property
    def _axes(self) -> dict[AxisName, tuple[int, int]]:
        """Of each axis: its size, and how far its neighbours are apart."""
        return {
            "pp": (self.pp, self.tp),
            "tp": (self.tp, 1),
            "ep": (self.ep, self.tp // self.ep),
            "attn_dp": (self.attn_dp, self.attn_tp * self.cp),
            "attn_tp": (self.attn_tp, 1),
            "cp": (self.cp, self.attn_tp),
            "dcp": (self.dcp, 1),
        }

    def extent(self, axis: AxisName) -> int:
        """How many ranks a group of this axis has."""
        return self._axes[axis][0]

    def at(self, rank: int, axis: AxisName) -> int:
        """The number of `rank` in its group of this axis."""
        extent, stride = self._axes[axis]
        return rank // stride % extent

    def group(self, axis: AxisName, rank: int) -> Group:
        """The ranks of the group of this axis that `rank` is in, in rising order."""
        extent, stride = self._axes[axis]
        first = rank - self.at(rank, axis) * stride
        return tuple(first + i * stride for i in range(extent))

    def groups(self, axis: AxisName) -> tuple[Group, ...]:
        """All groups of this axis, by their first rank."""
        return tuple(sorted({self.group(axis, rank) for rank in range(self.size)}))

    @cached_property
    def divisions(self) -> tuple[tuple[Group, ...], ...]:
        """All ways in which groups of several ranks are made, each once: axes share them."""
        made = {self.groups(axis): None for axis in AXES if self.extent(axis) > 1}
        return tuple(made)

    def host(self, rank: int) -> int:
        """The number of the host that `rank` is on."""
        return rank // self.per_host

    def crosses(self, axis: AxisName) -> bool:
        """Whether a group of this axis has ranks of several hosts."""
        return any(len({self.host(rank) for rank in group}) > 1 for group in self.groups(axis))


def local_ranks(config: EngineConfig) -> int:
    """Ranks of all replicas on this machine."""
    return config.replicas * Mesh.of(config).per_host
