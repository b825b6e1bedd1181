"""Attention contracts: MLA as plain multi-head prefill and as absorbed paged decode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from ds_runtime.ops.contract import Op

if TYPE_CHECKING:
    from torch import Tensor

    from ds_runtime.ops.batch import Batch, Limits, Segments
    from ds_runtime.ops.contract import Facts
    from ds_runtime.ops.weight import MlaWeights, Packed, Weight

_REF = "ds_runtime.ops.reference.attention.dense"
_TOLERANCE = {"float32": 2e-5, "bfloat16": 1.2e-2, "float16": 3e-3}


class MhaPrefill(Protocol):
    """Variable-length multi-head attention with log-sum-exp.

    q: [Tq, heads, nope] and q_rope: [Tq, heads, rope] are the two parts of queries, k: [Tk,
    heads, nope] and k_rope: [Tk, rope] those of keys, whose rope part all heads share; v: [Tk,
    heads, d_v] of any width. Head dims contiguous, rows may be strided; `with_rope` joins parts.
    Sequence i owns q_segs.lens[i] queries and k_segs.lens[i] keys (one k segment per q segment).
    causal: query j of a sequence sees keys ≤ j + (k_len − q_len); otherwise all keys of its
    sequence. Softmax in fp32 of (q·k + q_rope·k_rope)·scale, scale > 0.
    Returns (out [Tq, heads, d_v] in q.dtype, lse [Tq, heads] float32, natural log). A query
    without keys gives out 0 and lse −inf. Zero sequences or tokens are legal.
    """

    def __call__(
        self,
        q: Tensor,
        q_rope: Tensor,
        k: Tensor,
        k_rope: Tensor,
        v: Tensor,
        q_segs: Segments,
        k_segs: Segments,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor]: ...


class MhaPrefillQuantize(Protocol):
    """QuantizeGroup of MhaPrefill's out, among new tokens alone. A fusion.

    q … v, segs and scale as in MhaPrefill with q_segs = k_segs = segs, causal; group is d_v, so one
    per head, ue8m0 as in QuantizeGroup. out is rounded to q.dtype before it is quantised. Returns
    (codes [T, heads · d_v] float8_e4m3fn, scale [T, heads] float32, of any strides).
    """

    def __call__(
        self,
        q: Tensor,
        q_rope: Tensor,
        k: Tensor,
        k_rope: Tensor,
        v: Tensor,
        segs: Segments,
        scale: float,
        group: int,
        ue8m0: bool,
    ) -> tuple[Tensor, Tensor]: ...


class MergeState(Protocol):
    """Combine two partial attentions of the same queries over disjoint keys.

    out_a, out_b: [tokens, heads, d]; lse_a, lse_b: [tokens, heads] float32, −inf where a part
    saw no key (both −inf: out 0, lse −inf). Returns new (out, lse). Computed in fp32.
    """

    def __call__(
        self, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
    ) -> tuple[Tensor, Tensor]: ...


class MlaDecode(Protocol):
    """Absorbed MLA over the paged latent cache: one shared K/V head of kv_lora + rope.

    `state(limits)` allocates the persistent buffers of a step, once. `prepare(state, batch)`
    runs on the host once per step, in place: it reads batch.decode. If the kernel has a true
    `prepares_on_device`, prepare reads nothing of a step on the host but its sequences, q_lens,
    the shapes of its tensors and whether tree is there, and a captured step holds it, in front
    of `run` in the same recording: replays compute anew what it queues, from tensors of
    batch.decode that lie where they were. `run(state, q, cache,
    scale)`: q [rows, heads, kv_lora + rope] (absorbed latent part, then rotated rope part), cache
    one layer in the bound KV layout. Row j of the n rows of sequence i (n = 1, or q_lens[i])
    attends its first kv_lens[i] − (n − 1 − j) cached tokens (≥ 1, the own token included).
    In the phase `tree`, which a kernel serves if it says so, batch.decode.tree may be there: then
    row j attends what DecodePart says instead, its own token always among it, and tokens that it
    does not see are finite.
    Returns [rows, heads, kv_lora] in q.dtype. Softmax in fp32. Tokens beyond kv_lens and pages
    of others may hold NaN. 0 sequences is legal.
    Version 2: a sequence may have several rows. Version 1 had one row per sequence.
    """

    def state(self, limits: Limits) -> Any: ...

    def prepare(self, state: Any, batch: Batch) -> None: ...

    def run(self, state: Any, q: Tensor, cache: Tensor, scale: float) -> Tensor: ...


class MhaDecode(Protocol):
    """Attention of new tokens over a paged cache of expanded keys and values, as in prefill.

    `state`, `prepare` and which tokens a row sees are as in MlaDecode. `run(state, q, q_rope,
    cache, scale)`: q [rows, heads, nope] and q_rope [rows, heads, rope] are the two parts of
    queries, head dims contiguous, rows may be strided; cache is one layer in the bound KV layout,
    whose row of a token has for each head its key [nope] and its value [v], then the rotated key
    [rope] that all heads share. Softmax in fp32 of (q·k + q_rope·k_rope)·scale.
    Returns [rows, heads, v] in q.dtype. Tokens that no row sees and pages of others may hold NaN,
    but for the trees' as in MlaDecode. 0 sequences is legal.
    """

    def state(self, limits: Limits) -> Any: ...

    def prepare(self, state: Any, batch: Batch) -> None: ...

    def run(self, state: Any, q: Tensor, q_rope: Tensor, cache: Tensor, scale: float) -> Tensor: ...


class MlaAbsorb(Protocol):
    """The weight kv_b in its three uses, from one packing.

    `pack(weight, facts)`: weight [heads · (nope + v), kv_lora], per head nope rows then v rows;
    head counts and dims come from facts.dims (heads, qk_nope, v, kv_lora), heads being this
    rank's. `expand(latent [T, kv_lora]) → (k_nope [T, heads, nope], v [T, heads, v])`.
    `apply_q(q_nope [T, heads, nope], q_rope [T, heads, rope]) → [T, heads, kv_lora + rope]`
    multiplies by W_UK, and puts q_rope behind that as it is: queries of the cache's rows.
    `apply_v(x [T, heads, kv_lora]) → [T, heads, v]` multiplies by W_UVᵀ.
    Accumulation in fp32, results in the input's dtype; inputs may be strided; T == 0 is legal.
    Version 1 left q_rope to its caller.
    """

    def pack(self, weight: Weight, facts: Facts) -> Packed: ...

    def expand(self, latent: Tensor, packed: Packed) -> tuple[Tensor, Tensor]: ...

    def apply_q(self, q_nope: Tensor, q_rope: Tensor, packed: Packed) -> Tensor: ...

    def apply_v(self, x: Tensor, packed: Packed) -> Tensor: ...


class MlaPrologue(Protocol):
    """Norm of the latent, rotation of q and k, cache write. A fusion.

    q: [T, heads, nope + rope]; kv: [T, kv_lora + rope]; norm_weight: [kv_lora]; positions, slots:
    [T] int64; cos_sin as in Rope; cache as in CacheWrite. Returns (q_rope [T, heads, rope]
    rotated, latent [T, kv_lora] normed, k_rope [T, rope] rotated), new tensors, and has written
    latent and k_rope to the cache at the slots that are not negative.
    """

    def __call__(
        self,
        q: Tensor,
        kv: Tensor,
        norm_weight: Tensor,
        eps: float,
        positions: Tensor,
        cos_sin: Tensor,
        cache: Tensor,
        slots: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]: ...


class MlaInputs(Protocol):
    """From hidden states to absorbed queries, for steps whose rows all attend the cache. A fusion
    that owns its weights, of linears, norms, mla_absorb.apply_q and mla_prologue.

    `pack(weights, facts)`: MlaWeights of one format; facts.dims has hidden, q_lora, heads, qk_nope,
    qk_rope, v and kv_lora. `apply(x, eps, positions, cos_sin, cache, slots, packed)`: x is
    [T, hidden], positions and slots [T] int64, cos_sin as in Rope, cache as in CacheWrite. With
    latent = norm(q_a x), the queries are q_b latent, their nope part times W_UK as in MlaAbsorb,
    their rope part rotated; kv_a x is normed, rotated and written as MlaPrologue does. eps is that
    of both norms. Returns (query [T, heads, kv_lora + rope], latent [T, q_lora]), new. T == 0 is
    legal.
    """

    def pack(self, weights: MlaWeights, facts: Facts) -> Packed: ...

    def apply(
        self,
        x: Tensor,
        eps: float,
        positions: Tensor,
        cos_sin: Tensor,
        cache: Tensor,
        slots: Tensor,
        packed: Packed,
    ) -> tuple[Tensor, Tensor]: ...


def compose_mla_prologue(
    ops: Any,
    q: Tensor,
    kv: Tensor,
    norm_weight: Tensor,
    eps: float,
    positions: Tensor,
    cos_sin: Tensor,
    cache: Tensor,
    slots: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """MLA_PROLOGUE over the platform's own rms_norm, rope and cache_write."""
    kv_lora = norm_weight.shape[0]
    rope_dim = kv.shape[-1] - kv_lora
    latent = ops.rms_norm(kv[:, :kv_lora], norm_weight, eps)  # [T, kv_lora]
    q_rope, k_rope = ops.rope(q[..., -rope_dim:], kv[:, kv_lora:], positions, cos_sin)
    ops.cache_write(cache, latent, k_rope, slots)
    return q_rope, latent, k_rope


MHA_PREFILL = Op(
    name="mha_prefill",
    protocol=f"{__name__}:MhaPrefill",
    reference=f"{_REF}:mha_prefill",
    samples=f"{_REF}:mha_prefill_samples",
    tolerance=_TOLERANCE,
    heavy=True,
    summary="variable-length attention with log-sum-exp",
)

MHA_PREFILL_QUANTIZE = Op(
    name="mha_prefill_quantize",
    protocol=f"{__name__}:MhaPrefillQuantize",
    reference=f"{_REF}:mha_prefill_quantize",
    samples=f"{_REF}:mha_prefill_quantize_samples",
    tolerance={"float32": 4e-2, "bfloat16": 4e-2, "float16": 4e-2},  # of e4m3
    optional=True,
    uses=("mha_prefill",),
    summary="attention of new tokens and FP8 quantisation, fused",
)

MERGE_STATE = Op(
    name="merge_state",
    protocol=f"{__name__}:MergeState",
    reference=f"{_REF}:merge_state",
    samples=f"{_REF}:merge_state_samples",
    tolerance=_TOLERANCE,
    summary="merge partial attentions by log-sum-exp",
)

MLA_DECODE = Op(
    name="mla_decode",
    protocol=f"{__name__}:MlaDecode",
    reference=f"{_REF}:ReferenceMlaDecode",
    samples=f"{_REF}:mla_decode_samples",
    # Queries and probabilities in e4m3, each 2.6e-2 in the mean square, of scores that add up.
    tolerance={**_TOLERANCE, "fp8_queries": 6e-2},
    kind="object",
    adapter="ds_runtime.ops.binding.adapters:mla_decode",
    heavy=True,
    layout="kv",
    summary="absorbed attention over the paged latent cache",
)

MHA_DECODE = Op(
    name="mha_decode",
    protocol=f"{__name__}:MhaDecode",
    reference="ds_runtime.ops.reference.attention.expanded:ReferenceMhaDecode",
    samples="ds_runtime.ops.reference.attention.expanded:mha_decode_samples",
    tolerance=_TOLERANCE,
    kind="object",
    heavy=True,
    layout="kv",
    summary="attention over the paged cache of expanded keys and values",
)

MLA_ABSORB = Op(
    name="mla_absorb",
    protocol=f"{__name__}:MlaAbsorb",
    reference=f"{_REF}:ReferenceMlaAbsorb",
    samples=f"{_REF}:mla_absorb_samples",
    tolerance={**_TOLERANCE, "fp8_w8a8": 6e-2},  # as in linear.py
    kind="object",
    heavy=True,
    summary="kv_b: expansion for prefill, absorption for decode",
)

MLA_INPUTS = Op(
    name="mla_inputs",
    protocol=f"{__name__}:MlaInputs",
    reference="ds_runtime.ops.reference.attention.mla_inputs:ReferenceMlaInputs",
    samples="ds_runtime.ops.reference.attention.mla_inputs:mla_inputs_samples",
    tolerance={"float32": 5e-5, "bfloat16": 2e-2, "float16": 5e-3},
    kind="object",
    optional=True,
    uses=("linear", "rms_norm", "mla_absorb", "mla_prologue"),
    layout="kv",
    summary="hidden states to absorbed queries and cache entries, fused",
)

MLA_PROLOGUE = Op(
    name="mla_prologue",
    protocol=f"{__name__}:MlaPrologue",
    reference=f"{_REF}:mla_prologue",
    samples=f"{_REF}:mla_prologue_samples",
    tolerance=_TOLERANCE,
    composition=f"{__name__}:compose_mla_prologue",
    uses=("rms_norm", "rope", "cache_write"),
    layout="kv",
    summary="latent norm, rotation and cache write, fused",
)
