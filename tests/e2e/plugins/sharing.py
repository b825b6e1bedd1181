"""The CPU as a platform whose ranks have other kinds of all-reduce, made of Gloo's collectives.
Each rank notes in the file `$SUMS_NOTED.RANK` which kind served how many bytes. `$SUMS_LACKED`:
rank and kind that this rank cannot set up, as "1 one_shot". `$ORDER_LACKED`: no rank can set up a
kernel that adds ranks in order. `$GATHER_LACKED`: nor one that gathers logits. Sums of bfloat16 are
one call with the norm after them.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from ds_runtime.api import hookimpl
from ds_runtime.ops.reference.norm import rms_norm_quantize
from ds_runtime_cpu import small
from ds_runtime_cpu.collectives import HostCommunicator
from ds_runtime_cpu.platform import CpuPlatform

KINDS = ("one_shot", "two_shot")


class Sharing(HostCommunicator):
    def fast_sums(self, nbytes):
        self.most = nbytes
        rank, *lacked = os.environ.get("SUMS_LACKED", "-1").split()
        kinds = {*KINDS} - {*lacked} if rank == str(self.rank) else KINDS
        return {kind: partial(self._sum, kind) for kind in kinds}

    def normed_sum(self, nbytes):
        return Normed(self, nbytes)

    def gather_logits(self, nbytes):
        def gather(x, out):
            assert x.is_contiguous() and x.numel() * x.element_size() <= nbytes
            self._note("gather_logits", x)
            parts = [*super(Sharing, self).gather_rows(x.unsqueeze(0))]
            out.copy_(torch.cat(parts, 1)[:, : out.shape[1]])

        return None if "GATHER_LACKED" in os.environ else gather

    def ordered_sum(self, values):
        return None if "ORDER_LACKED" in os.environ else self._in_order

    def _in_order(self, x):
        self._note("in_order", x)
        parts = super().gather_rows(x.reshape(1, -1)).float()
        return parts[0] + parts[1]

    def _sum(self, kind, x):
        assert x.is_contiguous() and 0 < x.numel() * x.element_size() <= self.most
        assert x.numel() * x.element_size() % 16 == 0
        self._note(kind, x)
        if kind == "one_shot":
            return self._added(super().gather_rows(x.view(1, -1)), x)
        shares = super().all_to_all(x.view(-1)).view(self.size, -1)
        return super().gather_rows(self._added(shares, x.view(-1)[: shares.shape[1]])).view(x.shape)

    def _added(self, parts, like):
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
        return total.to(like.dtype).view(like.shape)

    def all_reduce(self, x):
        self._note("all_reduce", x)
        return super().all_reduce(x)

    def all_reduce_async(self, x):
        self._note("start", x)
        end = super().all_reduce_async(x)

        def ended():
            self._note("end", x)
            return end()

        return ended

    def _note(self, kind, x):
        if at := os.environ.get("SUMS_NOTED"):
            with Path(f"{at}.{self.rank}").open("a") as file:
                file.write(f"{kind} {x.numel() * x.element_size()}\n")


class Normed:
    """One-shot sums with the norm behind them, by the CPU's own kernels."""

    def __init__(self, comm, most):
        self.comm, self.most = comm, most

    def __call__(self, x, residual, weight, eps):
        return small.add_rms_norm(self._sum("normed", x), residual, weight, eps)

    def quantized(self, x, residual, weight, eps, ue8m0):
        summed = self._sum("quantised", x) + residual
        return *rms_norm_quantize(summed, weight, eps, 128, ue8m0), summed

    def _sum(self, kind, x):
        assert x.is_contiguous() and x.numel() * x.element_size() <= self.most
        self.comm._note(kind, x)
        rows = self.comm.gather_rows(x.view(1, -1)) if x.numel() else x.view(1, 0)
        return self.comm._added(rows, x)


class SharingPlatform(CpuPlatform):
    name = "sharing"
    score = -1
    fast_sums = {"host": (2,)}  # noqa: RUF012
    ordered_sums = fast_sums

    def info(self, rank=0):
        return replace(super().info(rank), link="host")

    def communicator(self, rank, size, init_method, timeout=600.0):
        torch.set_num_threads(1)
        return Sharing("gloo", rank, size, init_method, timeout)


@hookimpl
def ds_platform():
    return SharingPlatform()
