"""Checkpoints with a base: what is whose, and what is said of a base that cannot be."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from ds_runtime.checkpoint.base import base_of, part_of
from ds_runtime.checkpoint.shards import Checkpoint
from ds_runtime.errors import CheckpointError


def folder(path, name, **config):
    made = path / name
    made.mkdir()
    (made / "config.json").write_text(json.dumps(config))
    return made


def test_what_the_checkpoint_lacks_is_the_bases(tmp_path):
    base = folder(tmp_path, "base")
    own = folder(tmp_path, "own", base_model="../base")
    (base / "tokenizer.json").write_text("{}")
    save_file({"a": torch.zeros(2), "b": torch.zeros(3)}, base / "model.safetensors")
    save_file({"b": torch.ones(3), "c": torch.ones(1)}, own / "model.safetensors")
    assert part_of(own, "tokenizer.json").samefile(base / "tokenizer.json")
    assert part_of(own, "config.json") == own / "config.json"
    assert base_of(base) is None and part_of(base, "none") == base / "none"
    checkpoint = Checkpoint(own)
    assert {n: checkpoint.read(n).sum().item() for n in "abc"} == {"a": 0, "b": 3, "c": 1}


@pytest.mark.parametrize(
    ("named", "says"),
    [
        ("../gone", "gone is not there; put the base's folder in its place"),
        (7, "base_model 7: expected the folder of a checkpoint"),
        ("../other", "has a base_model itself; name the one that holds the weights"),
    ],
)
def test_a_base_that_cannot_be_is_a_sentence(tmp_path, named, says):
    folder(tmp_path, "other", base_model="../base")
    own = folder(tmp_path, "own", base_model=named)
    with pytest.raises(CheckpointError, match=says):
        base_of(own)
