"""The communicator of NVIDIA GPUs: NCCL's, and sums over NVLink for small messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ds_runtime.api import TorchCommunicator
from ds_runtime_cuda import gather_logits, normed_sum
from ds_runtime_cuda.gather_logits import GatherLogits
from ds_runtime_cuda.normed_sum import NormedSum
from ds_runtime_cuda.quant import GROUP, groups_of
from ds_runtime_cuda.rank_kernels import RankKernels, RankMemory
from ds_runtime_cuda.shared_memory import OneShot, OrderedSum, SharedMemory, TwoShot, shared

_IN_ORDER = "sums in the order of the ranks gather their parts"
_LIBRARY = "all-reduces of every size are NCCL's"
_FAST: dict[str, type[OneShot] | type[TwoShot]] = {"one_shot": OneShot, "two_shot": TwoShot}
_COMPOSED = "the add and the norm after sums are kernels of their own"
_ALL_GATHER = "logits of every size are gathered by NCCL"
_CHECKED = 8192  # bytes
_KERNELS = (9, 0)  # the oldest compute capability of kernels of this plugin's own


class NvlinkCommunicator(TorchCommunicator):
    """NCCL's. sizes: called for those of groups that share memory."""

    def __init__(self, *args: Any, sizes: Callable[[], Sequence[int]], **more: Any) -> None:
        super().__init__(*args, **more)
        self._sizes = sizes

    def ordered_sum(self, values: int) -> Callable[[Tensor], Tensor] | None:
        """None where a rank could not share its memory; rank 0 says why."""
        made = self._memory(4 * values)
        if made is None or not shared(self, made, partial(_check_order, self), _IN_ORDER):
            return None
        return OrderedSum(made)

    def fast_sums(self, nbytes: int) -> Mapping[str, Callable[[Tensor], Tensor]]:
        """Empty where a rank could not share its memory; rank 0 says why."""
        made = self._memory(nbytes)
        if made is None or not shared(self, made, partial(_check_sums, self), _LIBRARY):
            return {}
        return {kind: sum_of(made) for kind, sum_of in _FAST.items()}

    def normed_sum(self, nbytes: int) -> NormedSum | None:
        """None where a rank could not share its memory, with rank 0's reason in the log, and where
        a device is older than the kernel's instructions."""
        made = self._kernels(nbytes, normed_sum.KERNELS, _check_norm, _COMPOSED)
        return None if made is None else NormedSum(made)

    def gather_logits(self, nbytes: int) -> GatherLogits | None:
        """None as of `normed_sum`."""
        made = self._kernels(nbytes, gather_logits.KERNELS, _check_gather, _ALL_GATHER)
        return None if made is None else GatherLogits(made)

    def _kernels(
        self, nbytes: int, of: RankKernels, check: Callable[[Any, Any], None], instead: str
    ) -> RankMemory | None:
        """Memory for the kernels `of`, which passed `check` on all ranks."""
        assert self._device is not None
        able = self.size in self._sizes() and _capability(self._device) >= _KERNELS
        if not all(self.gather_objects(able)):
            return None
        made = RankMemory(self._group, nbytes, self._device, self.rank, self.size, of)
        return made if shared(self, made, partial(check, self), instead) else None

    def _memory(self, nbytes: int) -> SharedMemory | None:
        """Not allocated yet; None where a rank says that its links share none."""
        if not all(self.gather_objects(self.size in self._sizes())):
            return None
        assert self._device is not None
        return SharedMemory(self._group, nbytes, self._device)


def _check_order(comm: TorchCommunicator, made: SharedMemory) -> None:
    """Sums whose bits tell the order: 1 is lost beside 2 ** 24, if it is added first."""
    assert comm._device is not None
    parts = [(1.0, 2.0**24, -(2.0**24), 3.0)[rank % 4] for rank in range(comm.size)]
    want = torch.zeros((), dtype=torch.float32)
    for part in parts:
        want += part
    x = torch.full((min(257, made.nbytes // 4),), parts[comm.rank], device=comm._device)
    found = OrderedSum(made)(x).cpu()
    if not bool((found == want).all()):
        raise RuntimeError(f"a sum of {parts} is {found[0].item()} instead of {want.item()}")


def _check_sums(comm: TorchCommunicator, made: SharedMemory) -> None:
    """Every kind, with whole numbers, of which another one stands in each place. All of them are
    summed before one is looked at: a rank that left early would keep the others waiting."""
    cases = [(kind, dtype) for kind in _FAST for dtype in (torch.float32, torch.bfloat16)]
    results = []
    for kind, dtype in cases:
        places = torch.arange(min(_CHECKED, made.nbytes) // dtype.itemsize, device=comm._device)
        results.append(_FAST[kind](made)((places % 13 + comm.rank).to(dtype)).cpu())
    for (kind, dtype), found in zip(cases, results, strict=True):
        places = torch.arange(found.numel()) % 13
        want = (comm.size * places + comm.size * (comm.size - 1) // 2).to(dtype)
        if wrong := int((found != want).sum()):
            raise RuntimeError(f"{kind} of {dtype}: {wrong} of {found.numel()} sums are wrong")


def _check_norm(comm: TorchCommunicator, made: RankMemory) -> None:
    """Three calls, so that each half is used, with whole numbers whose sum is exact; and one more
    whose norm is quantised, which `groups_of` does to what the third gave."""
    width = min(_CHECKED, made.half) // 2 // GROUP * GROUP or 8
    norm = NormedSum(made)
    places = (torch.arange(width, device=comm._device) % 13).view(1, -1)
    residual, weight, results = places.to(torch.bfloat16), torch.ones_like(places[0]).float(), []
    for call in range(3):
        x = (places + comm.rank + call).to(torch.bfloat16)
        results.append([y.cpu() for y in norm(x, residual.clone(), weight, 1e-6)])
    coded = []
    if width % GROUP == 0:
        coded = [y.cpu() for y in norm.quantized(x, residual.clone(), weight, 1e-6, False)]
    for call, (normed, summed) in enumerate(results):
        place = torch.arange(width) % 13
        ranks = comm.size * (place + call) + comm.size * (comm.size - 1) // 2
        want = (ranks + place).double()
        if wrong := int((summed[0].double() != want).sum()):
            raise RuntimeError(f"call {call}: {wrong} of {width} sums are wrong")
        want = want / (want.square().mean() + 1e-6).sqrt()
        off = float((normed[0].double() - want).abs().max())
        if off > 2.0**-8 * float(want.max()):
            raise RuntimeError(f"call {call}: a norm is off by {off:.3g}")
    if coded:
        codes, scale = groups_of(normed)
        same = torch.equal(codes.view(1, -1).float(), coded[0].float())
        if not (same and torch.equal(scale, coded[1]) and torch.equal(summed, coded[2])):
            raise RuntimeError("a norm is quantised otherwise than by torch")


def _check_gather(comm: TorchCommunicator, made: RankMemory) -> None:
    """Three calls, so that each half is used, of two rows with whole numbers. Chunks beside each
    other, rows and ranks differ. Rows end before what fills them up."""
    rows = 2 if made.half >= 4 * GROUP else 1
    each, gather, results = min(_CHECKED, made.half // 2) // rows // 8 * 8, GatherLogits(made), []
    width = comm.size * each - 3
    for call in range(3):
        out = torch.full((rows, width), -1.0, device=comm._device)
        gather(_whole_logits(rows, each, comm.rank, call).to(comm._device), out)
        results.append(out.cpu())
    for call, found in enumerate(results):
        every = [_whole_logits(rows, each, rank, call) for rank in range(comm.size)]
        if wrong := int((found != torch.cat(every, 1).float()[:, :width]).sum()):
            raise RuntimeError(f"call {call}: {wrong} of {found.numel()} logits are wrong")


def _whole_logits(rows: int, each: int, rank: int, call: int) -> Tensor:
    """Numbers below 251, which bfloat16 has exactly. 251 is a prime: neighbours of 8 columns, of a
    row and of a rank have others."""
    place = torch.arange(each) + 97 * torch.arange(rows).view(-1, 1) + 31 * rank + 5 * call
    return (place % 251).to(torch.bfloat16)


def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
