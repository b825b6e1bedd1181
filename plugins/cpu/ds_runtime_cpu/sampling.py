"""Native masks, draws and log-probabilities, row by row, without sorting a vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_runtime_cpu.native import active
from ds_runtime_cpu.small import in_rows

_SETTINGS = [torch.float32, torch.int32, torch.float32, torch.float32, torch.float64]


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
    logits = _checked(logits)
    tokens = torch.empty(rows, dtype=torch.int64)
    settings = [t.contiguous() for t in (temperature, top_k, top_p, min_p, uniform)]
    kinds = [t.dtype for t in settings]
    assert kinds == _SETTINGS and all(t.shape == (rows,) for t in settings), settings
    active.sample(
        logits.data_ptr(),
        logits.stride()[0],
        *[t.data_ptr() for t in settings],
        tokens.data_ptr(),
        rows,
        vocab,
    )
    return tokens


def mask_logits(logits: Tensor, masks: Tensor, which: Tensor) -> Tensor:
    """Serves the contract MaskLogits."""
    rows, vocab = logits.shape
    logits = _checked(logits)
    out, words = torch.empty(rows, vocab), -(-vocab // 32)
    if not masks.shape[0]:
        return out.copy_(logits)
    assert masks.shape[1] >= words, (masks.shape, vocab)
    masks, which = masks[:, :words].contiguous(), which.contiguous()
    active.mask_logits(
        logits.data_ptr(),
        logits.stride()[0],
        masks.data_ptr(),
        which.data_ptr(),
        out.data_ptr(),
        rows,
        vocab,
    )
    return out


def logprobs(logits: Tensor, ids: Tensor, top_n: int) -> tuple[Tensor, Tensor, Tensor]:
    """The op `logprobs`: of given tokens, and of the most likely ones."""
    rows, vocab = logits.shape
    assert top_n <= vocab, (top_n, vocab)
    logits = _checked(logits)
    ids = ids.contiguous()
    chosen = torch.empty(rows)
    values = torch.empty(rows, top_n)
    top_ids = torch.empty(rows, top_n, dtype=torch.int64)
    active.logprobs(
        logits.data_ptr(),
        logits.stride()[0],
        ids.data_ptr(),
        top_n,
        chosen.data_ptr(),
        values.data_ptr(),
        top_ids.data_ptr(),
        rows,
        vocab,
    )
    return chosen, values, top_ids


def _checked(logits: Tensor) -> Tensor:
    assert logits.dtype == torch.float32 and logits.shape[1] > 0, (logits.dtype, logits.shape)
    return in_rows(logits)
