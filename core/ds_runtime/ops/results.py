"""What comes back from a call of each op, by shape and dtype: the contracts' own words as a table.

Ops that give nothing back are left out. Torch-free: dtypes are names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from ds_runtime.ops.contract import Facts

Form = tuple[tuple[int, ...], str]
_F32, _I32, _I64, _FP8 = "float32", "int32", "int64", "float8_e4m3fn"


def form(x: Tensor) -> Form:
    """Of a tensor."""
    return tuple(x.shape), _name(x)


def forms(values: Iterable[Any]) -> tuple[Form, ...]:
    """Of the tensors among these."""
    return tuple(form(value) for value in values if hasattr(value, "data_ptr"))


def said(forms: tuple[Form, ...]) -> str:
    """`[32, 512] bfloat16 and [32, 4] float32`."""
    each = (f"{list(shape)} {dtype}" for shape, dtype in forms)
    return " and ".join(each) or "nothing"


def _name(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def _codes(shape: tuple[int, ...], group: int) -> tuple[Form, Form]:
    return (shape, _FP8), ((shape[0], shape[1] // group), _F32)


def _half(x: Tensor) -> tuple[int, int]:
    return x.shape[0], x.shape[1] // 2


def _out(facts: Facts, x: Tensor, dtype: str) -> tuple[Form]:
    return (((x.shape[0], facts.shape[0]), dtype),)


def _latent(q: Tensor, width: int) -> tuple[Form]:
    return (((q.shape[0], q.shape[1], width), _name(q)),)


def _attended(q: Tensor, width: int) -> tuple[Form, Form]:
    rows, heads = q.shape[:2]
    return ((rows, heads, width), _name(q)), ((rows, heads), _F32)


def _expanded(facts: Facts, x: Tensor) -> tuple[Form, Form]:
    rows, heads = x.shape[0], facts.dims["heads"]
    nope, v = facts.dims["qk_nope"], facts.dims["v"]
    return ((rows, heads, nope), _name(x)), ((rows, heads, v), _name(x))


def _gathered(segs: Any, cache_width: int, kv_lora: int, dtype: Any) -> tuple[Form, Form]:
    rows, dtype = sum(segs.lens), str(dtype).removeprefix("torch.")
    return ((rows, kv_lora), dtype), ((rows, cache_width), dtype)


def _routed(logits: Tensor, routing: Any) -> tuple[Form, Form]:
    shape = logits.shape[0], routing.top_k + routing.shared
    return (shape, _F32), (shape, _I32)


def _prologue(facts: Facts, q: Tensor, kv: Tensor) -> tuple[Form, Form, Form]:
    rope, width = facts.dims["qk_rope"], facts.dims["kv_lora"]
    rows, heads = q.shape[:2]
    return ((rows, heads, rope), _name(q)), ((rows, width), _name(kv)), ((rows, rope), _name(kv))


def _inputs(facts: Facts, x: Tensor) -> tuple[Form, Form]:
    dims, rows = facts.dims, x.shape[0]
    query = rows, dims["heads"], dims["kv_lora"] + dims["qk_rope"]
    return (query, _name(x)), ((rows, dims["q_lora"]), _name(x))


# By op, and method of one that is an object; called with the facts of the place and the arguments.
RESULTS: dict[str, Callable[..., tuple[Form, ...]]] = {
    "embed": lambda f, ids, table, start: (((ids.shape[0], table.shape[1]), _name(table)),),
    "rms_norm": lambda f, x, *_: (form(x),),
    "add_rms_norm": lambda f, x, *_: (form(x), form(x)),
    "rms_norm_quantize": lambda f, x, w, eps, group, u: _codes(tuple(x.shape), group),
    "add_rms_norm_quantize": lambda f, x, r, w, eps, group, u: (
        *_codes(tuple(x.shape), group),
        form(x),
    ),
    "rope": lambda f, q, k, *_: (form(q), form(k)),
    "linear.apply": lambda f, x, *_: _out(f, x, _name(x)),
    "linear.apply_float32": lambda f, x, *_: _out(f, x, _F32),
    "linear.apply_quantized": lambda f, q, *_: _out(f, q, f.dtype),
    "quantize_group": lambda f, x, group, u: _codes(tuple(x.shape), group),
    "cache_gather": lambda f, cache, table, starts, segs, kv_lora, dtype: _gathered(
        segs, f.dims["qk_rope"], kv_lora, dtype
    ),
    "mla_inputs.apply": lambda f, x, *_: _inputs(f, x),
    "mla_prologue": lambda f, q, kv, *_: _prologue(f, q, kv),
    "mla_absorb.expand": lambda f, x, packed: _expanded(f, x),
    "mla_absorb.apply_q": lambda f, q, rope, packed: _latent(
        q, f.dims["kv_lora"] + rope.shape[2]
    ),
    "mla_absorb.apply_v": lambda f, x, packed: _latent(x, f.dims["v"]),
    "mha_prefill": lambda f, q, q_rope, k, k_rope, v, *_: _attended(q, v.shape[2]),
    "mha_prefill_quantize": lambda f, q, q_rope, k, k_rope, v, segs, scale, group, u: _codes(
        (q.shape[0], q.shape[1] * v.shape[2]), group
    ),
    "merge_state": lambda f, a, lse, *_: (form(a), form(lse)),
    "mla_decode.run": lambda f, state, q, *_: _latent(q, f.dims["kv_lora"]),
    "mha_decode.run": lambda f, state, q, *_: _latent(q, f.dims["v"]),
    "index_prologue": lambda f, q, *_: (
        (tuple(q.shape), f.index_dtype),
        (tuple(q.shape[:2]), _F32),
    ),
    "index_scores": lambda f, q, w, cache, table, *_: (
        ((q.shape[0], table.shape[1] * f.page_size), _F32),
    ),
    "index_topk": lambda f, scores, lens, owners, table, size, k: (
        ((scores.shape[0], k), _I32),
    ),
    "index_select": lambda f, q, w, cache, table, owners, lens, k: (((q.shape[0], k), _I32),),
    "sparse_prefill": lambda f, q, cache, slots, width, scale: _latent(q, width),
    "sparse_decode": lambda f, q, cache, slots, width, scale: _latent(q, width),
    "silu_mul": lambda f, x: ((_half(x), _name(x)),),
    "silu_mul_quantize": lambda f, x, group, u: _codes(_half(x), group),
    "router_logits": lambda f, x, w: (((x.shape[0], w.shape[0]), _F32),),
    "route": lambda f, logits, bias, routing: _routed(logits, routing),
    "experts.apply": lambda f, x, *_: (form(x),),
    "mask_logits": lambda f, logits, *_: (form(logits),),
    "sample": lambda f, logits, *_: (((logits.shape[0],), _I64),),
    "logprobs": lambda f, logits, ids, n: (
        ((logits.shape[0],), _F32),
        ((logits.shape[0], n), _F32),
        ((logits.shape[0], n), _I64),
    ),
}  # fmt: skip
