"""RouterLogits and Route."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_runtime.api import Routing
from ds_runtime_triton.jit.router import route_kernel, router_rows_kernel, router_tiles_kernel
from ds_runtime_triton.launch import cdiv, pow2

_ROWS_LIMIT = 128  # tokens up to which rows are streamed instead of multiplied in tiles
_FEW = 32  # tokens up to which a program is quick rather than thrifty


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """RouterLogits: exact products, fp32 sums."""
    (tokens, n), experts = x.shape, weight.shape[0]
    logits = torch.empty(tokens, experts, dtype=torch.float32, device=x.device)
    arguments = (x, weight, logits, tokens, experts, n, x.stride(0), weight.stride(0))
    if 0 < tokens <= _ROWS_LIMIT:
        few = min(4 if tokens <= _FEW else 8, pow2(tokens))
        block = min(1024 if few <= 4 else 256, pow2(n, 16))
        router_rows_kernel[(cdiv(experts, 2), cdiv(tokens, few))](
            *arguments, few, 2, block, num_warps=4
        )
    elif tokens:
        router_tiles_kernel[(cdiv(tokens, 64), cdiv(experts, 64))](
            *arguments, x.dtype == torch.bfloat16, 64, 64, 64, num_warps=4, num_stages=3
        )
    return logits


def route(logits: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    """Route: one program per token."""
    tokens, experts = logits.shape
    width = routing.top_k + routing.shared
    weights = torch.empty(tokens, width, dtype=torch.float32, device=logits.device)
    ids = torch.empty(tokens, width, dtype=torch.int32, device=logits.device)
    if tokens == 0:
        return weights, ids
    paired = routing.method == "noaux_tc"
    limited = routing.method != "greedy" and routing.topk_group < routing.n_group
    groups = routing.n_group if limited else 1
    per_group = experts // groups
    biased = paired and bias is not None
    route_kernel[(tokens,)](
        logits.contiguous(), bias if biased else logits, weights, ids, experts, groups, per_group,
        routing.topk_group, routing.scale, routing.scoring == "softmax", limited, paired, biased,
        routing.renormalize, routing.top_k, routing.shared, pow2(width), pow2(groups),
        pow2(per_group),
        num_warps=1,
    )  # fmt: skip
    return weights, ids
