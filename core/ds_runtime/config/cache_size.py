"""What settings of the size of the KV cache must keep to. Torch-free."""

from __future__ import annotations

from typing import Protocol

from ds_runtime.config.fields import flag_of
from ds_runtime.errors import ConfigError


class SizeSettings(Protocol):
    """Of EngineConfig."""

    @property
    def mem_fraction_static(self) -> float | None: ...
    @property
    def memory_utilization(self) -> float | None: ...
    @property
    def kv_memory(self) -> int | None: ...


def check_size(config: SizeSettings) -> None:
    """Raises ConfigError for two sizes of a cache."""
    names = ("mem_fraction_static", "memory_utilization")
    given = [name for name in names if getattr(config, name) is not None]
    given += ["kv_memory"] if config.kv_memory is not None else []
    if given[1:]:
        raise ConfigError(
            f"{flag_of(given[0])}: leave it out, or {flag_of(given[1])}: both size one cache"
        )
