"""Uploads in one buffer, and downloads, on a device whose memory is the host's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ds_runtime.engine.transfer import Download, Upload, put

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


def test_values_and_back():
    ids = put([3, 1], np.int64, CPU)
    assert ids.dtype == torch.int64
    assert [t.tolist() for t in Download([ids, ids + 1]).wait()] == [[3, 1], [4, 2]]
    assert Download([]).wait() == []
