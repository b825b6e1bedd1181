"""MaskLogits, Sample and Logprobs.

Where a row is read again and again, one program does it, from the device's cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ds_runtime_triton.jit.sampling import (
    logprobs_kernel,
    mask_kernel,
    peaks_kernel,
    sample_kernel,
)
from ds_runtime_triton.launch import cdiv, pow2

_BLOCK = 4096


def _row_block(vocab: int) -> tuple[int, int]:
    """(tokens of a block, warps)."""
    block = min(_BLOCK, pow2(vocab, 16))
    return block, min(16, max(1, block // 256))


def mask_logits(logits: Tensor, masks: Tensor, which: Tensor) -> Tensor:
    """Serves the contract MaskLogits."""
    rows, vocab = logits.shape
    if not masks.shape[0]:
        return logits.clone(memory_format=torch.contiguous_format)
    out = torch.empty(rows, vocab, dtype=torch.float32, device=logits.device)
    if rows:
        block, warps = _row_block(vocab)
        mask_kernel[(rows, cdiv(vocab, block))](
            logits, masks, which, out, vocab, logits.stride(0), masks.stride(0), block,
            num_warps=warps,
        )  # fmt: skip
    return out


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniform: Tensor,
) -> Tensor:
    """The op `sample`: a token [rows] int64 for each row of logits."""
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        block, warps = _row_block(vocab)
        blocks = cdiv(vocab, block)
        keys = torch.empty(rows, blocks, dtype=torch.int32, device=logits.device)
        masses = torch.empty(rows, blocks, dtype=torch.float64, device=logits.device)
        peaks_kernel[(rows, blocks)](
            logits, temperature, keys, masses, vocab, logits.stride(0), block,
            num_warps=max(1, warps // 2),
        )  # fmt: skip
        sample_kernel[(rows,)](
            logits, temperature, top_k, top_p, min_p, uniform, keys, masses, tokens, vocab,
            logits.stride(0), blocks, block, pow2(blocks), num_warps=warps,
        )  # fmt: skip
    return tokens


def logprobs(logits: Tensor, ids: Tensor, top_n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logprobs: an alternative costs a pass over the row."""
    rows, vocab = logits.shape
    chosen = torch.empty(rows, dtype=torch.float32, device=logits.device)
    values = torch.empty(rows, top_n, dtype=torch.float32, device=logits.device)
    top_ids = torch.empty(rows, top_n, dtype=torch.int64, device=logits.device)
    if rows:
        block, warps = _row_block(vocab)
        logprobs_kernel[(rows,)](
            logits, ids, chosen, values, top_ids, vocab, logits.stride(0), top_n, block,
            num_warps=warps,
        )  # fmt: skip
    return chosen, values, top_ids
