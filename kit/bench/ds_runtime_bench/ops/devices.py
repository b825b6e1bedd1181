"""Whether this machine has room for ranks, before one of them starts. Torch-free."""

from __future__ import annotations

from ds_runtime.errors import ConfigError
from ds_runtime.platform.contract import Platform
from ds_runtime.platform.cores import cores


def check_room(platform: Platform, ranks: int, per_core: int = 1) -> None:
    """That each of `ranks` ranks has a device; where they share the host's, that at most `per_core`
    ranks share a core. Raises ConfigError that names `--ranks`. The platform is configured."""
    if not platform.own_memory and ranks > (most := per_core * cores()):
        raise ConfigError(
            f"--ranks {ranks}: ranks share the {cores()} cores of this host; give at most {most}"
        )
    for rank in range(ranks):
        try:
            platform.info(rank)
        except Exception as e:
            raise ConfigError(
                f"--ranks {ranks}: {ranks} devices are needed, and number {rank} cannot be had: "
                f"{e}; give less, or let more devices be seen"
            ) from e
