"""The whole vocabulary of the runtime: one typed field per op, bound once at start-up."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from ds_runtime.ops.contract import Op
from ds_runtime.ops.contracts import (
    activation,
    attention,
    cache,
    linear,
    lora,
    moe,
    norm,
    rope,
    sampling,
    sparse,
)

if TYPE_CHECKING:
    from ds_runtime.ops.contracts.attention import (
        MergeState,
        MhaDecode,
        MhaPrefill,
        MhaPrefillQuantize,
        MlaAbsorb,
        MlaDecode,
        MlaInputs,
        MlaPrologue,
    )
    from ds_runtime.ops.contracts.cache import CacheGather, CacheMove, CacheWrite
    from ds_runtime.ops.contracts.linear import Embed, Linear, QuantizeGroup
    from ds_runtime.ops.contracts.lora import LoraDelta
    from ds_runtime.ops.contracts.moe import Experts, Route, RouterLogits

OPS: dict[str, Op] = {
    op.name: op
    for op in (
        linear.EMBED,
        norm.RMS_NORM,
        norm.ADD_RMS_NORM,
        norm.RMS_NORM_QUANTIZE,
        norm.ADD_RMS_NORM_QUANTIZE,
        rope.ROPE,
        linear.LINEAR,
        linear.QUANTIZE_GROUP,
        lora.LORA_DELTA,
        cache.CACHE_WRITE,
        cache.CACHE_GATHER,
        cache.CACHE_MOVE,
        attention.MLA_INPUTS,
        attention.MLA_PROLOGUE,
        attention.MLA_ABSORB,
        attention.MHA_PREFILL,
        attention.MHA_PREFILL_QUANTIZE,
        attention.MERGE_STATE,
        attention.MLA_DECODE,
        attention.MHA_DECODE,
        sparse.INDEX_PROLOGUE,
        sparse.INDEX_SELECT,
        sparse.INDEX_SCORES,
        sparse.INDEX_TOPK,
        sparse.SPARSE_PREFILL,
        sparse.SPARSE_DECODE,
        activation.SILU_MUL,
        activation.SILU_MUL_QUANTIZE,
        moe.ROUTER_LOGITS,
        moe.ROUTE,
        moe.EXPERTS,
        sampling.MASK_LOGITS,
        sampling.SAMPLE,
        sampling.LOGPROBS,
    )
}


class _Unbound:
    """Stands in an Ops view for an op that the site did not ask for; using it is a bug."""

    def __init__(self, op: str, site: str) -> None:
        self._what = f"op {op!r} is not bound at site {site!r}"

    def __call__(self, *args: object, **kwargs: object) -> object:
        raise RuntimeError(self._what)

    def __getattr__(self, name: str) -> object:
        raise RuntimeError(self._what)


@dataclass(frozen=True, slots=True)
class Ops:
    """One site's view: every op that it may call, as a field. Frozen after binding."""

    embed: Embed
    rms_norm: norm.RmsNorm
    add_rms_norm: norm.AddRmsNorm
    rms_norm_quantize: norm.RmsNormQuantize
    add_rms_norm_quantize: norm.AddRmsNormQuantize
    rope: rope.Rope
    linear: Linear
    quantize_group: QuantizeGroup
    lora_delta: LoraDelta
    cache_write: CacheWrite
    cache_gather: CacheGather
    cache_move: CacheMove
    mla_inputs: MlaInputs
    mla_prologue: MlaPrologue
    mla_absorb: MlaAbsorb
    mha_prefill: MhaPrefill
    mha_prefill_quantize: MhaPrefillQuantize
    merge_state: MergeState
    mla_decode: MlaDecode
    mha_decode: MhaDecode
    index_prologue: sparse.IndexPrologue
    index_select: sparse.IndexSelect
    index_scores: sparse.IndexScores
    index_topk: sparse.IndexTopk
    sparse_prefill: sparse.SparseMla
    sparse_decode: sparse.SparseMla
    silu_mul: activation.SiluMul
    silu_mul_quantize: activation.SiluMulQuantize
    router_logits: RouterLogits
    route: Route
    experts: Experts
    mask_logits: sampling.MaskLogits
    sample: sampling.Sample
    logprobs: sampling.Logprobs

    @staticmethod
    def of(bound: dict[str, object], site: str) -> Ops:
        """A view from op name → callable or object; the rest raises when used."""
        values = {f.name: bound.get(f.name, _Unbound(f.name, site)) for f in fields(Ops)}
        return Ops(**values)  # type: ignore[arg-type]
