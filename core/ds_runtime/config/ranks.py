"""Which ranks there are, as flags say it, checked. Torch-free."""

from __future__ import annotations

import re
from typing import Protocol

from ds_runtime.common.address import HOST, is_loopback
from ds_runtime.errors import ConfigError

_PORT = re.compile(r"[0-9]{1,5}")
_MOST = 1024  # ranks of one machine: each is a process, and a mistyped number ends the machine


class RankSettings(Protocol):
    """The settings that are about ranks, named as in `EngineConfig`."""

    @property
    def tp(self) -> int: ...
    @property
    def expert_parts(self) -> int: ...
    @property
    def dp(self) -> int | None: ...
    @property
    def enable_dp_attention(self) -> bool: ...
    @property
    def enable_two_batch_overlap(self) -> bool: ...
    @property
    def dbo_prefill_token_threshold(self) -> int | None: ...
    @property
    def tbo_token_distribution_threshold(self) -> float | None: ...
    @property
    def nnodes(self) -> int: ...
    @property
    def node_rank(self) -> int: ...
    @property
    def dist_init_addr(self) -> str | None: ...
    @property
    def dist_token_file(self) -> str | None: ...


def check(config: RankSettings) -> None:
    """Raises ConfigError for ranks that there cannot be."""
    _divided(config)
    if config.tp % (ep := config.expert_parts):
        raise ConfigError(
            f"--ep {ep}: ranks of --tp hold parts of the experts, and --tp {config.tp} does not "
            f"divide into {ep}: give a divisor of {config.tp}, or --tp {ep}"
        )
    _several(config)
    _bounded(config)
    _overlapped(config)


def _overlapped(config: RankSettings) -> None:
    for flag, value in (
        ("--dbo-prefill-token-threshold", config.dbo_prefill_token_threshold),
        ("--tbo-token-distribution-threshold", config.tbo_token_distribution_threshold),
    ):
        if value is not None and not config.enable_two_batch_overlap:
            raise ConfigError(f"{flag} {value}: needs --enable-two-batch-overlap, too")


def _bounded(config: RankSettings) -> None:
    replicas = 1 if config.enable_dp_attention else config.dp or 1
    if (here := config.tp // config.nnodes * replicas) <= _MOST:
        return
    flags = [f"--tp {config.tp}"] if config.tp > 1 else []
    flags += [f"--dp {replicas}"] if replicas > 1 else []
    flags += [f"--nnodes {config.nnodes}"] if config.nnodes > 1 else []
    raise ConfigError(
        f"{' '.join(flags)}: makes {here} ranks on one machine, a process each: give less, at "
        f"most {_MOST} ranks"
    )


def _divided(config: RankSettings) -> None:
    if not config.enable_dp_attention:
        return
    if config.tp == 1 and (config.dp or 1) == 1:
        raise ConfigError(
            "--enable-dp-attention: attention is divided among the ranks of --tp, and that is 1: "
            "give --tp N, too, or leave the flag out"
        )
    if config.tp % (dp := config.dp or config.tp):
        raise ConfigError(
            f"--dp {dp}: with --enable-dp-attention it counts groups of ranks. --tp {config.tp} "
            f"does not divide into {dp}: give --tp {dp}, or leave --enable-dp-attention out for "
            f"{dp} replicas of --tp ranks each"
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
            f"--nnodes {nodes}: --tp {config.tp} ranks do not divide among {nodes} machines: "
            f"give a multiple of {nodes}"
        )
    if not config.enable_dp_attention and (config.dp or 1) > 1:
        raise ConfigError(
            f"--dp {config.dp}: replicas run on one machine, and --nnodes is {nodes}: start a "
            "server for each, or give --enable-dp-attention"
        )
    host, _, port = (at or "").rpartition(":")
    if not HOST.fullmatch(host) or not _PORT.fullmatch(port) or not 0 < int(port) < 65535:
        said = "--dist-init-addr is missing" if at is None else f"--dist-init-addr {at}"
        raise ConfigError(
            f"{said}: with --nnodes {nodes} it is HOST:PORT, a name or IPv4 number "
            "of machine 0 that every other machine reaches. Ranks do not use IPv6. The port is "
            "below 65535, because the next one is used, too"
        )


def check_secret(config: RankSettings) -> None:
    """Raises ConfigError where ranks of other machines meet at an address, and share no secret."""
    at = str(config.dist_init_addr)
    if config.nnodes == 1 or config.dist_token_file is not None:
        return
    if not is_loopback(at.rpartition(":")[0]):
        raise ConfigError(
            f"--dist-init-addr {at}: other machines reach it, and whoever does may join: give "
            "--dist-token-file FILE, with a secret that all machines share (head -c 32 "
            "/dev/urandom | base64 > FILE)"
        )
