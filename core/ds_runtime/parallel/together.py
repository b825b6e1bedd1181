"""Several tensors of the same rows as one, so that they reach other ranks in one collective."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ds_runtime.parallel.sums.sizes import LINE

_WORD = 4  # bytes, in which they are copied


def joined(parts: Sequence[Tensor]) -> Tensor:
    """[rows, n] each, of any dtypes → int32 [rows, words], part after part. Rows begin at whole
    lines of memory, as kernels fetch them; what fills the last line of a row is undefined.
    """
    words = [_words(part) for part in parts]
    if missing := -sum(w.shape[1] for w in words) % (LINE // _WORD):
        words.append(words[0].new_empty(len(words[0]), missing))
    return torch.cat(words, 1)


def apart(every: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Rows that `joined` made, in any order → the parts, as wide and of the dtypes of `like`, which
    share the memory of `every`."""
    found, end = list[Tensor](), 0
    for part in like:
        begin, end = end, end + -(-part.shape[1] * part.itemsize // _WORD)
        found.append(every[:, begin:end].view(part.dtype)[:, : part.shape[1]])
    return found


def _words(x: Tensor) -> Tensor:
    """[rows, n] as int32 [rows, ⌈n · itemsize / 4⌉]."""
    missing = -x.shape[1] % max(1, _WORD // x.itemsize)
    return (F.pad(x, (0, missing)) if missing else x.contiguous()).view(torch.int32)
