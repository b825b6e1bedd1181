"""The surface for plugins: everything that one may use, and nothing that imports torch.

Contracts (Protocols with their docstrings) are in `ds_runtime.ops.<area>`; values that kernels
get are in `ds_runtime.ops.batch` and `ds_runtime.ops.weight`.
"""

from __future__ import annotations

from ds_runtime.hookspecs import hookimpl
from ds_runtime.ops.spec import (
    API_VERSION,
    RANK_PLATFORM,
    RANK_PORTABLE,
    RANK_REFERENCE,
    RANK_SPECIALISED,
    Change,
    DeviceInfo,
    Facts,
    Kernel,
    Layout,
    Op,
    QuantLoader,
    Refusal,
    Routing,
)
from ds_runtime.ops.table import OPS
from ds_runtime.platform.spec import Communicator, MemoryInfo, Platform

__all__ = [
    "API_VERSION",
    "OPS",
    "RANK_PLATFORM",
    "RANK_PORTABLE",
    "RANK_REFERENCE",
    "RANK_SPECIALISED",
    "Change",
    "Communicator",
    "DeviceInfo",
    "Facts",
    "Kernel",
    "Layout",
    "MemoryInfo",
    "Op",
    "Platform",
    "QuantLoader",
    "Refusal",
    "Routing",
    "hookimpl",
]
