"""Native router scores and expert choice."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_runtime.api import Routing
from ds_runtime_cpu.kernels import MAX_EXPERTS
from ds_runtime_cpu.native import active
from ds_runtime_cpu.small import CODE, in_rows

_METHODS = {"greedy": 0, "group_limited_greedy": 1, "noaux_tc": 2}


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """RouterLogits for float32 and bfloat16 activations."""
    tokens, hidden = x.shape
    experts = weight.shape[0]
    assert weight.dtype == torch.float32 and weight.shape[1] == hidden, (weight, hidden)
    x, weight = in_rows(x), weight.contiguous()
    out = torch.empty(tokens, experts)
    active.router_logits(
        CODE[x.dtype],
        x.data_ptr(),
        x.stride()[0],
        weight.data_ptr(),
        out.data_ptr(),
        tokens,
        experts,
        hidden,
    )
    return out


def route(logits: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    """Route over at most MAX_EXPERTS experts."""
    tokens, experts = logits.shape
    top_k = routing.top_k
    width = top_k + routing.shared
    assert top_k <= experts <= MAX_EXPERTS and experts % routing.n_group == 0, (experts, routing)
    assert logits.dtype == torch.float32, logits.dtype
    logits = in_rows(logits)
    if bias is not None:
        assert bias.dtype == torch.float32 and bias.shape == (experts,), bias
        bias = bias.contiguous()
    weights = torch.empty(tokens, width)
    ids = torch.empty(tokens, width, dtype=torch.int32)
    active.route(
        logits.data_ptr(),
        logits.stride()[0],
        0 if bias is None else bias.data_ptr(),
        weights.data_ptr(),
        ids.data_ptr(),
        tokens,
        experts,
        top_k,
        routing.shared,
        routing.n_group,
        routing.topk_group,
        routing.scoring == "sigmoid",
        _METHODS[routing.method],
        routing.renormalize,
        routing.scale,
    )
    return weights, ids


def route_softplus(
    logits: Tensor, bias: Tensor | None, chosen: Tensor | None, routing: Routing
) -> tuple[Tensor, Tensor]:
    """RouteSoftplus over at most MAX_EXPERTS experts."""
    tokens, experts = logits.shape
    top_k = routing.top_k
    assert top_k <= experts <= MAX_EXPERTS and logits.dtype == torch.float32, (logits, routing)
    logits = in_rows(logits)
    if bias is not None:
        assert bias.dtype == torch.float32 and bias.shape == (experts,), bias
        bias = bias.contiguous()
    if chosen is not None:
        assert chosen.dtype == torch.int64 and chosen.shape == (tokens, top_k), chosen
        chosen = chosen.contiguous()
    weights = torch.empty(tokens, top_k)
    ids = torch.empty(tokens, top_k, dtype=torch.int32)
    active.route_softplus(
        logits.data_ptr(),
        logits.stride()[0],
        0 if bias is None else bias.data_ptr(),
        0 if chosen is None else chosen.data_ptr(),
        weights.data_ptr(),
        ids.data_ptr(),
        tokens,
        experts,
        top_k,
        routing.scale,
    )
    return weights, ids
