"""The CPU as a platform. Torch is imported only by the methods that hand out torch things."""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

from ds_runtime.api import (
    Ceilings,
    Communicator,
    ConfigError,
    DeviceInfo,
    GraphBackend,
    MemoryInfo,
    Platform,
    read_plan,
)
from ds_runtime_cpu import machine, native, placement
from ds_runtime_cpu.isa import ISAS, limited, usable

if TYPE_CHECKING:
    import torch

    from ds_runtime.api import EngineConfig

AUTO = "auto"
_log = logging.getLogger(__name__)


@cache
def _device_info(isa: str | None, pinned: bool) -> DeviceInfo:
    """isa: the native library's variant; pinned: the machine is taken for one that has no more."""
    processor = machine.processor()
    features = limited(isa, processor.features) if isa and pinned else processor.features
    total, _ = machine.memory()
    return DeviceInfo(
        type="cpu",
        name=processor.name,
        arch=machine.arch(isa or usable(list(ISAS), features)[0], features),
        features=features,
        fast_dtypes=machine.fast_dtypes(features),
        memory=total,
        cores=machine.cores(),
    )


def _locked(plan: str) -> str:
    """The variant of a locked plan: AUTO if that is what AUTO gives, or none that runs here."""
    arch, features = str(read_plan(plan).get("arch")), machine.processor().features
    by_arch = {machine.arch(n, limited(n, features)): n for n in reversed(native.runnable())}
    best = _device_info(next(iter(native.runnable()), None), pinned=False).arch
    return AUTO if arch == best else by_arch.get(arch, AUTO)


def _choices(wanted: str) -> str:
    """What can be chosen, for the end of a refusal."""
    known = [*native.runnable(), AUTO]
    near = difflib.get_close_matches(wanted, known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}this machine runs {', '.join(known)}"


class CpuPlatform(Platform):
    """Every rank shares the one device; ranks divide its cores."""

    name = "cpu"
    score = 1
    capture_after = 8  # a size that comes now and then is not worth a recording

    captures = True
    on_host = True

    def __init__(self) -> None:
        self._isa = AUTO

    def configure(self, config: EngineConfig) -> None:
        """`--cpu-isa`: the variant of the native kernels, and the features that info() tells. Left
        alone, it is the one that a plan given by `--plan` was locked with, if it runs here.
        """
        isa = config.cpu_isa
        if isa == AUTO and config.plan is not None:
            isa = _locked(config.plan)
        if isa != AUTO and (reason := native.refused(isa)) is not None:
            raise ConfigError(f"--cpu-isa {isa}: {reason}; {_choices(isa)}")
        native.choose(None if isa == AUTO else isa)
        self._isa = isa

    def info(self, rank: int = 0) -> DeviceInfo:
        if self._isa == AUTO:
            return _device_info(native.isa_in_use(), pinned=False)
        return _device_info(self._isa, pinned=True)

    def device(self, rank: int = 0) -> torch.device:
        import torch

        return torch.device("cpu")

    def memory(self, rank: int = 0) -> MemoryInfo:
        total, free = machine.memory()
        return MemoryInfo(total=total, free=free)

    def process_env(self) -> Mapping[str, str]:
        """Bounded spinning for libgomp, whose own bound is milliseconds; torch's limit as ours;
        large pages under torch's large tensors, for a step reads all of a sequence's KV cache.

        That long a thread would burn a core that the thread it waits for may need. 2000 turns
        are some tens of microseconds: they bridge the gap between two kernels, as before
        (benchmarks/results/cpu_threads.md). A chosen instruction set holds for torch as well.
        """
        found = {"THP_MEM_ALLOC_ENABLE": "1"}
        if "OMP_WAIT_POLICY" not in os.environ:
            found["GOMP_SPINCOUNT"] = "2000"
        return found if self._isa == AUTO else {**found, **ISAS[self._isa].process_env()}

    def init_worker(self, rank: int, size: int, threads: int | None = None) -> None:
        import torch

        native.unbind_caller()
        count = self.threads(size, threads)
        torch.set_num_threads(count)
        if native.isa_in_use() is None:
            return
        native.calls().set_threads(count)
        if native.threads() < count:
            _log.warning(
                "native library: built without OpenMP, its kernels run on one thread of %d; "
                "reinstall with a compiler that has it (g++, or clang++ with libomp)",
                count,
            )
        on = placement.nodes(placement.allowed_cpus())
        if not placement.bound_by_user(os.environ):
            native.bind_threads(placement.placement(rank, size, count, on))

    def graph_backend(self, rank: int = 0) -> GraphBackend:
        """Native calls and torch's ops, recorded."""
        from ds_runtime_cpu.graphs import HostGraphs

        return HostGraphs()

    def ceilings(self, rank: int = 0) -> Ceilings:
        """With the native library memory is read by that: torch's reductions do not reach it."""
        from ds_runtime_cpu.ceilings import measure

        return measure(self.info().fast_dtypes)

    def read_rate(self, rank: int = 0) -> float:
        """The median of some readings by the native library."""
        from ds_runtime_cpu.ceilings import read_rate

        return read_rate() if native.isa_in_use() else super().read_rate(rank)

    def communicator(
        self, rank: int, size: int, init_method: str, timeout: float = 600.0
    ) -> Communicator:
        import torch

        from ds_runtime_cpu.collectives import HostCommunicator

        # With more than two ranks a 16-bit sum would round at every hop.
        wide = torch.float32 if size > 2 else None
        return HostCommunicator("gloo", rank, size, init_method, timeout, wide)
