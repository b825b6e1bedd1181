"""Any part of a quantised matrix is that part of the whole dequantised matrix."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from ds_runtime.checkpoint.shards import Checkpoint
from ds_runtime.checkpoint.tensors import SINGLE
from ds_runtime.errors import CheckpointError
from ds_runtime.weights.loaders import encodings
from ds_runtime.weights.quant import PartRequest, Place, read_part
from examples import examples

SCALES = ("F32", "BF16", "U8", "F8_E8M0")


def make(rows: int, cols: int, block: tuple[int, int], scale: str = "F32", seed: int = 0):
    """(weight e4m3, scale, the values they mean as float64)."""
    draw = torch.Generator().manual_seed(seed)
    weight = (torch.randn(rows, cols, generator=draw) * 50).clamp(-448, 448)
    weight = weight.to(torch.float8_e4m3fn)
    grid = (-(-rows // block[0]), -(-cols // block[1]))
    exponent = torch.randint(118, 130, grid, generator=draw, dtype=torch.uint8)
    numbers = torch.rand(grid, generator=draw) + 0.1
    stored = {
        "F32": numbers,
        "BF16": numbers.bfloat16(),
        "U8": exponent,
        "F8_E8M0": exponent.view(torch.float8_e8m0fnu),
    }[scale]
    meant = stored.double() if scale in ("F32", "BF16") else 2.0 ** (exponent.double() - 127)
    i, j = np.arange(rows)[:, None] // block[0], np.arange(cols)[None] // block[1]
    return weight, stored, weight.double() * meant[torch.from_numpy(i), torch.from_numpy(j)]


def request(folder: Path, shape, block, rows, cols, index=None, first_row=0) -> PartRequest:
    names = {"weight": "m.weight", "scale": "m.weight_scale_inv"}
    place = Place(names, shape, index, first_row)
    encoding = replace(encodings.rows("fp8_block", "weight_scale_inv"), block=block)
    return PartRequest(Checkpoint(folder), {}, "m", encoding, place, rows, cols)


def save(folder: Path, weight, scale) -> None:
    save_file({"m.weight": weight, "m.weight_scale_inv": scale}, folder / SINGLE)


def check(part, expected) -> None:
    assert part.shape == tuple(expected.shape)
    assert all(0 <= o < b for o, b in zip(part.offset, part.block, strict=True))
    grid = part.tensors["scale"].shape
    covered = [
        -(-(n + o) // b) for n, o, b in zip(part.shape, part.offset, part.block, strict=True)
    ]
    assert list(grid) == covered
    assert torch.equal(part.dequantise(torch.float64), expected)


@settings(max_examples=examples(150))
@given(data=st.data())
def test_any_cut_of_any_shape(data):
    block = (data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6)))
    shape = (data.draw(st.integers(1, 25)), data.draw(st.integers(1, 25)))

    def part(n: int) -> slice:
        begin = data.draw(st.integers(0, n - 1))
        return slice(begin, data.draw(st.integers(begin + 1, n)))

    rows, cols = part(shape[0]), part(shape[1])
    weight, scale, values = make(*shape, block, data.draw(st.sampled_from(SCALES)))
    with tempfile.TemporaryDirectory() as name:
        save(Path(name), weight, scale)
        check(read_part(request(Path(name), shape, block, rows, cols)), values[rows, cols])


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("rows", "cols"), [(1408, 256), (256, 1408), (576, 200), (200, 576)])
def test_real_widths(tmp_path, rows, cols, ranks):
    """V2-Lite's experts (704 per rank) and kv_a's 576 cut 128-blocks."""
    weight, scale, values = make(rows, cols, (128, 128))
    save(tmp_path, weight, scale)
    for rank in range(ranks):
        r = slice(rank * rows // ranks, (rank + 1) * rows // ranks)
        c = slice(rank * cols // ranks, (rank + 1) * cols // ranks)
        every_row, every_col = slice(0, rows), slice(0, cols)
        cut = read_part(request(tmp_path, (rows, cols), (128, 128), r, every_col))
        check(cut, values[r])
        cut = read_part(request(tmp_path, (rows, cols), (128, 128), every_row, c))
        check(cut, values[:, c])


def test_stacks(tmp_path):
    """Gate and up of fused experts: one matrix per expert, up beginning inside a block."""
    made = [make(12, 10, (4, 4), seed=e) for e in range(3)]
    weight, scale = (torch.stack([m[i] for m in made]) for i in (0, 1))
    save(tmp_path, weight, scale)
    for expert, (_, _, values) in enumerate(made):
        rows, cols = slice(1, 5), slice(3, 10)
        part = read_part(request(tmp_path, (12, 10), (4, 4), rows, cols, expert, 6))
        check(part, values[7:11, 3:])


def test_wrong_components(tmp_path):
    weight, scale, _ = make(9, 9, (4, 4))
    whole = slice(0, 9)
    save(tmp_path, weight, scale[:2].contiguous())
    with pytest.raises(CheckpointError, match=r"scale_inv: shape \[2, 3\] found, \[3, 3\] exp"):
        read_part(request(tmp_path, (9, 9), (4, 4), whole, whole))
    save(tmp_path, weight, scale.long())
    with pytest.raises(CheckpointError, match="scale_inv: dtype I64 found"):
        read_part(request(tmp_path, (9, 9), (4, 4), whole, whole))
    save(tmp_path, weight.float(), scale)
    with pytest.raises(CheckpointError, match=r"m\.weight: dtype F32 found, F8_E4M3 expected"):
        read_part(request(tmp_path, (9, 9), (4, 4), whole, whole))
