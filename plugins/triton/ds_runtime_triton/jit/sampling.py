"""Sampling and log-probabilities: no program sees two rows, so that none can depend on another.

Nothing is sorted. Logits are compared by keys, integers in the same order. The end of a top-k or
top-p set is a key found by narrowing an interval. Lower ids of the tokens at that key come first.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ds_runtime_triton.jit.entry import entry, follow

LOWEST = tl.constexpr(-(2**31))
HIGHEST = tl.constexpr(2**31 - 1)


@entry
def mask_kernel(
    logits,
    masks,
    which,
    out,
    vocab,
    row_stride,
    mask_stride,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per row and block of tokens."""
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    own = tl.load(which + row)
    words = masks + tl.maximum(own, 0).to(tl.int64) * mask_stride + at // 32
    word = tl.load(words, mask=at < vocab, other=0)
    x = tl.load(logits + row * row_stride + at, mask=at < vocab, other=0.0)
    x = tl.where(((word >> (at % 32)) & 1 != 0) | (own < 0), x, float("-inf"))
    tl.store(out + row * vocab + at, x, mask=at < vocab)


@triton.jit
def key_of(x):
    """int32 in the order of the fp32 x; NaN as +inf, −0 as 0."""
    x = tl.where(x == x, x, float("inf"))
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(key):
    """The fp32 number of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def mass_of(x, top, temperature):
    """exp((x − top) / temperature) as float64: 1 at the largest."""
    shifted = (x - top) / temperature
    return tl.exp(tl.where(shifted == shifted, shifted, 0.0)).to(tl.float64)


@triton.jit
def largest(row, vocab, key_below, id_after, BLOCK: tl.constexpr):
    """(key, id) of the first token after (key_below, id_after) by falling key and rising id."""
    lane = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), LOWEST, tl.int32)
    owner = tl.full((BLOCK,), HIGHEST, tl.int32)
    for start in range(0, vocab, BLOCK):
        at = start + lane
        key = key_of(tl.load(row + at, mask=at < vocab, other=float("-inf")))
        behind = (key < key_below) | ((key == key_below) & (at > id_after))
        better = (at < vocab) & behind & ((key > best) | (owner == HIGHEST))
        best = tl.where(better, key, best)
        owner = tl.where(better, at, owner)
    top = tl.max(tl.where(owner == HIGHEST, LOWEST, best), 0)
    return top, tl.min(tl.where(best == top, owner, HIGHEST), 0)


@triton.jit
def above(row, vocab, key, top, temperature, BLOCK: tl.constexpr):
    """(how many tokens, what mass) lie above a key."""
    lane = tl.arange(0, BLOCK)
    count = tl.zeros((BLOCK,), tl.int32)
    mass = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, vocab, BLOCK):
        at = start + lane
        x = tl.load(row + at, mask=at < vocab, other=float("-inf"))
        higher = (at < vocab) & (key_of(x) > key)
        count += higher.to(tl.int32)
        mass += tl.where(higher, mass_of(x, top, temperature), 0.0)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def boundary(
    row, vocab, low, high, goal, top, temperature, BY_MASS: tl.constexpr, BLOCK: tl.constexpr
):
    """The largest key in [low, high] such that the tokens at or above it number `goal` or more, or
    have that mass; `low` if there is none. Three keys are tried in one pass."""
    lane = tl.arange(0, BLOCK)
    low, high = low.to(tl.int64), high.to(tl.int64)
    while low < high:
        quarter = (high - low) // 4
        first = low + quarter + 1
        second = tl.minimum(first + quarter, high)
        third = tl.minimum(second + quarter + 1, high)
        if BY_MASS:
            a = tl.zeros((BLOCK,), tl.float64)
        else:
            a = tl.zeros((BLOCK,), tl.int32)
        b, c = a, a
        for start in range(0, vocab, BLOCK):
            at = start + lane
            x = tl.load(row + at, mask=at < vocab, other=float("-inf"))
            key = tl.where(at < vocab, key_of(x).to(tl.int64), LOWEST - 1)
            if BY_MASS:
                one = mass_of(x, top, temperature)
            else:
                one = tl.full((BLOCK,), 1, tl.int32)
            a += tl.where(key >= first, one, 0)
            b += tl.where(key >= second, one, 0)
            c += tl.where(key >= third, one, 0)
        if tl.sum(c, 0) >= goal:
            low = third
        elif tl.sum(b, 0) >= goal:
            low, high = second, third - 1
        elif tl.sum(a, 0) >= goal:
            low, high = first, second - 1
        else:
            high = first - 1
    return low.to(tl.int32)


@triton.jit
def pick(
    row,
    vocab,
    masses,
    ties,
    floor,
    quota,
    least,
    uniform,
    top,
    temperature,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """The token at share `uniform` of the kept mass, by rising id; masses, ties: [BLOCKS], of each
    block the kept mass and how many tokens lie at the key `floor`. See draw."""
    lane, number = tl.arange(0, BLOCK), tl.arange(0, BLOCKS)
    sums = tl.cumsum(masses, 0)
    total = tl.max(sums, 0)
    # Rounded up to the total, a draw would walk past the last token.
    target = tl.minimum(uniform * total, total * (1.0 - 1.1102230246251565e-16))
    block = tl.min(tl.where(sums > target, number, BLOCKS - 1), 0)
    carry = tl.sum(tl.where(number < block, masses, 0.0), 0)
    before = tl.sum(tl.where(number < block, ties, 0), 0)
    at = block * BLOCK + lane
    x = tl.load(row + at, mask=at < vocab, other=float("-inf"))
    key, mass = key_of(x), mass_of(x, top, temperature)
    tie = ((at < vocab) & (key == floor)).to(tl.int32)
    inside = (tie == 1) & (before + tl.cumsum(tie, 0) <= quota)
    kept = (((at < vocab) & (key > floor)) | inside) & (mass >= least) & (mass > 0.0)
    walked = carry + tl.cumsum(tl.where(kept, mass, 0.0), 0)
    token = tl.min(tl.where(kept & (walked > target), at, HIGHEST), 0)
    return tl.where(token == HIGHEST, tl.max(tl.where(kept, at, 0), 0), token)


@triton.jit
def draw(
    row,
    vocab,
    floor,
    quota,
    least,
    uniform,
    top,
    temperature,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """The token at share `uniform` of the kept mass, by rising id. Kept are the tokens above the
    key `floor` and the first `quota` of those at it, if their mass is at least `least`."""
    lane, number = tl.arange(0, BLOCK), tl.arange(0, BLOCKS)
    masses = tl.zeros((BLOCKS,), tl.float64)
    ties = tl.zeros((BLOCKS,), tl.int32)
    tie_mass = mass_of(value_of(floor), top, temperature)
    tie_mass = tl.where(tie_mass >= least, tie_mass, 0.0)
    seen = tl.zeros((), tl.int32)
    for i in range(0, tl.cdiv(vocab, BLOCK)):
        at = i * BLOCK + lane
        x = tl.load(row + at, mask=at < vocab, other=float("-inf"))
        key = key_of(x)
        mass = mass_of(x, top, temperature)
        kept = (at < vocab) & (key > floor) & (mass >= least)
        found = tl.sum(((at < vocab) & (key == floor)).to(tl.int32), 0)
        some = tl.maximum(tl.minimum(quota - seen, found), 0)
        here = tl.sum(tl.where(kept, mass, 0.0), 0) + some.to(tl.float64) * tie_mass
        masses = tl.where(number == i, here, masses)
        ties = tl.where(number == i, found, ties)
        seen += found
    return pick(
        row, vocab, masses, ties, floor, quota, least, uniform, top, temperature, BLOCK, BLOCKS
    )


@entry
def peaks_kernel(
    logits,
    temperatures,
    keys,
    masses,
    vocab,
    stride,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One block of a row: its largest key, and unless the row is greedy its mass besides a token of
    that key: [rows, blocks], float64."""
    follow(PDL)
    r, block = tl.program_id(0), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + r.to(tl.int64) * stride + at, mask=at < vocab, other=float("-inf"))
    key = tl.max(tl.where(at < vocab, key_of(x), LOWEST), 0)
    place = r * tl.num_programs(1) + block
    tl.store(keys + place, key)
    temperature = tl.load(temperatures + r)
    if temperature > 0.0:
        mass = mass_of(x, value_of(key), temperature)
        tl.store(masses + place, tl.sum(tl.where(at < vocab, mass, 0.0), 0))


@triton.jit
def narrowed(
    row, vocab, key, top, temperature, top_k, top_p, min_p, uniform,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """A token of those that top-k, top-p and min-p leave. key: the largest; top: its value."""
    floor, quota = tl.full((), LOWEST, tl.int32), tl.full((), HIGHEST, tl.int32)
    if (top_k > 0) & (top_k < vocab):
        floor = boundary(row, vocab, floor, key, top_k, top, temperature, False, BLOCK)
        count, _ = above(row, vocab, floor, top, temperature, BLOCK)
        quota = top_k - count
    if top_p < 1.0:
        _, mass = above(row, vocab, floor, top, temperature, BLOCK)
        if quota < HIGHEST:
            mass += quota.to(tl.float64) * mass_of(value_of(floor), top, temperature)
        goal = top_p.to(tl.float64) * mass
        end = boundary(row, vocab, floor, key, goal, top, temperature, True, BLOCK)
        _, mass = above(row, vocab, end, top, temperature, BLOCK)
        one = mass_of(value_of(end), top, temperature)
        need = tl.ceil((goal - mass) / tl.where(one > 0.0, one, 1.0))
        some = tl.maximum(tl.minimum(need, 2.0e9), 1.0).to(tl.int32)
        quota = tl.where(end == floor, tl.minimum(some, quota), some)
        floor = end
    return draw(
        row, vocab, floor, quota, min_p.to(tl.float64), uniform, top, temperature, BLOCK, BLOCKS
    )


@entry
def sample_kernel(
    logits,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    uniforms,
    keys,
    masses,
    tokens,
    vocab,
    stride,
    blocks,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row, by what peaks_kernel found of its blocks. More than one of them is read again only
    where top-k, top-p or min-p narrow the choice: then by this one program. BLOCKS ≥ blocks."""
    follow(PDL)
    r = tl.program_id(0)
    row = logits + r.to(tl.int64) * stride
    number = tl.arange(0, BLOCKS)
    held = number < blocks
    peaks = tl.load(keys + r * blocks + number, mask=held, other=LOWEST)
    key = tl.max(peaks, 0)
    temperature = tl.load(temperatures + r)
    if temperature > 0.0:
        top, uniform = value_of(key), tl.load(uniforms + r)
        top_k, top_p, min_p = tl.load(top_ks + r), tl.load(top_ps + r), tl.load(min_ps + r)
        if ((top_k > 0) & (top_k < vocab)) | (top_p < 1.0) | (min_p > 0.0):
            token = narrowed(
                row, vocab, key, top, temperature, top_k, top_p, min_p, uniform, BLOCK, BLOCKS
            )
        else:
            every = tl.load(masses + r * blocks + number, mask=held, other=0.0)
            every = tl.where(held, every * mass_of(value_of(peaks), top, temperature), 0.0)
            floor, none = tl.full((), LOWEST, tl.int32), tl.zeros((BLOCKS,), tl.int32)
            token = pick(
                row, vocab, every, none, floor, 0, 0.0, uniform, top, temperature, BLOCK, BLOCKS
            )
    else:
        at = tl.min(tl.where(peaks == key, number, BLOCKS), 0) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(row + at, mask=at < vocab, other=float("-inf"))
        token = tl.min(tl.where((at < vocab) & (key_of(x) == key), at, HIGHEST), 0)
    tl.store(tokens + r, token.to(tl.int64))


@entry
def logprobs_kernel(
    logits,
    ids,
    chosen,
    values,
    top_ids,
    vocab,
    stride,
    top_n,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row: log-softmax at its id, and at the top_n best."""
    follow(PDL)
    r = tl.program_id(0).to(tl.int64)
    row = logits + r * stride
    lane = tl.arange(0, BLOCK)
    top, _ = largest(row, vocab, HIGHEST, -1, BLOCK)
    high = value_of(top)
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, vocab, BLOCK):
        at = start + lane
        x = tl.load(row + at, mask=at < vocab, other=float("-inf"))
        total += tl.exp(x - high).to(tl.float64)
    sums = tl.sum(total, 0).to(tl.float32)
    shift = tl.log(sums)
    tl.store(chosen + r, tl.load(row + tl.load(ids + r)) - high - shift)
    key, id = tl.full((), HIGHEST, tl.int32), tl.full((), -1, tl.int32)
    for i in range(top_n):
        key, id = largest(row, vocab, key, id, BLOCK)
        tl.store(values + r * top_n + i, value_of(key) - high - shift)
        tl.store(top_ids + r * top_n + i, id.to(tl.int64))
