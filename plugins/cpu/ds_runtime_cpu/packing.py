"""The packed weight layout of the native kernels, and back.

Rows in groups of 4; inside a group the rows take turns in chunks of 64 bytes along k:
[rows / 4, k / chunk, 4, chunk], padded with zeros. A group is one sequential stream, which is
what memory reads fastest, and a chunk is one 512-bit register.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ds_runtime_cpu.native import calls

ROWS = 4
CHUNK_BYTES = 64


def packed_elements(rows: int, k: int, dtype: torch.dtype) -> int:
    """Elements that a packed [rows, k] matrix takes, padding included."""
    chunk = CHUNK_BYTES // dtype.itemsize
    return -(-rows // ROWS) * ROWS * (-(-k // chunk) * chunk)


def empty_packed(count: int, rows: int, k: int, dtype: torch.dtype) -> Tensor:
    """Room for `count` packed [rows, k] matrices, one after the other: [count, elements]."""
    out = torch.empty(count, packed_elements(rows, k, dtype), dtype=dtype)
    calls().large_pages(out.data_ptr(), out.nbytes)
    return out


def _groups(packed: Tensor, rows: int, k: int) -> Tensor:
    chunk = CHUNK_BYTES // packed.element_size()
    return packed.view(-(-rows // ROWS), -(-k // chunk), ROWS, chunk)


def pack_into(packed: Tensor, values: Tensor) -> None:
    """Fill one packed matrix [elements] from `values` [rows, k], of the same dtype."""
    rows, k = values.shape
    groups = _groups(packed, rows, k)  # [rows / 4, k / chunk, 4, chunk]
    pad_rows, pad_k = groups.shape[0] * ROWS - rows, groups.shape[1] * groups.shape[3] - k
    if pad_rows or pad_k:
        values = torch.nn.functional.pad(values, (0, pad_k, 0, pad_rows))
    grid = values.reshape(groups.shape[0], ROWS, groups.shape[1], groups.shape[3])
    groups.copy_(grid.permute(0, 2, 1, 3))


def unpack(packed: Tensor, rows: int, k: int) -> Tensor:
    """The [rows, k] values of one packed matrix, new."""
    groups = _groups(packed, rows, k)
    grid = groups.permute(0, 2, 1, 3).reshape(groups.shape[0] * ROWS, -1)
    return grid[:rows, :k].contiguous()
