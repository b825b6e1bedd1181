"""The built-in plugin "null": a platform whose kernels have right shapes and no maths.

For tests and measurements of everything around the model: scheduler, step loop, server. Loaded
only when named (`--plugins null --platform null`). Torch-free; the kernels are in null_kernels.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ds_runtime.ops.contract import RANK_PLATFORM, DeviceInfo, Facts, Kernel, Refusal
from ds_runtime.ops.formats import FORMATS
from ds_runtime.ops.kernel import Layout, Promises
from ds_runtime.ops.table import OPS
from ds_runtime.platform.contract import Communicator, MemoryInfo, Platform
from ds_runtime.plugins.hookspecs import hookimpl

if TYPE_CHECKING:
    import torch

NAME = "null"
_MEMORY = 1 << 40
_KERNELS = "ds_runtime_kit.devices.null_kernels"
_FORMATS = frozenset(FORMATS)


class NullPlatform(Platform):
    """Pretends to have much memory and to compute at once. Never chosen by "auto" over others."""

    name = NAME
    score = -1

    def info(self, rank: int = 0) -> DeviceInfo:
        dtypes = frozenset({"float32", "bfloat16", "float16"})
        return DeviceInfo("cpu", "no device", NAME, fast_dtypes=dtypes, memory=_MEMORY)

    def device(self, rank: int = 0) -> torch.device:
        import torch

        return torch.device("cpu")

    def memory(self, rank: int = 0) -> MemoryInfo:
        return MemoryInfo(total=_MEMORY, free=_MEMORY)

    def communicator(
        self, rank: int, size: int, init_method: str, timeout: float = 600.0
    ) -> Communicator:
        from ds_runtime.parallel.group import TorchCommunicator

        return TorchCommunicator("gloo", rank, size, init_method, timeout)


def _bytes_per_token(facts: Facts) -> int:
    return 1  # the cache holds nothing, but page counts need a size to divide by


NULL_PAGES = Layout(
    name="null_pages",
    version=1,
    allocate=f"{_KERNELS}:allocate_null_pages",
    bytes_per_token=_bytes_per_token,
)


NULL_INDEX = replace(NULL_PAGES, name="null_index", allocate=f"{_KERNELS}:allocate_null_index")
_LAYOUTS = {
    "": frozenset[str](),
    "kv": frozenset({NULL_PAGES.tag}),
    "index": frozenset({NULL_INDEX.tag}),
}


def _refuse(facts: Facts) -> str | None:
    if facts.device.arch == NAME:
        return None
    return f"computes nothing; only for the null platform, not for {facts.device.arch}"


def _offer(name: str) -> Kernel:
    op = OPS[name]
    return Kernel(
        op=op,
        fn=f"{_KERNELS}:{name}",
        provider=NAME,
        rank=RANK_PLATFORM,
        refuse=_refuse,
        formats=_FORMATS if op.owns_weights else frozenset(),
        layouts=_LAYOUTS[op.layout],
        phases=frozenset({"prefill", "decode", "verify", "tree"}),
        note="computes nothing",
        contract=op.version,
        promises=Promises(skips_absent=op.absent),
    )


@hookimpl
def ds_platform() -> Platform | Refusal | None:
    return NullPlatform()


@hookimpl
def ds_attention(facts: Facts) -> Sequence[Layout]:
    return [NULL_PAGES, NULL_INDEX]


@hookimpl
def ds_ops(facts: Facts) -> Sequence[Kernel]:
    return [_offer(name) for name, op in OPS.items() if not op.optional]
