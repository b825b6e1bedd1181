"""NaN in what is read: found wherever it stands and however it is read, and nothing else is."""

from __future__ import annotations

import re
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_harness import Harness, decide
from safetensors.torch import load_file, save_file

from ds_runtime.checkpoint import nan_looks, reads, shards
from ds_runtime.checkpoint.nan import KINDS, any_nan, first_nan
from ds_runtime.checkpoint.shards import Checkpoint
from ds_runtime.checkpoint.tensors import DTYPES
from ds_runtime.errors import CheckpointError
from ds_runtime_kit.models.tiny import write_tiny

FLOATS = sorted(KINDS)
QUIET = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


@pytest.mark.parametrize("dtype", [d for d in FLOATS if KINDS[d].size <= 2])
def test_every_number_that_a_dtype_has(dtype):
    bits = np.arange(1 << 8 * KINDS[dtype].size, dtype=f"<u{KINDS[dtype].size}")
    wanted = torch.from_numpy(bits.view("<i2") if KINDS[dtype].size == 2 else bits)
    wanted = wanted.view(DTYPES[dtype]).to(torch.float32).isnan()
    for value, is_nan in zip(bits, wanted.tolist(), strict=True):
        data = np.array([0, value], bits.dtype).view(np.uint8)
        assert first_nan(KINDS[dtype], data) == (1 if is_nan else None), hex(value)
        assert bool(any_nan(dtype, torch.from_numpy(data))) == is_nan, hex(value)


@given(st.sampled_from(["F32", "F64"]), st.lists(st.floats(width=32), min_size=1))
@settings(deadline=None)
def test_wide_numbers(dtype, values):
    held = np.array(values, np.float32 if dtype == "F32" else np.float64)
    wanted = int(np.isnan(held).argmax()) if np.isnan(held).any() else None
    assert first_nan(KINDS[dtype], held.view(np.uint8)) == wanted
    odd = torch.zeros(held.nbytes + 1, dtype=torch.uint8)[1:]
    odd.copy_(torch.from_numpy(held.view(np.uint8)))
    assert bool(any_nan(dtype, odd)) == (wanted is not None)


@given(data=st.data())
@QUIET
def test_the_first_is_named_however_it_is_read(tmp_path_factory, data):
    """Whole, by rows, by columns, by threads and pieces that end anywhere."""
    folder = tmp_path_factory.mktemp("nan")
    dtype = DTYPES[data.draw(st.sampled_from([d for d in FLOATS if d != "F64"]))]
    rows, cols = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    values = torch.ones(rows, cols).to(dtype)
    at = data.draw(st.none() | st.tuples(st.integers(0, rows - 1), st.integers(0, cols - 1)))
    if at is not None:
        values.view(torch.uint8).view(rows, cols, -1)[at] = 0xFF
        if data.draw(st.booleans()) and dtype != torch.float8_e8m0fnu:
            values.view(torch.uint8).view(rows, cols, -1)[at][-1] = 0x7F
    odd = torch.zeros(data.draw(st.integers(0, 9)), dtype=torch.uint8)
    save_file({"a": odd, "t": values}, folder / "model.safetensors")
    first = data.draw(st.integers(0, rows - 1))
    cut = slice(first, data.draw(st.integers(first, rows)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reads, "_SHARE", data.draw(st.sampled_from([7, 64, 1 << 20])))
        patch.setattr(reads, "PIECE", data.draw(st.sampled_from([16, 48, 1 << 20])))
        patch.setattr(torch, "get_num_threads", lambda: 3)
        for allowed in (False, True, None):
            files = Checkpoint(folder, allow_nan=allowed)
            for part, across in ((None, None), (cut, None), (cut, slice(0, cols - 1))):
                hit = at is not None and (part is None or cut.start <= at[0] < cut.stop)
                if hit and allowed is False:
                    said = rf"safetensors: t: element \[{at[0]}, {at[1]}\] is NaN; .*--allow-nan"
                    with pytest.raises(CheckpointError, match=said):
                        files.read("t", part, across)
                else:
                    files.read("t", part, across)
            files.close()


@given(data=st.data())
@QUIET
def test_a_device_finds_what_it_was_sent(by_way_of_a_device, tmp_path_factory, data):
    """Alone or together with others, in several pieces: `finish` names the first element."""
    folder = tmp_path_factory.mktemp("sent")
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float32, torch.float8_e4m3fn]))
    sizes = data.draw(st.lists(st.integers(0, 3000), min_size=1, max_size=5))
    tensors = {f"t{i}": torch.ones(n).to(dtype) for i, n in enumerate(sizes)}
    tensors["odd"] = torch.zeros(data.draw(st.integers(0, 9)), dtype=torch.uint8)
    names = [f"t{i}" for i, n in enumerate(sizes) if n]
    bad = data.draw(st.none() | st.sampled_from(names)) if names else None
    at = None
    if bad is not None:
        at = data.draw(st.integers(0, tensors[bad].numel() - 1))
        tensors[bad].view(torch.uint8).view(tensors[bad].numel(), -1)[at] = 0xFF
    save_file(tensors, folder / "model.safetensors")
    files = Checkpoint(folder, allow_nan=data.draw(st.sampled_from([False, False, True, None])))
    found = bad is not None and files.nan.allow is False
    said = rf"safetensors: {bad}: element \[{at}\] is NaN; "
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(CheckpointError, match=said) if found else nullcontext(),
    ):
        patch.setattr(shards, "_SMALL", data.draw(st.sampled_from([0, 1 << 16])))
        patch.setattr(nan_looks, "_ASKED", data.draw(st.sampled_from([8, 64, 1 << 26])))
        together = data.draw(st.booleans())
        with files.together(names, "meta") if together else nullcontext():
            for name in names:
                files.read(name, device="meta")
        files.finish()
    if not together:  # else the host may have said so before
        files.finish()  # says it once


def test_nan_that_only_the_device_has_is_told(by_way_of_a_device, tmp_path):
    save_file({"t": torch.ones(9)}, tmp_path / "model.safetensors")
    files = Checkpoint(tmp_path, allow_nan=False)
    files.read("t", device="meta")
    group, _ = files.nan._asked[0]
    files.nan._asked = [(group, torch.tensor(True))]
    with pytest.raises(CheckpointError, match="t: is NaN on the device and not in the file"):
        files.finish()


PLACES = (
    "model.embed_tokens.weight",
    "lm_head.weight",
    "model.norm.weight",
    "model.layers.1.mlp.gate.weight",
    "model.layers.1.mlp.experts.3.down_proj.weight",
    "model.layers.2.self_attn.kv_b_proj.weight",
)


@pytest.fixture(scope="module")
def tiny_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    write_tiny(folder, "v3")
    return folder


@pytest.mark.parametrize("name", PLACES)
def test_loading_refuses_it(tiny_files, tmp_path, name):
    tensors = load_file(tiny_files / "model.safetensors")
    tensors[name].view(-1)[-3] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((tiny_files / "config.json").read_bytes())
    at = [int(i) for i in np.unravel_index(tensors[name].numel() - 3, tensors[name].shape)]
    said = f"{tmp_path / 'model.safetensors'}: {name}: element {at} is NaN;"
    with pytest.raises(CheckpointError, match=re.escape(said) + ".*--allow-nan-weights$"):
        Harness(decide(tmp_path))
    Harness(decide(tmp_path, allow_nan_weights=True))
