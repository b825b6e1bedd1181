"""The Platform contract: device facts, memory, communication. Torch-free at import.

A plugin subclasses `Platform`; methods are called once per process or once per step, never per
layer. Tensors and torch devices appear only in annotations.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from ds_runtime.errors import ConfigError, UnsupportedError
from ds_runtime.ops.contract import API_VERSION, DeviceInfo

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ds_runtime.config import EngineConfig
    from ds_runtime.platform.page_copies import PageCopies


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Device memory, as this process may use it (limits of containers respected). total, free:
    bytes.
    """

    total: int
    free: int


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The most that a device reaches, measured on it. Figures of kernels are compared with it.

    * bandwidth: bytes per second of the fastest reading of memory, out of every cache.
    * compute: dtype → operations per second of the fastest matmul ("int8": integer operations). A
      dtype that is missing was not measured.
    * cache: bytes of the last-level cache, 0 if unknown.
    * note: how it was measured.
    """

    bandwidth: float
    compute: Mapping[str, float]
    cache: int = 0
    note: str = ""


class NormedSum(Protocol):
    """AddRmsNorm of a sum over ranks, and AddRmsNormQuantize. All ranks have the same bits.

    x: this rank's part, bfloat16 [rows, width], which is not modified. residual: of the same shape
    and dtype, the same on all ranks; it must not be used afterwards. Width is a multiple of 8 of at
    most 16384. weight: [width], bfloat16 or float32. Parts are added in float32 from rank 0 on.
    Their sum is rounded to bfloat16. `summed` is that sum plus the residual, rounded to bfloat16
    again. The norm is that of `summed`. Every rank calls this for as many rows, in captured steps,
    too.
    """

    def __call__(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """(normed, summed), both bfloat16 [rows, width]."""
        ...

    def quantized(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, ue8m0: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(codes, scale, summed): the norm as AddRmsNormQuantize gives it by groups of 128, of
        which width is a multiple."""
        ...


class Communicator(Protocol):
    """Collectives of one group of ranks. Every rank calls each in the same order.

    rank: this one's number in the group. size: ranks of the group.

    Needed: all_reduce, all_gather, gather_rows, gather_objects and close. The kit and the
    benchmarks alone call broadcast, send, receive and barrier: no engine needs them. A communicator
    may leave out the others:

    * split: without it `--enable-dp-attention` and `--ep` are refused where they need groups.
    * reduce_scatter: without it `--enable-dp-attention` is refused.
    * all_reduce_async: without it `--enable-two-batch-overlap` is refused.
    * all_to_all: without it `reduce_scatter` with `--batch-invariant` gathers the parts of all.
    * ordered_sum: without it sums with `--batch-invariant` gather the parts of all.
    * fast_sums: without it `all_reduce` makes every sum.
    * normed_sum: without it the add and the norm after sums are kernels of their own.
    * gather_logits: without it `all_gather` gathers all logits.
    """

    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum of `x` over the ranks, any shape and float dtype; may reuse `x`'s storage."""
        ...

    def all_reduce_async(self, x: Tensor) -> Callable[[], Tensor]:
        """Start the sum that `all_reduce` makes, which then overlaps what is queued after it.
        Returns a function. Calling it returns the sum, and makes what is queued from then on wait
        for it. Every rank calls each of these functions once, in the order in which it started the
        sums. Only an error leaves a sum without its call. `x` must not be used afterwards. Steps
        that are captured start no such sums.
        """
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """[..., n] per rank → [..., size * n], concatenated along the last dim by rank."""
        ...

    def gather_rows(self, x: Tensor) -> Tensor:
        """[n, ...] per rank, n ≥ 1 the same on all, any dtype → [size * n, ...], by rank."""
        ...

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Sum of `x` [size * n, ...] over the ranks, any float dtype. Returns this rank's rows [n,
        ...], those that `gather_rows` would put there.
        """
        ...

    def all_to_all(self, x: Tensor) -> Tensor:
        """[size * n, ...] per rank, n the same on all, any dtype → [size * n, ...] by rank. These
        are the n rows that each rank has for this one.
        """
        ...

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """`x` of the rank `source` of this group, on every rank; may reuse `x`'s storage. Shape and
        dtype are the same on all.
        """
        ...

    def send(self, x: Tensor, to: int) -> None:
        """Give `x` to the rank `to` of this group, which calls `receive` for it."""
        ...

    def receive(self, shape: Sequence[int], dtype: torch.dtype, source: int) -> Tensor:
        """What the rank `source` of this group sends: a new tensor of this shape and dtype."""
        ...

    def barrier(self) -> None:
        """Return once every rank has called it, and what it queued before is done."""
        ...

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's picklable object, by rank, on every rank; between trusted ranks only."""
        ...

    def ordered_sum(self, values: int) -> Callable[[Tensor], Tensor] | None:
        """How ranks of one host add at once, for `--batch-invariant`. Returns a function that takes
        up to `values` values, of the same shape on all ranks and of at most 4 bytes. It returns the
        sums [n], added in float32 from rank 0 on. It runs in steps that are captured, too. None:
        parts are gathered and added. Every rank asks at the same time, once for each group.
        """
        ...

    def fast_sums(self, nbytes: int) -> Mapping[str, Callable[[Tensor], Tensor]]:
        """Sums for small messages that ranks of one host have besides `all_reduce`, by kind:
        `one_shot` and `two_shot` (`parallel/sums/kinds.py`). Each takes a contiguous tensor of
        float32 or bfloat16 values, the same shape on all ranks. It has at most `nbytes` bytes, a
        multiple of 16. Each returns the sum as a new tensor, with the same bits on all ranks, and
        runs in steps that are captured, too. Empty: `all_reduce` serves every size. Every rank asks
        at the same time, once for each group.
        """
        ...

    def normed_sum(self, nbytes: int) -> NormedSum | None:
        """Small sums over ranks of one host in one kernel with the add and the norm after them, of
        parts of up to `nbytes` bytes. None: they are composed of a sum and AddRmsNorm. Every rank
        asks at the same time, once for each group.
        """
        ...

    def gather_logits(self, nbytes: int) -> Callable[[Tensor, Tensor], None] | None:
        """The head's gather of few rows in one kernel, between ranks of one host. Returns a
        function of (x, out). Each rank gives its part x, bfloat16 [rows, n] of the same shape on
        all. It has up to `nbytes` bytes, and n is a multiple of 8. The function writes the first
        `width` columns of all parts, in the order of the ranks, to out: float32 [rows, width],
        width ≤ size * n. It runs in steps that are captured, too. None: `all_gather` serves every
        size. Every rank asks at the same time, once for each group.
        """
        ...

    def split(self, groups: Sequence[Sequence[int]]) -> Communicator:
        """This rank's group of several that each rank names alike: every rank is in one of them.

        groups: ranks of this group. Those of the new one are numbered by their order in it.
        """
        ...

    def close(self) -> None:
        """Leave the group; those split from it have been left before."""
        ...


class GraphBackend(Protocol):
    """Records the device work of a step once, to queue it again at little cost for the host."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Record what `run` queues; the function that is returned queues it again.

        A replay reads and writes the tensors that `run` used, where they lie: their owner fills
        inputs in place before, and copies results before the next replay. What `run` decided on
        the host stays as it was. `run` was called before, so that nothing is compiled or set up
        in here, and waits for nothing. What it allocates comes from a pool that all captures of
        one backend share: replays follow each other in one queue.
        """
        ...


class Platform(ABC):
    """One kind of device. A plugin's class inherits from it and sets what is true of its devices.

    * name: what `--platform` takes.
    * family: what people call such devices, in the plural ("Acme GPUs"). Empty: the platform's
      name.
    * api_version: the plugin interface that the class was written for, as a number.
    * score: orders the platforms that work here; the highest is `auto`. One below 0 is used only if
      it is named.
    * asynchronous: work is queued, and the device computes in parallel with the host.
    * captures: `graph_backend` returns a backend.
    * branches: its captures run work of `branch` in parallel.
    * captures_prefill: torch can address what a capture allocates. Nobody else uses it until
      another capture of the backend is made or replayed. So steps with prompts are captured, too,
      in pieces between attentions. It has no effect with capture_after.
    * capture_after: 0 if steps are captured at start. Else each decode step, with drafts or
      without, is captured when it has run that often op by op. This is for devices on which
      recording is cheap and a spare row is not. The capture runs the step, too.
    * ordered_sums: link of the devices of one host → every size of a group whose communicator
      has an `ordered_sum`.
    * fast_sums: the same for the communicator's `fast_sums`, `normed_sum` and `gather_logits`.
    * on_host: kernels run on the host's cores. `DeviceInfo.cores` are these, and ranks divide them.
    * own_memory: the device's memory is for the engine alone. The KV cache then takes what weights
      and steps leave.
    * kv_share: on other devices, the share of the memory that is free after loading that the KV
      cache takes at most, unless the user sets it.
    * local_rank: the index of this process's device, once it is an engine's. If a server runs
      several engines, their ranks are numbered through.
    """

    name: str = ""
    family: str = ""
    api_version: int = API_VERSION
    score: int = 0
    asynchronous: bool = False
    captures: bool = False
    branches: bool = False
    captures_prefill: bool = False
    capture_after: int = 0
    on_host: bool = False
    own_memory: bool = False
    kv_share: float = 0.25
    local_rank: int | None = None
    ordered_sums: Mapping[str, tuple[int, ...]] = MappingProxyType({})
    fast_sums: Mapping[str, tuple[int, ...]] = MappingProxyType({})

    def configure(self, config: EngineConfig) -> None:
        """Take the settings that are about this device; called in every process once it is chosen.

        Before `info`, and torch-free. Raises ConfigError for a value that cannot be used here,
        naming those that can. The default refuses what this device has no choice of.
        """
        if config.cpu_isa != "auto":
            raise ConfigError(
                f"--cpu-isa {config.cpu_isa}: platform {self.name} has no instruction sets to "
                "choose from; leave the flag out"
            )

    @abstractmethod
    def info(self, rank: int = 0) -> DeviceInfo:
        """Facts of the device of local rank `rank`; must not import torch."""

    def device_info(self, rank: int = 0) -> DeviceInfo:
        """`info`, with the family that its platform is of."""
        info = self.info(rank)
        own = info.family if self.name == info.type else self.name
        return replace(info, family=self.family or own)

    @abstractmethod
    def device(self, rank: int = 0) -> torch.device:
        """The torch device of local rank `rank`."""

    @abstractmethod
    def memory(self, rank: int = 0) -> MemoryInfo:
        """Total and free memory now."""

    def process_env(self) -> Mapping[str, str]:
        """Environment variables that this device's libraries read when they are loaded.

        Set in every process that the engine starts, before torch is imported there, where the
        user has not set them. The caller's own process is left alone.
        """
        return {}

    def threads(self, size: int, wanted: int | None = None) -> int:
        """Threads of the host on which kernels of one rank run, of `size` on this machine: `wanted`
        (`--threads`), else the rank's share of the cores. 1 where a device computes.
        """
        return (wanted or max(1, self.info().cores // size)) if self.on_host else 1

    def init_worker(  # noqa: B027 (optional: most devices need nothing)
        self, rank: int, size: int, threads: int | None = None
    ) -> None:
        """Called once in each rank's process before any tensor exists (threads, affinity).

        `rank` is `local_rank`, and `size` the ranks of all engines on this machine.
        """

    def communicator(
        self, rank: int, size: int, init_method: str, timeout: float = 600.0
    ) -> Communicator:
        """Join the group of `size` ≥ 2 ranks; `init_method` is a torch.distributed address.

        `rank` is the one within its group; its device is that of `local_rank`.
        `timeout`: seconds that this rank waits for the others, in joining and in collectives.
        A platform that does not override this serves one rank.
        """
        raise UnsupportedError(
            f"--tp {size}: platform {self.name} connects no ranks in this version; use --tp 1"
        )

    def graph_backend(self, rank: int = 0) -> GraphBackend:
        """How steps of local rank `rank` are captured; asked where `captures` is true."""
        raise UnsupportedError(f"platform {self.name} captures no steps: use --disable-graph")

    def page_copies(self, rank: int = 0) -> PageCopies:
        """How blocks of caches go from local rank `rank`'s device to host memory and back.

        The default copies with torch, on a stream of its own where the device has streams; override
        it where the device's own means do it faster.
        """
        from ds_runtime.platform.page_copies import TorchPageCopies

        return TorchPageCopies(self.device(rank))

    def ceilings(self, rank: int = 0) -> Ceilings:
        """Measure local rank `rank`'s device: seconds of work, and up to a quarter of free memory.

        The default measures with torch alone; override it where the device's own means reach more.
        """
        from ds_runtime.platform import ceilings

        device, read = self.device(rank), Platform.read_rate(self, rank)
        rates = ceilings.compute(device, self.synchronize, self.info(rank).fast_dtypes)
        note = "torch: sums over a buffer, square matmuls"
        return Ceilings(read, rates, ceilings.cache_bytes(device), note)

    def read_rate(self, rank: int = 0) -> float:
        """Bytes per second that its memory gives right now: a short reading, for machines on which
        that changes from minute to minute.
        """
        from ds_runtime.platform import ceilings

        return ceilings.read_rate(self.device(rank), self.synchronize, self.memory(rank).free)

    def synchronize(self) -> None:  # noqa: B027 (optional: synchronous devices need nothing)
        """Wait until the device has finished all work of this process."""
