"""Uploads in one buffer, and downloads, on a device whose memory is the host's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ds_runtime.engine.step import transfer
from ds_runtime.engine.step.transfer import Buffer, Download, Upload, put

CPU = torch.device("cpu")
ARRAYS = (
    np.arange(7, dtype=np.int64),
    np.zeros((0, 3), np.int32),
    np.arange(12, dtype=np.int32).reshape(3, 4)[:, ::2],
    np.linspace(0, 1, 5, dtype=np.float64),
    np.full(1, 2.5, np.float32),
)


@pytest.mark.parametrize("packed", [False, True])
def test_every_array_arrives_as_it_was(packed):
    upload = Upload(CPU, packed)
    numbers = [upload.add(array) for array in ARRAYS]
    upload.send()
    for number, array in zip(numbers, ARRAYS, strict=True):
        tensor = upload[number]
        assert tensor.shape == array.shape and tensor.is_contiguous()
        assert tensor.numpy().dtype == array.dtype
        assert np.array_equal(tensor.numpy(), array)


def test_packed_arrays_share_one_aligned_buffer():
    upload = Upload(CPU, packed=True)
    numbers = [upload.add(array) for array in ARRAYS]
    upload.send()
    storages = {upload[n].untyped_storage().data_ptr() for n in numbers}
    assert len(storages) == 1
    assert all(upload[n].data_ptr() % 16 == upload[0].data_ptr() % 16 for n in numbers)
    ARRAYS[0][:1] = 99
    assert upload[0][0] != 99
    ARRAYS[0][:1] = 0


def sent(buffer, arrays):
    upload = Upload(CPU)
    numbers = [upload.add(array) for array in arrays]
    upload.send(buffer)
    return [upload[n] for n in numbers]


in_place_or_staged = pytest.mark.parametrize("in_place", [False, True])


@in_place_or_staged
def test_a_buffer_gives_arrays_of_the_same_kinds_the_same_tensors(in_place):
    buffer = Buffer(1024, CPU, in_place)
    first = sent(buffer, ARRAYS)
    addresses = [t.data_ptr() for t in first]
    changed = [array + 1 for array in ARRAYS]
    second = sent(buffer, changed)
    assert all(a is b for a, b in zip(first, second, strict=True))
    assert all(a % 64 == addresses[0] % 64 for a in addresses)
    for tensor, array in zip(second, changed, strict=True):
        assert tensor.is_contiguous() and tensor.numpy().dtype == array.dtype
        assert np.array_equal(tensor.numpy(), array)
    changed[0][:1] = 99  # once sent, the array is the caller's again
    assert second[0][0] == 1


@in_place_or_staged
def test_a_buffer_lays_other_shapes_and_dtypes_out_anew(in_place):
    buffer = Buffer(1024, CPU, in_place)
    five = np.arange(5, dtype=np.int64)
    for array in (five, five[:4], five.reshape(5, 1), five.astype(np.float64), five):
        (tensor,) = sent(buffer, [array])
        assert tensor.shape == array.shape and np.array_equal(tensor.numpy(), array)
        assert tensor.numpy().dtype == array.dtype


def test_a_buffer_remembers_some_layouts_and_serves_any_number(monkeypatch):
    monkeypatch.setattr(transfer, "_LAYOUTS", 3)
    buffer = Buffer(1024, CPU)
    for n in (*range(1, 9), *range(1, 9)):
        (tensor,) = sent(buffer, [np.arange(n, dtype=np.int32)])
        assert tensor.tolist() == list(range(n)) and len(buffer._layouts) <= 3


@in_place_or_staged
def test_a_buffer_holds_what_it_is_made_for_and_no_more(in_place):
    arrays = [np.full(4, 3, np.int64), np.full(9, 4, np.int64)]
    assert [t.tolist() for t in sent(Buffer(64 + 72, CPU, in_place), arrays)] == [[3] * 4, [4] * 9]
    with pytest.raises(AssertionError, match="arrays of 192 bytes for a buffer of 128"):
        sent(Buffer(128, CPU, in_place), arrays)


def test_values_and_back():
    ids = put([3, 1], np.int64, CPU)
    assert ids.dtype == torch.int64
    assert [t.tolist() for t in Download([ids, ids + 1]).wait()] == [[3, 1], [4, 2]]
    assert Download([]).wait() == []
