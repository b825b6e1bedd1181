"""Router: exact fp32 scores, and the choice of experts."""

from __future__ import annotations

import triton.language as tl

from ds_runtime_triton.jit.entry import entry, follow


@entry
def router_rows_kernel(
    x,
    weight,
    logits,
    tokens,
    experts,
    n,
    stride_x,
    stride_w,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A few tokens by a few experts without the matrix unit: every program streams its rows."""
    follow(PDL)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    k = tl.arange(0, BLOCK)
    x_rows = x + tl.minimum(token, tokens - 1).to(tl.int64)[:, None] * stride_x + k[None, :]
    w_rows = weight + tl.minimum(expert, experts - 1)[:, None] * stride_w + k[None, :]
    acc = tl.zeros((TOKENS, EXPERTS, BLOCK), tl.float32)
    for start in range(0, n, BLOCK):
        inside = (start + k < n)[None, :]
        a = tl.load(x_rows + start, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(w_rows + start, mask=inside, other=0.0)
        acc += a[:, None, :] * b[None, :, :]
    place = logits + token.to(tl.int64)[:, None] * experts + expert[None, :]
    mask = (token < tokens)[:, None] & (expert < experts)[None, :]
    tl.store(place, tl.sum(acc, 2), mask=mask)


@entry
def router_tiles_kernel(
    x,
    weight,
    out,
    tokens,
    experts,
    n,
    span,
    stride_x,
    stride_w,
    lost,
    LOST: tl.constexpr,
    THIRDS: tl.constexpr,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """`span` columns of TOKENS by EXPERTS: out [pieces, tokens, experts]. THIRDS: x is bfloat16, so
    fp32 weights are three bfloat16 that sum to them: the matrix unit's products are exact. LOST, if
    not 0, ≥ experts: nothing is done unless one of lost [experts] is 1."""
    follow(PDL)
    if LOST > 0:
        each = tl.arange(0, LOST)
        if tl.max(tl.load(lost + each, mask=each < experts, other=0), 0) == 0:
            return
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.program_id(1) * EXPERTS + tl.arange(0, EXPERTS)
    piece = tl.program_id(2)
    k = tl.arange(0, BLOCK)
    x_rows = x + tl.minimum(token, tokens - 1).to(tl.int64)[:, None] * stride_x + k[None, :]
    w_rows = weight + tl.minimum(expert, experts - 1)[:, None] * stride_w + k[None, :]
    acc = tl.zeros((TOKENS, EXPERTS), tl.float32)
    end = tl.minimum(piece * span + span, n)
    for start in range(piece * span, end, BLOCK):
        inside = (start + k < end)[None, :]
        a = tl.load(x_rows + start, mask=inside, other=0.0)
        b = tl.trans(tl.load(w_rows + start, mask=inside, other=0.0))
        if THIRDS:
            high = b.to(tl.bfloat16)
            rest = b - high.to(tl.float32)
            middle = rest.to(tl.bfloat16)
            low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
            acc += tl.dot(a, low) + tl.dot(a, middle) + tl.dot(a, high)
        else:
            acc += tl.dot(a.to(tl.float32), b, input_precision="ieee")
    place = (piece * tokens + token).to(tl.int64)[:, None] * experts + expert[None, :]
    mask = (token < tokens)[:, None] & (expert < experts)[None, :]
    tl.store(out + place, acc, mask=mask)


@entry
def router_narrow_kernel(weight, narrow, lost, n, stride_w, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """An expert's fp32 weights in fewer bits: narrow [experts, n]. lost [experts]: 1 where these do
    not hold them."""
    follow(PDL)
    expert = tl.program_id(0).to(tl.int64)
    differs = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(weight + expert * stride_w + at, mask=at < n, other=0.0)
        short = value.to(narrow.dtype.element_ty)
        tl.store(narrow + expert * n + at, short, mask=at < n)
        differs |= (short.to(tl.float32) != value).to(tl.int32)
    tl.store(lost + expert, tl.max(differs, 0))


@entry
def router_whole_kernel(
    x,
    narrow,
    lost,
    out,
    tokens,
    experts,
    n,
    span,
    stride_x,
    LOST: tl.constexpr,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    SUM: tl.constexpr,
    PDL: tl.constexpr,
):
    """router_tiles_kernel by what router_narrow_kernel made of the weights, in x's dtype. Where
    they were lost nothing is done. The matrix unit sums SUM columns: its sums round every step, and
    those of 7,168 columns are 1e-5 off."""
    follow(PDL)
    each = tl.arange(0, LOST)
    if tl.max(tl.load(lost + each, mask=each < experts, other=0), 0) > 0:
        return
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.program_id(1) * EXPERTS + tl.arange(0, EXPERTS)
    piece = tl.program_id(2)
    k = tl.arange(0, BLOCK)
    x_rows = x + tl.minimum(token, tokens - 1).to(tl.int64)[:, None] * stride_x + k[None, :]
    w_rows = narrow + tl.minimum(expert, experts - 1)[:, None] * n + k[None, :]
    acc = tl.zeros((TOKENS, EXPERTS), tl.float32)
    end = tl.minimum(piece * span + span, n)
    for first in range(piece * span, end, SUM):
        part = tl.zeros((TOKENS, EXPERTS), tl.float32)
        for start in range(first, tl.minimum(first + SUM, end), BLOCK):
            inside = (start + k < end)[None, :]
            a = tl.load(x_rows + start, mask=inside, other=0.0)
            b = tl.load(w_rows + start, mask=inside, other=0.0)
            part = tl.dot(a, tl.trans(b), part)
        acc += part
    place = (piece * tokens + token).to(tl.int64)[:, None] * experts + expert[None, :]
    mask = (token < tokens)[:, None] & (expert < experts)[None, :]
    tl.store(out + place, acc, mask=mask)


@entry
def router_sum_kernel(
    partial,
    logits,
    size,
    count,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """The sum of `count` pieces of `size` values each. PIECES ≥ count."""
    follow(PDL)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    piece = tl.arange(0, PIECES)[:, None]
    mask = (piece < count) & (at < size)[None, :]
    found = tl.load(partial + piece.to(tl.int64) * size + at[None, :], mask=mask, other=0.0)
    tl.store(logits + at, tl.sum(found, 0), mask=at < size)


@entry
def route_kernel(
    logits,
    bias,
    weights,
    ids,
    num_experts,
    n_group,
    per_group,
    topk_group,
    scale,
    SOFTMAX: tl.constexpr,
    LIMITED: tl.constexpr,
    PAIRS: tl.constexpr,
    BIAS: tl.constexpr,
    RENORMALISE: tl.constexpr,
    TOP_K: tl.constexpr,
    SHARED: tl.constexpr,
    SLOTS: tl.constexpr,
    GROUPS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token. Experts lie as [GROUPS, PER_GROUP]; LIMITED: only the best groups stay open;
    PAIRS: a group counts by its two best, and closed experts are −inf, not 0. After the chosen
    come SHARED experts that every token takes. SLOTS ≥ TOP_K + SHARED."""
    follow(PDL)
    token = tl.program_id(0).to(tl.int64)
    group, member = tl.arange(0, GROUPS)[:, None], tl.arange(0, PER_GROUP)[None, :]
    expert = group * per_group + member
    real = (group < n_group) & (member < per_group)
    none = float("-inf")
    raw = tl.load(logits + token * num_experts + expert, mask=real, other=none)
    raw = tl.where(raw == raw, raw, none)  # a NaN may not lead out of the experts
    if SOFTMAX:
        top = tl.max(tl.max(raw, 1), 0)
        mass = tl.exp(raw - tl.where(top == none, 0.0, top))
        scores = mass / tl.sum(tl.sum(mass, 1), 0)
    else:
        scores = 1.0 / (1.0 + tl.exp(-raw))
    choice = scores
    if BIAS:
        choice += tl.load(bias + expert, mask=real, other=0.0)
    choice = tl.where(real, choice, none)
    if LIMITED:
        best = tl.max(choice, 1)  # [GROUPS]
        value = best
        if PAIRS and PER_GROUP > 1:
            largest = tl.argmax(choice, 1)
            value += tl.max(tl.where(member == largest[:, None], none, choice), 1)
        groups = tl.arange(0, GROUPS)
        value = tl.where(groups < n_group, value, none)
        open_group = tl.zeros((GROUPS,), tl.int32)
        for _ in range(topk_group):
            winner = tl.argmax(value, 0)
            open_group = tl.where(groups == winner, 1, open_group)
            value = tl.where(groups == winner, none, value)
        closed = none if PAIRS else 0.0
        choice = tl.where(real & (open_group[:, None] == 0), closed, choice)
    flat = tl.reshape(choice, (GROUPS * PER_GROUP,))
    flat_scores = tl.reshape(scores, (GROUPS * PER_GROUP,))
    lane = tl.arange(0, GROUPS * PER_GROUP)
    # Closed experts, at −inf, come before lanes that are no expert, and these before the taken.
    floor = tl.where(tl.reshape(real, (GROUPS * PER_GROUP,)), -3.0e38, -3.3e38)
    slots = tl.arange(0, SLOTS)
    chosen = tl.zeros((SLOTS,), tl.int32)
    weight = tl.zeros((SLOTS,), tl.float32)
    taken = tl.zeros((GROUPS * PER_GROUP,), tl.int32)
    for i in tl.static_range(TOP_K):
        rank = tl.where(taken == 1, none, tl.maximum(flat, floor))
        at = tl.argmax(rank, 0)
        won = tl.sum(tl.where(lane == at, flat_scores, 0.0), 0)
        chosen = tl.where(slots == i, at, chosen)
        weight = tl.where(slots == i, won, weight)
        taken = tl.where(lane == at, 1, taken)
    if RENORMALISE:
        weight = weight / (tl.sum(weight, 0) + 1e-20)
    number = tl.minimum((chosen // PER_GROUP) * per_group + chosen % PER_GROUP, num_experts - 1)
    number = tl.where(slots < TOP_K, number, num_experts + slots - TOP_K)
    weight = tl.where(slots < TOP_K, weight * scale, 1.0)
    place, mask = token * (TOP_K + SHARED) + slots, slots < TOP_K + SHARED
    tl.store(ids + place, number, mask=mask)
    tl.store(weights + place, weight, mask=mask)
