"""What a call allocates: its peak, what stays, how often. Sees torch's allocators alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import (  # type: ignore[attr-defined]
    ProfilerConfig,
    ProfilerState,
    _disable_profiler_legacy,
    _enable_profiler_legacy,
)

from ds_runtime.ops.contract import Facts, Kernel
from ds_runtime.ops.weight import Packed


@dataclass(frozen=True, slots=True)
class Allocated:
    """Bytes above those before the call: at most at once, and afterwards; and how often."""

    peak: int = 0
    kept: int = 0
    times: int = 0


def allocated(run: Callable[[], Any], device: torch.device) -> tuple[Any, Allocated]:
    """(what `run` returns, what it allocated on `device`)."""
    return _on_host(run) if device.type == "cpu" else _on_device(run, device)


def _on_host(run: Callable[[], Any]) -> tuple[Any, Allocated]:
    # The host's allocator keeps no statistics; torch's old profiler lists what it does, in order.
    options = torch._C._profiler._ExperimentalConfig()
    config = ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, options)
    _enable_profiler_legacy(config)
    try:
        result = run()
    finally:
        threads = _disable_profiler_legacy()
    now = peak = times = 0
    for event in (e for thread in threads for e in thread if str(e.kind()) == "memory_alloc"):
        size = event.cpu_memory_usage()
        now += size
        peak, times = max(peak, now), times + (size > 0)
    return result, Allocated(peak, now, times)


def _on_device(run: Callable[[], Any], device: torch.device) -> tuple[Any, Allocated]:
    torch.accelerator.synchronize(device)
    torch.accelerator.reset_peak_memory_stats(device)
    before = torch.accelerator.memory_stats(device)
    result = run()
    torch.accelerator.synchronize(device)
    after = torch.accelerator.memory_stats(device)
    base = before["allocated_bytes.all.current"]
    return result, Allocated(
        after["allocated_bytes.all.peak"] - base,
        after["allocated_bytes.all.current"] - base,
        after["allocation.all.allocated"] - before["allocation.all.allocated"],
    )


class Measured:
    """Around a kernel's function or object: notes what weights and calls hold beyond what the
    kernel says. `said` is the worst, "" if nothing is beyond."""

    def __init__(self, kernel: Kernel, facts: Facts, target: Any) -> None:
        self.said = ""
        self._kernel = kernel
        self._facts = facts
        self._target = target
        self._device = torch.device(facts.device.type)

    def __call__(self, *args: Any) -> Any:
        return self._measured(self._target, args)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._target, name)
        if name in ("state", "prepare", "prepares_on_device", "quantizes", "gives_float32"):
            return found
        return self._pack if name == "pack" else lambda *args: self._measured(found, args)

    def _pack(self, *args: Any) -> Any:
        packed = self._target.pack(*args)
        if isinstance(packed, Packed) and (held := _held(packed.tensors)) > packed.nbytes:
            self.said = f"packed weights hold {held} bytes and say {packed.nbytes} (nbytes)"
        return packed

    def _measured(self, function: Any, args: tuple[Any, ...]) -> Any:
        declared = self._kernel.footprint.workspace
        if declared is None:
            return function(*args)
        result, seen = allocated(lambda: function(*args), self._device)
        rows = next((a.shape[0] for a in args if isinstance(a, Tensor)), 0)
        beyond = seen.peak - (_held(result) if seen.kept > 0 else 0)
        if beyond > (most := declared(self._facts, rows)):
            self.said = f"{beyond} bytes of workspace for {rows} rows, {most} are declared"
        return result


def _held(values: Any) -> int:
    """Bytes of the storages behind these tensors, each counted once; opaque ones have none."""
    plain = [t for t in _tensors(values) if t.layout == torch.strided]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in plain}
    return sum(s.nbytes() for s in storages.values())


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, dict):
        for value in values.values():
            yield from _tensors(value)
    elif isinstance(values, tuple | list):
        for value in values:
            yield from _tensors(value)
