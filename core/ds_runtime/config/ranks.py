"""Which settings of ranks, groups of them and machines go together. Torch-free."""

from __future__ import annotations

from typing import Protocol

from ds_runtime.errors import ConfigError


class RankSettings(Protocol):
    """The settings of ranks, named as in `EngineConfig`."""

    @property
    def tp(self) -> int: ...
    @property
    def dp(self) -> int | None: ...
    @property
    def enable_dp_attention(self) -> bool: ...
    @property
    def nnodes(self) -> int: ...
    @property
    def node_rank(self) -> int: ...
    @property
    def dist_init_addr(self) -> str | None: ...
    @property
    def attn_dp(self) -> int: ...
    @property
    def replicas(self) -> int: ...


def check_ranks(config: RankSettings) -> None:
    """ConfigError for those that do not."""
    _divided(config)
    _several(config)


def _divided(config: RankSettings) -> None:
    if not config.enable_dp_attention:
        return
    if config.tp == 1 and config.attn_dp == 1:
        raise ConfigError(
            "--enable-dp-attention: attention is divided among the ranks of --tp, and that is 1: "
            "give --tp N beside it, or leave it out"
        )
    if config.tp % (dp := config.attn_dp):
        raise ConfigError(
            f"--dp {dp}: beside --enable-dp-attention it is the number of groups of ranks that "
            f"have attention of their own, and --tp {config.tp} does not divide into {dp}: give "
            f"--tp {dp}, or leave --enable-dp-attention out for {dp} replicas of --tp ranks each"
        )


def _several(config: RankSettings) -> None:
    nodes, at = config.nnodes, config.dist_init_addr
    if config.node_rank >= nodes:
        raise ConfigError(
            f"--node-rank {config.node_rank}: machines are numbered from 0, and --nnodes is {nodes}"
        )
    if nodes == 1:
        return
    if config.tp % nodes:
        raise ConfigError(
            f"--nnodes {nodes}: --tp {config.tp} ranks do not divide among so many machines: give "
            f"a multiple of {nodes}"
        )
    if config.replicas > 1:
        raise ConfigError(
            f"--dp {config.dp}: replicas run on one machine, and --nnodes is {nodes}: start a "
            "server for each, or give --enable-dp-attention"
        )
    host, _, port = (at or "").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(
            f"--dist-init-addr {at}: with --nnodes {nodes} it is HOST:PORT, an address of machine "
            "0 that every other one reaches"
        )
