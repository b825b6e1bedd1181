"""Tensors of a GGUF file under the names that a checkpoint gives them. Torch-free.

Stacks of experts become one tensor each, as their bytes lie one after the other. kv_b_proj is cut
in two, `k_b` and `v_b`, except in older files. Where a file holds both forms (ik_llama.cpp's, and
those of llama.cpp's draft of MLA), the whole is read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from ds_runtime.checkpoint.gguf.header import GgufTensor
from ds_runtime.errors import CheckpointError

K_B, V_B = "k_b", "v_b"
_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_q_a.weight": "self_attn.q_a_proj.weight",
    "attn_q_a_norm.weight": "self_attn.q_a_layernorm.weight",
    "attn_q_b.weight": "self_attn.q_b_proj.weight",
    "attn_kv_a_mqa.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "attn_kv_a_norm.weight": "self_attn.kv_a_layernorm.weight",
    "attn_kv_b.weight": "self_attn.kv_b_proj.weight",
    "attn_k_b.weight": f"self_attn.kv_b_proj.{K_B}",
    "attn_v_b.weight": f"self_attn.kv_b_proj.{V_B}",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "ffn_gate_inp.weight": "mlp.gate.weight",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_gate_shexp.weight": "mlp.shared_experts.gate_proj.weight",
    "ffn_up_shexp.weight": "mlp.shared_experts.up_proj.weight",
    "ffn_down_shexp.weight": "mlp.shared_experts.down_proj.weight",
}
_EXPERTS = {f"ffn_{k}_exps.weight": f"{k}_proj" for k in ("gate", "up", "down")}
_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")
_SAYS_NOTHING = ("rope_freqs.weight",)


def named(tensors: Mapping[str, GgufTensor], layers: int) -> dict[str, GgufTensor]:
    """Every tensor by its name in a checkpoint. Layers from `layers` on, which draft, are left out,
    and halves of a kv_b_proj that is there whole; names that the architecture does not have stay as
    they are."""
    found = dict(_named(tensors, layers))
    for whole in [n for n in found if n.endswith(".kv_b_proj.weight")]:
        _leave_out_halves(found, whole)
    return found


def _leave_out_halves(found: dict[str, GgufTensor], whole: str) -> None:
    """Take the halves of a whole kv_b_proj out. CheckpointError if they are of another shape."""
    module = whole.removesuffix(".weight")
    keys, below = (found.pop(f"{module}.{half}", None) for half in (K_B, V_B))
    if keys is None or below is None:
        return
    shape, parts = found[whole].shape, (keys.shape, below.shape)
    wide = below.shape[-1:] == shape[-1:] and keys.shape[1:-1] in ((), shape[-1:])
    if not wide or sum(map(math.prod, parts)) != math.prod(shape):
        raise CheckpointError(
            f"{found[whole].file}: {whole} has shape {list(shape)}, and its halves {K_B} "
            f"{list(keys.shape)} and {V_B} {list(below.shape)} do not add up to it; the file mixes "
            "two models: convert or download it again"
        )


def _named(tensors: Mapping[str, GgufTensor], layers: int) -> Iterator[tuple[str, GgufTensor]]:
    for name, tensor in tensors.items():
        block = _BLOCK.fullmatch(name)
        if name in _SAYS_NOTHING or (block is not None and int(block[1]) >= layers):
            continue
        if block is None:
            yield _WHOLE.get(name, name), tensor
            continue
        at, short = f"model.layers.{block[1]}", block[2]
        if short in _EXPERTS and len(tensor.shape) == 3:
            for e in range(tensor.shape[0]):
                yield f"{at}.mlp.experts.{e}.{_EXPERTS[short]}.weight", _matrix(tensor, e)
        else:
            yield f"{at}.{_LAYER[short]}" if short in _LAYER else name, tensor


def _matrix(tensor: GgufTensor, index: int) -> GgufTensor:
    each = tensor.nbytes // tensor.shape[0]
    return replace(tensor, shape=tensor.shape[1:], begin=tensor.begin + index * each)
