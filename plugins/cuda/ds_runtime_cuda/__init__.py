"""The cuda plugin: hooks only. It looks for devices and packages, and brings no kernels yet."""

from __future__ import annotations

from collections.abc import Callable

from ds_runtime.api import Refusal, hookimpl


def probe() -> Refusal | None:
    """Why this plugin cannot serve here, found without torch or vendor packages."""
    from ds_runtime_cuda.platform import probe as look

    return look()


PROBE: Callable[[], Refusal | None] = probe


@hookimpl
def ds_platform() -> Refusal | None:
    return probe()
