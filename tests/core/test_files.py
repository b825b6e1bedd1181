"""Files of a checkpoint that are no plain files, or far too large: one sentence, at once."""

from __future__ import annotations

import json
import os
import shutil
import socket
import time

import pytest

from ds_runtime.checkpoint.files import open_plain
from ds_runtime.checkpoint.shards import Checkpoint
from ds_runtime.checkpoint.tensors import read_header
from ds_runtime.description.adapter import CONFIG, PeftConfig
from ds_runtime.description.hf import load_config
from ds_runtime.errors import CheckpointError
from ds_runtime.server.generate.sampling import GenerationDefaults
from ds_runtime.text.formats.template import load_template
from ds_runtime.text.tokenizer import Tokenizer
from ds_runtime_kit.models.tiny import config_dict

SECONDS = 5.0  # a reader that waits would wait for ever


def pipe(path):
    os.mkfifo(path)


def device(path):
    path.symlink_to("/dev/zero")


def link_to_pipe(path):
    os.mkfifo(path.with_suffix(".pipe"))
    path.symlink_to(path.with_suffix(".pipe"))


def a_socket(path):
    where = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(f"/proc/self/fd/{where}/{path.name}")
    os.close(where)


def sparse(path):
    with path.open("wb") as file:
        file.truncate(1 << 40)


def link_to_sparse(path):
    sparse(path.with_suffix(".sparse"))
    path.symlink_to(path.with_suffix(".sparse"))


def folder(path):
    path.mkdir()


def deep(path):
    path.write_text("[" * 100_000)


def not_text(path):
    path.write_bytes(b'{"\xff": 1}')


PLANTED = [pipe, device, link_to_pipe, a_socket, sparse, link_to_sparse, folder, deep, not_text]
READERS = {
    "config.json": load_config,
    "generation_config.json": GenerationDefaults.load,
    "tokenizer.json": Tokenizer.load,
    "tokenizer_config.json": Tokenizer.load,
    "chat_template.jinja": lambda f: load_template(f, Tokenizer.load(f)),
    "model.safetensors.index.json": Checkpoint,
    "hf_quant_config.json": load_config,
    CONFIG: PeftConfig.load,
}


def plant(folder, name, how):
    path = folder / name
    path.unlink(missing_ok=True)
    how(path)
    return path


@pytest.fixture
def checkpoint(bpe_folder, tmp_path):
    shutil.copytree(bpe_folder, tmp_path, dirs_exist_ok=True)
    _, config = config_dict("v3")
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "how"),
    [
        (name, how)
        for name in READERS
        for how in PLANTED
        if (name, how) != ("chat_template.jinja", deep)  # any text is a template
    ],
)
def test_what_is_no_plain_file_is_a_sentence_at_once(checkpoint, name, how):
    path = plant(checkpoint, name, how)
    began = time.monotonic()
    with pytest.raises(CheckpointError) as e:
        READERS[name](checkpoint)
    assert time.monotonic() - began < SECONDS
    said = str(e.value)
    assert said.startswith(str(path)) and "\n" not in said and len(said) < 600


POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)  # https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md
WEIGHTS = {
    "model.safetensors": lambda f: read_header(f / "model.safetensors"),
    "adapter_model.safetensors": lambda f: read_header(f / "adapter_model.safetensors"),
}


@pytest.mark.parametrize("name", [*READERS, *WEIGHTS])
def test_a_pointer_of_git_lfs_is_told_from_a_broken_file(checkpoint, name):
    """A clone without Git LFS has it in the place of every large file."""
    path = plant(checkpoint, name, lambda p: p.write_text(POINTER))
    with pytest.raises(CheckpointError, match=r"is a pointer of Git LFS.*: run git lfs pull") as e:
        {**READERS, **WEIGHTS}[name](checkpoint)
    assert str(e.value).startswith(str(path))


def test_an_open_file_begins_at_its_first_byte(tmp_path):
    (tmp_path / "a").write_bytes(POINTER.encode()[1:])
    with open_plain(tmp_path / "a") as file:
        assert os.read(file.fileno(), 7) == b"ersion "
