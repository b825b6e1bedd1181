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

from ds_runtime.checkpoint.base import stamps_of
from ds_runtime.errors import CheckpointError
from ds_runtime.kv import digest


def folder(path, tensors, **config):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    return path


def weights_digest(path):
    return digest.weights_digest(path, stamps_of(path))


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


@given(most=st.integers(1, 12), count=st.integers(1, 40))
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_so_many_tensors_are_read_at_most(tmp_path, monkeypatch, most, count):
    """Names, shapes and formats of all count, and a change in all of them is seen."""
    read, whole = [], os.pread
    own = folder(tmp_path / "a", {f"{n}": torch.full((9,), 1.0) for n in range(count)})
    other = folder(tmp_path / "b", {f"{n}": torch.full((9,), 2.0) for n in range(count)})
    more = folder(tmp_path / "c", {f"{n}": torch.full((9,), 1.0) for n in range(count + 1)})
    with monkeypatch.context() as m:
        m.setattr(digest.os, "pread", lambda f, n, at: read.append(n) or whole(f, n, at))
        found = [digest.weights_digest(f, stamps_of(f), most) for f in (own, other, more)]
    assert len(set(found)) == 3 and 3 <= len(read) <= 3 * most


@pytest.mark.parametrize("how", ["written", "replaced", "written, times set back", "added"])
@pytest.mark.parametrize("which", ["config.json", "model.safetensors"])
def test_files_that_changed_since_they_were_loaded_have_none(tmp_path, which, how):
    """What runs is of the old ones."""
    own = folder(tmp_path / "a", tensors())
    file, loaded = own / which, stamps_of(own)
    assert digest.weights_digest(own, loaded) == weights_digest(own)
    before, data = file.stat(), file.read_bytes()
    if how == "replaced":
        (other := tmp_path / "other").write_bytes(data)
        os.replace(other, file)
    elif how == "added":
        loaded = {path: stamp for path, stamp in loaded.items() if path != file}
    else:
        file.write_bytes(data)
    if how == "written, times set back":
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(CheckpointError, match=f"{which}: has changed since it was loaded"):
        digest.weights_digest(own, loaded)


def test_files_of_a_base_and_those_that_a_folder_stands_for_are_stamped(tmp_path):
    base = folder(tmp_path / "base", tensors())
    own = folder(tmp_path / "own", {"more": torch.ones(3)}, base_model="../base")
    loaded = stamps_of(own)
    assert digest.weights_digest(own, loaded) != digest.weights_digest(base, stamps_of(base))
    file = next(path for path in loaded if path.parent.name == "base" and path.suffix != ".json")
    os.utime(file)
    with pytest.raises(CheckpointError, match="has changed since it was loaded"):
        digest.weights_digest(own, loaded)
    (own / "gguf.json").write_text(json.dumps({"files": [str(tmp_path / "x.gguf")], "layers": 1}))
    (tmp_path / "x.gguf").write_bytes(b"x")
    assert tmp_path / "x.gguf" in stamps_of(own)


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
