"""The k best scores of a row by radix select: exact, and of equal ones those that come first.

A score's bits, made to rise with it, are four digits of eight bits, counted upside down: bin 0 is
the largest. Two launches over chunks of a row count the first two, the second among the scores that
agree with the k-th best in the first. A third writes the slots of all scores above those 16 bits
and lists the tokens that agree with them. There are few, and one program a row chooses among them
by the other two digits; where they are too many to be listed it goes over the row instead.

A row of up to ALONE scores is one program's, which keeps them on chip.

counts: [2, rows, chunks, 256] int32, of each chunk, summed up from bin 0 on, so that what lies
before a chunk is a load a chunk. totals: [2, rows, 256] int32, of all chunks of a row: sums of
integers, the same in any order. listed: [rows, LISTED] int32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ds_runtime_triton.jit.entry import entry, follow

BINS: tl.constexpr = tl.constexpr(256)


@triton.jit
def rising(scores):
    """uint32 that are larger the larger a score is; −0 is 0."""
    scores = tl.where(scores == 0.0, 0.0, scores)
    bits = scores.to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) | -2147483648)
    return bits.to(tl.uint32, bitcast=True)


@triton.jit
def settle(total, wanted):
    """(digit of the wanted-th best, how many of that digit are to be taken)."""
    digit = tl.sum((tl.cumsum(total, 0) < wanted).to(tl.int32), 0)
    return digit, wanted - tl.sum(tl.where(tl.arange(0, BINS) < digit, total, 0), 0)


@triton.jit
def border_digits(totals, row, rows, k, DIGITS: tl.constexpr):
    """(the first digits of the k-th best score; how many to take of those that agree with them)."""
    known, wanted = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32) + k
    for i in tl.static_range(DIGITS):
        held = tl.load(totals + (i * rows + row) * BINS + tl.arange(0, BINS))
        digit, wanted = settle(held, wanted)
        known = (known << 8) | (255 - digit)
    return known, wanted


@triton.jit
def tally(value, real, known, DIGIT: tl.constexpr):
    """How often each value of one digit occurs among the real values that agree with the digits
    before it: [BINS]."""
    if DIGIT > 0:
        real = real & ((value >> (32 - 8 * DIGIT)) == known.to(tl.uint32, bitcast=True))
    digit = 255 - ((value >> (24 - 8 * DIGIT)) & 255).to(tl.int32)
    return tl.histogram(digit, BINS, mask=real)


@triton.jit
def ranks(more, same, above, equal):
    """(how many lie before each that is `more`; before each that is `same`; how many of both there
    are) where `above` and `equal` lie before all. No value is both, and there are fewer than 2¹⁵.
    """
    both = more.to(tl.int32) | (same.to(tl.int32) << 16)
    run, found = tl.cumsum(both, 0), tl.sum(both, 0)
    return above + (run & 0xFFFF) - 1, equal + (run >> 16) - 1, found & 0xFFFF, found >> 16


@triton.jit
def place_slots(
    value,
    token,
    real,
    border,
    k,
    wanted,
    above,
    equal,
    pages,
    to,
    PAGE: tl.constexpr,
):
    """Write the slots of the values above `border`, and of those that equal it the first; how many
    of both there are.

    above, equal: how many of both lie before. wanted: how many that equal it are taken in all.
    """
    value = value.to(tl.int64)
    more = real & (value > border)  # all, where a row sees no more than k
    same = real & (value == border)
    order, after, found_more, found_same = ranks(more, same, above, equal)
    place = tl.where(more, order, k - wanted + after)
    taken = more | (same & (after < wanted))
    page = tl.load(pages + token // PAGE, mask=taken, other=0)
    tl.store(to + place, page * PAGE + token % PAGE, mask=taken)
    return found_more, found_same


@triton.jit
def blank(to, length, k, WIDE: tl.constexpr):
    """−1 after the slots of a row that sees fewer than k. WIDE ≥ k."""
    place = tl.arange(0, WIDE)
    tl.store(to + place, -1, mask=(place >= length) & (place < k))


@entry
def row_kernel(
    scores,
    lens,
    totals,
    rows,
    k,
    score_row,
    owners,
    table,
    out,
    table_row,
    WIDE: tl.constexpr,
    PAGE: tl.constexpr,
    ALONE: tl.constexpr,
    PDL: tl.constexpr,
):
    """All of a row that sees up to ALONE tokens, a power of two; totals of others begin at 0."""
    follow(PDL)
    row = tl.program_id(0)
    length = tl.load(lens + row)
    if length <= ALONE:
        to = out + row.to(tl.int64) * k
        blank(to, length, k, WIDE)
        pages = table + tl.load(owners + row).to(tl.int64) * table_row
        token = tl.arange(0, ALONE)
        real = token < length
        at = scores + row.to(tl.int64) * score_row + token
        value = rising(tl.load(at, mask=real, other=0.0))
        border, none = tl.full((), -1, tl.int64), tl.full((), 0, tl.int32)
        wanted = none
        if length > k:
            best, wanted = none, none + k
            for i in tl.static_range(4):
                digit, wanted = settle(tally(value, real, best, i), wanted)
                best = (best << 8) | (255 - digit)
            border = best.to(tl.uint32, bitcast=True).to(tl.int64)
        place_slots(value, token, real, border, k, wanted, none, none, pages, to, PAGE)
    else:
        nothing = tl.zeros((BINS,), tl.int32)
        for i in tl.static_range(2):
            tl.store(totals + (i * rows + row) * BINS + tl.arange(0, BINS), nothing)


@entry
def count_kernel(
    scores,
    lens,
    counts,
    totals,
    rows,
    chunks,
    span,
    k,
    score_row,
    DIGIT: tl.constexpr,
    ALONE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Counts one digit in one chunk, `span` tokens of a row, BLOCK scores at a time."""
    follow(PDL)
    chunk, row = tl.program_id(0), tl.program_id(1)
    length = tl.load(lens + row)
    if (length > k) & (length > ALONE) & (chunk * span < length):
        known, _ = border_digits(totals, row, rows, k, DIGIT)
        total = tl.zeros((BINS,), tl.int32)
        end = tl.minimum(chunk * span + span, length)
        for start in range(chunk * span, end, BLOCK):
            token = start + tl.arange(0, BLOCK)
            at = scores + row.to(tl.int64) * score_row + token
            value = rising(tl.load(at, mask=token < end, other=0.0))
            total += tally(value, token < end, known, DIGIT)
        digit = tl.arange(0, BINS)
        tl.atomic_add(totals + (DIGIT * rows + row) * BINS + digit, total, mask=total > 0)
        at = counts + ((DIGIT * rows + row).to(tl.int64) * chunks + chunk) * BINS
        tl.store(at + digit, tl.cumsum(total, 0))


@entry
def gather_kernel(
    scores,
    lens,
    counts,
    totals,
    rows,
    chunks,
    span,
    k,
    score_row,
    listed,
    owners,
    table,
    out,
    table_row,
    WIDE: tl.constexpr,
    PAGE: tl.constexpr,
    ALONE: tl.constexpr,
    LISTED: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Writes the slots that one chunk of a row has above the first two digits of the k-th best
    score, in order, and lists the tokens that agree with them."""
    follow(PDL)
    chunk, row = tl.program_id(0), tl.program_id(1)
    length = tl.load(lens + row)
    if (length > ALONE) & (chunk * span < length):
        to = out + row.to(tl.int64) * k
        if chunk == 0:
            blank(to, length, k, WIDE)
        pages = table + tl.load(owners + row).to(tl.int64) * table_row
        above = chunk * span  # tokens before this chunk that are chosen, or agree
        equal, border = tl.full((), 0, tl.int32), tl.full((), -1, tl.int32)
        if length > k:
            border, _ = border_digits(totals, row, rows, k, 2)
            first, second = 255 - (border >> 8), 255 - (border & 255)
            before = tl.arange(0, CHUNKS)
            at = counts + (row.to(tl.int64) * chunks + before) * BINS + first - 1
            beyond = tl.load(at, mask=before < tl.where(first > 0, chunk, 0), other=0)
            at = counts + ((rows + row).to(tl.int64) * chunks + before) * BINS + second
            within = tl.load(at - 1, mask=before < tl.where(second > 0, chunk, 0), other=0)
            above = tl.sum(beyond + within, 0)
            equal = tl.sum(tl.load(at, mask=before < chunk, other=0) - within, 0)
        end = tl.minimum(chunk * span + span, length)
        for start in range(chunk * span, end, BLOCK):
            token = start + tl.arange(0, BLOCK)
            real = token < end
            at = scores + row.to(tl.int64) * score_row + token
            bits = (rising(tl.load(at, mask=real, other=0.0)) >> 16).to(tl.int32)
            more, same = real & (bits > border), real & (bits == border)
            place, after, found_more, found_same = ranks(more, same, above, equal)
            page = tl.load(pages + token // PAGE, mask=more, other=0)
            tl.store(to + place, page * PAGE + token % PAGE, mask=more)
            at = listed + row.to(tl.int64) * LISTED + after
            tl.store(at, token, mask=same & (after < LISTED))
            above += found_more
            equal += found_same


@triton.jit
def agreeing(scores, listed, start, limit, known, LISTED: tl.constexpr):
    """(values, tokens, which of them agree with the digits known) of LISTED tokens from the
    start-th on: of those listed if they are no more, else of the row's."""
    token = start + tl.arange(0, LISTED)
    real = token < limit
    if limit <= LISTED:
        token = tl.load(listed + token, mask=real, other=0)
    value = rising(tl.load(scores + token, mask=real, other=0.0))
    return value, token, real & ((value >> 16).to(tl.int32) == known)


@entry
def finish_kernel(
    scores,
    lens,
    totals,
    rows,
    k,
    score_row,
    listed,
    owners,
    table,
    out,
    table_row,
    PAGE: tl.constexpr,
    ALONE: tl.constexpr,
    LISTED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Chooses among the tokens of a row that agree with the k-th best score in two digits."""
    follow(PDL)
    row = tl.program_id(0)
    length = tl.load(lens + row)
    if (length > k) & (length > ALONE):
        known, wanted = border_digits(totals, row, rows, k, 2)
        limit = tl.load(totals + (rows + row) * BINS + 255 - (known & 255))
        limit = tl.where(limit <= LISTED, limit, length)
        scores += row.to(tl.int64) * score_row
        listed += row.to(tl.int64) * LISTED
        best, rest = known, wanted
        for i in tl.static_range(2, 4):
            total = tl.zeros((BINS,), tl.int32)
            for start in range(0, limit, LISTED):
                value, _, real = agreeing(scores, listed, start, limit, known, LISTED)
                total += tally(value, real, best, i)
            digit, rest = settle(total, rest)
            best = (best << 8) | (255 - digit)
        border = best.to(tl.uint32, bitcast=True).to(tl.int64)
        pages = table + tl.load(owners + row).to(tl.int64) * table_row
        to = out + row.to(tl.int64) * k
        above, equal = k - wanted, tl.full((), 0, tl.int32)
        for start in range(0, limit, LISTED):
            value, token, real = agreeing(scores, listed, start, limit, known, LISTED)
            more, same = place_slots(
                value, token, real, border, k, rest, above, equal, pages, to, PAGE
            )
            above += more
            equal += same
