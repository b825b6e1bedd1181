"""The small parts that layers are made of: each owns its weights and the kernel that reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ds_runtime.ops.spec import Facts

if TYPE_CHECKING:
    from torch import Tensor

    from ds_runtime.ops import attention, linear, moe
    from ds_runtime.ops.table import Ops
    from ds_runtime.ops.weight import ExpertSource, Packed, Weight


class Linear:
    """y = x · Wᵀ with this rank's part of W; sums over ranks are the caller's."""

    __slots__ = ("_kernel", "packed")

    def __init__(self, kernel: linear.Linear, weight: Weight, facts: Facts) -> None:
        self._kernel = kernel
        self.packed: Packed = kernel.pack(weight, facts)

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, in] → [tokens, out]."""
        return self._kernel.apply(x, self.packed)


class RmsNorm:
    """A norm weight with its epsilon."""

    __slots__ = ("_ops", "eps", "weight")

    def __init__(self, ops: Ops, weight: Tensor, eps: float) -> None:
        self._ops = ops
        self.weight = weight
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, n] → [tokens, n]."""
        return self._ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual); `residual` must not be used afterwards."""
        return self._ops.add_rms_norm(x, residual, self.weight, self.eps)


class Embedding:
    """This rank's rows of the vocabulary, the first being token `start`."""

    __slots__ = ("_ops", "start", "table")

    def __init__(self, ops: Ops, table: Tensor, start: int) -> None:
        self._ops = ops
        self.table = table
        self.start = start

    def __call__(self, ids: Tensor) -> Tensor:
        """[tokens] → [tokens, hidden], zero rows for ids of other ranks."""
        return self._ops.embed(ids, self.table, self.start)


class Absorb:
    """kv_b_proj in its three uses."""

    __slots__ = ("_kernel", "packed")

    def __init__(self, kernel: attention.MlaAbsorb, weight: Weight, facts: Facts) -> None:
        self._kernel = kernel
        self.packed: Packed = kernel.pack(weight, facts)

    def expand(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """[T, kv_lora] → (k_nope [T, heads, nope], v [T, heads, v])."""
        return self._kernel.expand(latent, self.packed)

    def apply_q(self, q_nope: Tensor) -> Tensor:
        """[T, heads, nope] → [T, heads, kv_lora]."""
        return self._kernel.apply_q(q_nope, self.packed)

    def apply_v(self, x: Tensor) -> Tensor:
        """[T, heads, kv_lora] → [T, heads, v]."""
        return self._kernel.apply_v(x, self.packed)


class Experts:
    """The routed experts of one layer, this rank's width of each."""

    __slots__ = ("_kernel", "packed")

    def __init__(self, kernel: moe.Experts, source: ExpertSource, facts: Facts) -> None:
        self._kernel = kernel
        self.packed: Packed = kernel.pack(source, facts)

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """x [tokens, hidden], weights and ids [tokens, top_k] → [tokens, hidden]."""
        return self._kernel.apply(x, weights, ids, self.packed)
