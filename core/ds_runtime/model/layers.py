"""The small parts that layers are made of: each owns its weights and the kernel that reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from ds_runtime.ops.contract import Facts
from ds_runtime.parallel.sums.normed import Summable, Unsummed
from ds_runtime.parallel.sums.overlapped import ended
from ds_runtime.parallel.sums.sizes import SCALED_BY

if TYPE_CHECKING:
    from ds_runtime.lora.slots import AbsorbDelta, Delta
    from ds_runtime.ops.contracts import limited, linear, moe
    from ds_runtime.ops.contracts.attention import latent
    from ds_runtime.ops.table import Ops
    from ds_runtime.ops.weight import ExpertSource, MlaWeights, Packed, Weight


class Codes(NamedTuple):
    """Activations as QuantizeGroup gives them: q [tokens, in], scale [tokens, groups]."""

    q: Tensor
    scale: Tensor


class LinearLayer:
    """y = x · Wᵀ with this rank's part of W; sums over ranks are the caller's.

    `deltas`: what adapters add, in rows that have one.
    """

    __slots__ = ("_gives_float32", "_groups", "_kernel", "deltas", "packed")

    def __init__(
        self,
        kernel: linear.Linear,
        weight: Weight,
        facts: Facts,
        deltas: tuple[Delta, ...] = (),
    ) -> None:
        self._kernel = kernel
        self.packed: Packed = kernel.pack(weight, facts)
        self.deltas = deltas
        self._groups: Callable[[int, Packed], linear.Groups | None] | None
        self._groups = getattr(kernel, "quantizes", None)
        self._gives_float32: Callable[[int, Packed], bool] | None
        self._gives_float32 = getattr(kernel, "gives_float32", None)

    def __call__(self, x: Tensor | Codes, adapters: Tensor | None = None) -> Tensor:
        """[tokens, in] → [tokens, out]; adapters [tokens] as in Batch. Codes: as `quantizes` said
        for so many rows.
        """
        if isinstance(x, Codes):
            kernel: Any = self._kernel
            out: Tensor = kernel.apply_quantized(*x, self.packed)
            return out
        y = self._kernel.apply(x, self.packed)
        if adapters is not None:
            for delta in self.deltas:
                delta.add(y, x, adapters)
        return y

    def float32(self, x: Tensor, adapters: Tensor | None, out: Tensor | None) -> Tensor:
        """A call, in float32 and in `out` if that is given: not rounded before, where the kernel
        can give that.
        """
        kernel: Any = self._kernel
        asks = None if self.deltas else self._gives_float32
        if asks is not None and asks(x.shape[0], self.packed):
            y: Tensor = kernel.apply_float32(x, self.packed, out)
            return y
        y = self(x, adapters)
        return y.float() if out is None else out.copy_(y)

    def quantizes(self, rows: int, adapters: Tensor | None) -> linear.Groups | None:
        """How that many rows may come as codes, if they may: adapters need them as they are."""
        if self._groups is None or (adapters is not None and self.deltas):
            return None
        return self._groups(rows, self.packed)


class RmsNormLayer:
    """A norm weight with its epsilon."""

    __slots__ = ("_ops", "eps", "weight")

    def __init__(self, ops: Ops, weight: Tensor, eps: float) -> None:
        self._ops = ops
        self.weight = weight
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, n] → [tokens, n]."""
        return self._ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: Summable, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual); `residual` must not be used afterwards."""
        if isinstance(x, Unsummed):
            return x.add_norm(residual, self.weight, self.eps)
        return self._ops.add_rms_norm(ended(x), residual, self.weight, self.eps)

    def quantized(self, x: Tensor, groups: linear.Groups) -> Codes:
        """norm(x) of [tokens, n]."""
        return Codes(*self._ops.rms_norm_quantize(x, self.weight, self.eps, *groups))

    def add_quantized(
        self, x: Summable, residual: Tensor, groups: linear.Groups
    ) -> tuple[Codes, Tensor]:
        """(norm(x + residual) as codes, x + residual); `residual` must not be used afterwards."""
        if isinstance(x, Unsummed):
            if groups.size == SCALED_BY:
                made = x.add_norm_quantized(residual, self.weight, self.eps, groups.ue8m0)
                return Codes(*made[:2]), made[2]
            x = x.summed()
        q, scale, summed = self._ops.add_rms_norm_quantize(
            ended(x), residual, self.weight, self.eps, *groups
        )
        return Codes(q, scale), summed


class GroupedLayer:
    """y[:, g] = x[:, g] · W[g]ᵀ with this rank's groups."""

    __slots__ = ("_kernel", "packed")

    def __init__(self, kernel: linear.GroupedLinear, weight: Weight, facts: Facts) -> None:
        self._kernel = kernel
        self.packed: Packed = kernel.pack(weight, facts)

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, groups, in] → [tokens, groups · out]."""
        return self._kernel.apply(x, self.packed)


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


class MlaInputsLayer:
    """Everything before attention in steps that only decode, in one kernel."""

    __slots__ = ("_eps", "_kernel", "packed")

    def __init__(
        self, kernel: latent.MlaInputs, weights: MlaWeights, facts: Facts, eps: float
    ) -> None:
        self._kernel, self._eps = kernel, eps
        self.packed: Packed = kernel.pack(weights, facts)

    def __call__(
        self, x: Tensor, positions: Tensor, cos_sin: Tensor, cache: Tensor, slots: Tensor
    ) -> tuple[Tensor, Tensor]:
        """[T, hidden] → (absorbed queries [T, heads, kv_lora + rope], query latent [T, q_lora])."""
        return self._kernel.apply(x, self._eps, positions, cos_sin, cache, slots, self.packed)


class Absorb:
    """kv_b_proj in its three uses; adapters [T] as in Batch."""

    __slots__ = ("_delta", "_kernel", "packed")

    def __init__(
        self,
        kernel: latent.MlaAbsorb,
        weight: Weight,
        facts: Facts,
        delta: AbsorbDelta | None = None,
    ) -> None:
        self._kernel = kernel
        self.packed: Packed = kernel.pack(weight, facts)
        self._delta = delta

    def expand(self, latent: Tensor, adapters: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """[T, kv_lora] → (k_nope [T, heads, nope], v [T, heads, v])."""
        k_nope, v = self._kernel.expand(latent, self.packed)
        if adapters is not None and self._delta is not None:
            self._delta.expand(k_nope, v, latent, adapters)
        return k_nope, v

    def apply_q(self, q_nope: Tensor, q_rope: Tensor, adapters: Tensor | None = None) -> Tensor:
        """[T, heads, nope] and [T, heads, rope] → [T, heads, kv_lora + rope]."""
        out = self._kernel.apply_q(q_nope, q_rope, self.packed)
        if adapters is not None and self._delta is not None:
            latent = out.narrow(2, 0, out.shape[2] - q_rope.shape[2])
            self._delta.apply_q(latent, q_nope, adapters)
        return out

    def apply_v(self, x: Tensor, adapters: Tensor | None = None) -> Tensor:
        """[T, heads, kv_lora] → [T, heads, v]."""
        out = self._kernel.apply_v(x, self.packed)
        if adapters is not None and self._delta is not None:
            self._delta.apply_v(out, x, adapters)
        return out


class ExpertsLayer:
    """The routed experts of one layer, this rank's width of each. limit: of their activations, if
    the kernel is one of ExpertsLimited."""

    __slots__ = ("_kernel", "_limit", "packed")

    def __init__(
        self,
        kernel: moe.Experts | limited.ExpertsLimited,
        source: ExpertSource,
        facts: Facts,
        limit: float | None = None,
    ) -> None:
        self._kernel: Any = kernel
        self._limit = () if limit is None else (limit,)
        self.packed: Packed = kernel.pack(source, facts)

    def quantized(self, rows: int, x: Tensor) -> Codes | None:
        """x [n, hidden] as codes that stand for it in a call of this many rows, where the kernel
        makes these itself."""
        make = None if self._limit else getattr(self._kernel, "quantize", None)
        made = None if make is None else make(rows, x, self.packed)
        return None if made is None else Codes(*made)

    def __call__(
        self, x: Tensor | Codes, weights: Tensor, ids: Tensor, adapters: Tensor | None = None
    ) -> Tensor:
        """x [tokens, hidden], weights and ids [tokens, top_k] → [tokens, hidden]. Codes: as
        `quantized` gave them.

        adapters: of rows whose adapters leave these experts alone.
        """
        if isinstance(x, Codes):
            summed: Tensor = self._kernel.apply_quantized(*x, weights, ids, self.packed)
            return summed
        out: Tensor = self._kernel.apply(x, weights, ids, *self._limit, self.packed)
        return out
