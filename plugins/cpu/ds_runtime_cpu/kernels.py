"""The CPU plugin's whole offer on one page. Torch-free."""

from __future__ import annotations

from ds_runtime.api import Kernel

ATTENTION: tuple[Kernel, ...] = ()
MOE: tuple[Kernel, ...] = ()
LINEAR_KERNELS: tuple[Kernel, ...] = ()
SMALL_OPS: tuple[Kernel, ...] = ()
