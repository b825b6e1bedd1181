"""What settings of KV beyond the device must keep to."""

from __future__ import annotations

from typing import Protocol

from ds_runtime.errors import ConfigError


class TierSettings(Protocol):
    """Of EngineConfig."""

    @property
    def enable_hierarchical_cache(self) -> bool: ...
    @property
    def disable_radix_cache(self) -> bool: ...
    @property
    def disk_cache(self) -> str | None: ...


def check_tiers(config: TierSettings) -> None:
    """Raises ConfigError for what cannot be."""
    if config.enable_hierarchical_cache and config.disable_radix_cache:
        raise ConfigError(
            "--enable-hierarchical-cache: keeps what --disable-radix-cache forgets: leave one of "
            "them out"
        )
    _check_disk(config)


def _check_disk(config: TierSettings) -> None:
    if config.disk_cache is None:
        return
    given = f"--disk-cache {config.disk_cache}"
    if not config.enable_hierarchical_cache:
        raise ConfigError(
            f"{given}: pages go there by way of host memory: give --enable-hierarchical-cache, too"
        )
