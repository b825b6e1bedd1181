"""The k best scores of a row by radix select: exact, and of equal ones those that come first.

A score's bits, made to rise with it, are four digits of eight bits. Launch after launch counts one
digit of the scores that agree with the k-th best in those before; the digit of the k-th best
follows from the counts. Digits are counted upside down: bin 0 is the largest. Chunks of a row
count on their own, so that what lies before a chunk is known without an atomic.

A row of up to ALONE scores is one program's, which keeps them on chip; of those beyond, the
launches of chunks take care.

counts: [digits, rows, chunks, 256] int32. settled: [digits, rows, 2] int32, what is known before
a digit is counted: the digits so far, and how many are to be taken of those that agree with them.
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
def histograms(counts, row, rows, chunks, used, DIGIT: tl.constexpr, CHUNKS: tl.constexpr):
    """The counts of all chunks of a row for one digit: [CHUNKS, BINS]."""
    chunk, digit = tl.arange(0, CHUNKS)[:, None], tl.arange(0, BINS)[None, :]
    at = counts + ((DIGIT * rows + row).to(tl.int64) * chunks + chunk) * BINS + digit
    return tl.load(at, mask=(chunk < used) & (digit >= 0), other=0)


@triton.jit
def settle(total, wanted):
    """(digit of the wanted-th best, how many of that digit are to be taken)."""
    digit = tl.sum((tl.cumsum(total, 0) < wanted).to(tl.int32), 0)
    return digit, wanted - tl.sum(tl.where(tl.arange(0, BINS) < digit, total, 0), 0)


@triton.jit
def advance(
    counts,
    settled,
    row,
    rows,
    chunks,
    used,
    k,
    DIGIT: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """(digits before DIGIT, as many bits as they have; how many to take of those that agree)."""
    if DIGIT == 0:
        return tl.full((), 0, tl.int32), k
    else:
        at = settled + ((DIGIT - 1) * rows + row) * 2
        known, wanted = tl.load(at), tl.load(at + 1)
        held = histograms(counts, row, rows, chunks, used, DIGIT - 1, CHUNKS)
        digit, wanted = settle(tl.sum(held, 0), wanted)
        return (known << 8) | (255 - digit), wanted


@triton.jit
def tally(value, real, known, DIGIT: tl.constexpr):
    """How often each value of one digit occurs among the real values that agree with the digits
    before it: [BINS]."""
    if DIGIT > 0:
        real = real & ((value >> (32 - 8 * DIGIT)) == known.to(tl.uint32, bitcast=True))
    digit = 255 - ((value >> (24 - 8 * DIGIT)) & 255).to(tl.int32)
    return tl.histogram(digit, BINS, mask=real)


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
    order = above + tl.cumsum(more.to(tl.int32), 0) - 1
    after = equal + tl.cumsum(same.to(tl.int32), 0) - 1
    place = tl.where(more, order, k - wanted + after)
    page = tl.load(pages + token // PAGE, mask=real, other=0)
    tl.store(to + place, page * PAGE + token % PAGE, mask=more | (same & (after < wanted)))
    return tl.sum(more.to(tl.int32), 0), tl.sum(same.to(tl.int32), 0)


@triton.jit
def blank(to, length, k, WIDE: tl.constexpr):
    """−1 behind the slots of a row that sees fewer than k. WIDE ≥ k."""
    place = tl.arange(0, WIDE)
    tl.store(to + place, -1, mask=(place >= length) & (place < k))


@entry
def row_kernel(
    scores,
    lens,
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
    """All of a row that sees up to ALONE tokens, a power of two."""
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


@entry
def count_kernel(
    scores,
    lens,
    counts,
    settled,
    rows,
    chunks,
    k,
    score_row,
    DIGIT: tl.constexpr,
    ALONE: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Counts one digit in one chunk of a row, BLOCK scores at a time; the row's first program
    writes what it settled."""
    follow(PDL)
    chunk, row = tl.program_id(0), tl.program_id(1)
    length = tl.load(lens + row)
    if (length > k) & (length > ALONE) & (chunk * CHUNK < length):
        used = tl.cdiv(length, CHUNK)
        known, wanted = advance(counts, settled, row, rows, chunks, used, k, DIGIT, CHUNKS)
        if chunk == 0:
            at = settled + (DIGIT * rows + row) * 2
            tl.store(at, known)
            tl.store(at + 1, wanted)
        total = tl.zeros((BINS,), tl.int32)
        end = tl.minimum(chunk * CHUNK + CHUNK, length)
        for start in range(chunk * CHUNK, end, BLOCK):
            token = start + tl.arange(0, BLOCK)
            at = scores + row.to(tl.int64) * score_row + token
            value = rising(tl.load(at, mask=token < end, other=0.0))
            total += tally(value, token < end, known, DIGIT)
        at = counts + ((DIGIT * rows + row).to(tl.int64) * chunks + chunk) * BINS
        tl.store(at + tl.arange(0, BINS), total)


@entry
def gather_kernel(
    scores,
    lens,
    counts,
    settled,
    rows,
    chunks,
    k,
    score_row,
    owners,
    table,
    out,
    table_row,
    WIDE: tl.constexpr,
    PAGE: tl.constexpr,
    ALONE: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Writes the slots that one chunk of a row has among the best: those above the k-th best score
    in order, and behind those of all chunks the first that equal it."""
    follow(PDL)
    chunk, row = tl.program_id(0), tl.program_id(1)
    length = tl.load(lens + row)
    if (length > ALONE) & (chunk * CHUNK < length):
        to = out + row.to(tl.int64) * k
        if chunk == 0:
            blank(to, length, k, WIDE)
        pages = table + tl.load(owners + row).to(tl.int64) * table_row
        used = tl.cdiv(length, CHUNK)
        above = chunk * CHUNK  # tokens before this chunk that are chosen, or equal to the k-th
        equal = tl.full((), 0, tl.int32)
        border, wanted = tl.full((), -1, tl.int64), tl.full((), 0, tl.int32)
        if length > k:
            best, wanted = advance(counts, settled, row, rows, chunks, used, k, 4, CHUNKS)
            border = best.to(tl.uint32, bitcast=True).to(tl.int64)
            above = tl.full((), 0, tl.int32)
            for i in tl.static_range(4):
                held = histograms(counts, row, rows, chunks, chunk, i, CHUNKS)
                digit = 255 - ((best >> (24 - 8 * i)) & 255)
                bins = tl.arange(0, BINS)[None, :]
                above += tl.sum(tl.sum(tl.where(bins < digit, held, 0), 0), 0)
                if i == 3:
                    equal = tl.sum(tl.sum(tl.where(bins == digit, held, 0), 0), 0)
        end = tl.minimum(chunk * CHUNK + CHUNK, length)
        for start in range(chunk * CHUNK, end, BLOCK):
            token = start + tl.arange(0, BLOCK)
            real = token < end
            at = scores + row.to(tl.int64) * score_row + token
            value = rising(tl.load(at, mask=real, other=0.0))
            more, same = place_slots(
                value, token, real, border, k, wanted, above, equal, pages, to, PAGE
            )
            above += more
            equal += same
