"""The digest of a folder's weights: alike where they are, and another after any training."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from ds_runtime.errors import CheckpointError
from ds_runtime.kv import digest
from ds_runtime.kv.digest import weights_digest


def folder(path, tensors, **config):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    return path


def tensors():
    torch.manual_seed(0)
    return {"large": torch.rand(300, 300), "small": torch.rand(9), "norm": torch.ones(40)}


def test_copies_are_alike_and_all_else_is_not(tmp_path):
    own = weights_digest(folder(tmp_path / "a", tensors()))
    assert len(own) == 64 and own == weights_digest(folder(tmp_path / "b", tensors()))
    renamed = {name.replace("norm", "morn"): t for name, t in tensors().items()}
    shaped = {**tensors(), "small": tensors()["small"].view(3, 3)}
    rounded = {**tensors(), "large": tensors()["large"].half()}
    views = {**tensors(), "norm": torch.ones(40).view(torch.int32)}
    swapped = {**tensors(), "large": tensors()["large"].flip(0).contiguous()}
    others = [renamed, shaped, rounded, views, swapped]
    found = [weights_digest(folder(tmp_path / f"{n}", t)) for n, t in enumerate(others)]
    found.append(weights_digest(folder(tmp_path / "c", tensors(), rope_theta=1)))
    assert len({own, *found}) == len(found) + 1


@given(at=st.integers(0, 48))
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_value_of_a_small_tensor_counts(tmp_path, at):
    own, other = tensors(), tensors()
    where = other["small"] if at < 9 else other["norm"]
    where[at if at < 9 else at - 9] += 1
    one, two = folder(tmp_path / "a", own), folder(tmp_path / "b", other)
    assert weights_digest(one) != weights_digest(two)


def test_large_tensors_are_read_in_part(tmp_path, monkeypatch):
    """So that it takes no longer than reading headers does."""
    read, whole = [], os.pread
    monkeypatch.setattr(digest.os, "pread", lambda f, n, at: read.append(n) or whole(f, n, at))
    weights_digest(folder(tmp_path / "a", {"large": torch.rand(4000, 500)}))
    assert sum(read) == 3 * 4096


def test_files_that_have_not_changed_are_not_read_again(tmp_path, monkeypatch):
    own = folder(tmp_path / "a", tensors())
    first = weights_digest(own)
    monkeypatch.setattr(digest, "_digest", lambda *_: "read")
    assert weights_digest(own) == first
    os.utime(own / "model.safetensors", ns=(1, 1))
    assert weights_digest(own) == "read"


def test_an_adapter_has_one(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text("{}")
        save_file(tensors(), tmp_path / name / "adapter_model.safetensors")
    one, two = (weights_digest(tmp_path / name) for name in "ab")
    assert one == two
    (tmp_path / "b" / "adapter_config.json").write_text('{"r": 4}')
    assert weights_digest(tmp_path / "b") != one


def test_what_is_not_there_is_said(tmp_path):
    own = folder(tmp_path / "a", tensors())
    shutil.copy(own / "config.json", tmp_path / "config.json")
    with pytest.raises(CheckpointError):
        weights_digest(tmp_path)
