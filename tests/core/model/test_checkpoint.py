"""Reading safetensors: every dtype, any part, and a sentence for every kind of damage."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from ds_runtime.checkpoint import reads
from ds_runtime.checkpoint.gguf.folder import LINK
from ds_runtime.checkpoint.shards import Checkpoint
from ds_runtime.checkpoint.tensors import DTYPES, INDEX, SINGLE
from ds_runtime.errors import CheckpointError


def content(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    raw = torch.randint(0, 2, (*shape, dtype.itemsize), dtype=torch.uint8)
    return raw.view(dtype)[..., 0]


@pytest.fixture
def folder(tmp_path):
    """Two shards and their index."""
    first = {"a": torch.arange(12.0).view(3, 4), "b": torch.ones(5)}
    second = {"c": torch.zeros(2, 2, dtype=torch.bfloat16)}
    save_file(first, tmp_path / "x-1.safetensors")
    save_file(second, tmp_path / "x-2.safetensors")
    where = {"a": "x-1.safetensors", "b": "x-1.safetensors", "c": "x-2.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": where}))
    return tmp_path


@pytest.mark.parametrize("name", sorted(set(DTYPES) - {"U16", "U32", "U64"}))
def test_every_dtype(tmp_path, name):
    values = content(DTYPES[name], 5, 7)
    save_file({"t": values, "scalar": values[0, 0].clone()}, tmp_path / SINGLE)
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.entry("t").dtype == name and checkpoint.entry("t").shape == (5, 7)
    whole, part = checkpoint.read("t"), checkpoint.read("t", slice(1, 4), slice(2, 7))
    assert whole.dtype == part.dtype == values.dtype
    assert torch.equal(whole.view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(part.view(torch.uint8), values[1:4, 2:7].contiguous().view(torch.uint8))
    assert checkpoint.read("scalar").shape == ()


@given(data=st.data())
def test_any_part(data):
    rows, cols = data.draw(st.integers(0, 9)), data.draw(st.integers(0, 9))
    stack = data.draw(st.sampled_from([None, 3]))
    values = torch.randn(*([stack] if stack else []), rows, cols)

    def part(n: int) -> slice:
        begin = data.draw(st.integers(0, n))
        return slice(begin, data.draw(st.integers(begin, n)))

    r, c = part(rows), data.draw(st.sampled_from([None, part(cols)]))
    index = data.draw(st.integers(0, 2)) if stack else None
    with tempfile.TemporaryDirectory() as name:
        save_file({"t": values, "other": torch.ones(3)}, Path(name) / SINGLE)
        found = Checkpoint(Path(name)).read("t", r, c, index)
    matrix = values if index is None else values[index]
    assert torch.equal(found, matrix[r] if c is None else matrix[r, c])


def test_columns_in_strips(tmp_path, monkeypatch):
    monkeypatch.setattr("ds_runtime.checkpoint.shards._STRIP", 100)
    values = torch.randn(50, 9)
    save_file({"t": values}, tmp_path / SINGLE)
    checkpoint = Checkpoint(tmp_path)
    read = []
    checkpoint.on_read = read.append
    assert torch.equal(checkpoint.read("t", slice(3, 44), slice(2, 5)), values[3:44, 2:5])
    assert max(read) <= 100 and sum(read) == 41 * 9 * 4


@pytest.mark.parametrize("threads", [1, 2, 4, 9])
def test_several_threads_read_a_tensor(tmp_path, monkeypatch, threads):
    """Any number of bytes, cut where they fall; one that finds the file short ends the read."""
    monkeypatch.setattr(reads, "_SHARE", 7)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    values = {str(n): content(torch.int8, n) for n in (0, 1, 13, 14, 15, 29, 1000)}
    save_file(values, tmp_path / SINGLE)
    checkpoint, seen = Checkpoint(tmp_path), []
    checkpoint.on_read = seen.append
    for name, want in values.items():
        assert torch.equal(checkpoint.read(name), want)
    assert seen == [int(n) for n in values]
    checkpoint.close()
    assert torch.equal(checkpoint.read("1000"), values["1000"])  # opens it again
    with (tmp_path / SINGLE).open("r+b") as file:
        file.truncate(checkpoint.entry("1000").end - 3)
    with pytest.raises(CheckpointError, match="became shorter while it was read"):
        checkpoint.read("1000")
    checkpoint.close()


def test_nothing_stays_mapped(folder):
    checkpoint = Checkpoint(folder)
    kept = [checkpoint.read(name) for name in checkpoint.names]
    maps = Path("/proc/self/maps")
    if maps.exists():
        assert str(folder) not in maps.read_text()
    assert len(kept) == 3


def test_truncated_and_lengthened(folder):
    path = folder / "x-1.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    said = f"x-1.safetensors: {len(whole) - 3} bytes found, {len(whole)} expected"
    with pytest.raises(CheckpointError, match=said):
        Checkpoint(folder)
    path.write_bytes(whole + b"xx")
    with pytest.raises(CheckpointError, match=f"{len(whole) + 2} bytes found"):
        Checkpoint(folder)
    for cut in (0, 4, 20):
        path.write_bytes(whole[:cut])
        with pytest.raises(CheckpointError, match=f"{cut} bytes, but its header"):
            Checkpoint(folder)


@pytest.mark.parametrize(
    "fields",
    [
        {"dtype": "F7", "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1]},
        {"dtype": "F32", "shape": "x", "data_offsets": [0, 4]},
        [],
    ],
)
def test_bad_headers(tmp_path, fields):
    header = json.dumps({"t": fields}).encode()
    data = len(header).to_bytes(8, "little") + header + bytes(4)
    (tmp_path / SINGLE).write_bytes(data)
    with pytest.raises(CheckpointError, match="header cannot be read"):
        Checkpoint(tmp_path)


def shard(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + bytes(4)


DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    "header",
    ['{"t": {"dtype": "F32", "shape": [1e400], "data_offsets": [0, 4]}}', f'{{"t": {DEEP}}}'],
    ids=["infinite", "deep"],
)
def test_hostile_headers(tmp_path, header):
    (tmp_path / SINGLE).write_bytes(shard(header.encode()))
    with pytest.raises(CheckpointError, match="header cannot be read"):
        Checkpoint(tmp_path)


def test_tensors_that_share_bytes(tmp_path):
    one = '{"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}'
    other = '{"dtype": "U8", "shape": [2], "data_offsets": [2, 4]}'
    (tmp_path / SINGLE).write_bytes(shard(f'{{"b": {other}, "a": {one}}}'.encode()))
    with pytest.raises(CheckpointError, match=r"a ends at byte \d+ and b begins at byte"):
        Checkpoint(tmp_path)


def test_not_a_header(tmp_path):
    (tmp_path / SINGLE).write_bytes((10).to_bytes(8, "little") + b"0123456789")
    with pytest.raises(CheckpointError, match="header cannot be read"):
        Checkpoint(tmp_path)


def test_missing_shard(folder):
    (folder / "x-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"x-2\.safetensors: missing; .* 2 shards and 1"):
        Checkpoint(folder)


def test_index_of_another_checkpoint(folder):
    where = {"a": "x-1.safetensors", "z": "x-2.safetensors"}
    (folder / INDEX).write_text(json.dumps({"weight_map": where}))
    with pytest.raises(CheckpointError, match="holds no tensor 'z'"):
        Checkpoint(folder)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', DEEP])
def test_bad_index(folder, text):
    (folder / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match="not a safetensors index"):
        Checkpoint(folder)


@pytest.mark.parametrize("name", ["../x-1.safetensors", "", ".", ".."])
def test_index_may_not_leave_the_folder(folder, name):
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match="not a plain file name"):
        Checkpoint(folder)


@pytest.mark.parametrize("text", ["", "[]", '{"files": 3, "layers": 2}', '{"files": []}', DEEP])
def test_a_link_to_gguf_files_that_is_damaged(tmp_path, text):
    (tmp_path / LINK).write_text(text)
    with pytest.raises(CheckpointError, match=r"gguf\.json: cannot be read .*GGUF file again"):
        Checkpoint(tmp_path)


def test_folders_without_weights(tmp_path):
    with pytest.raises(CheckpointError, match=r"neither .* is there"):
        Checkpoint(tmp_path)
    (tmp_path / "part.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"no model\.safetensors\.index\.json"):
        Checkpoint(tmp_path)
    (tmp_path / "part.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"only pickled weights \(pytorch_model.bin"):
        Checkpoint(tmp_path)


def test_shrinks_while_open(tmp_path):
    save_file({"t": torch.zeros(1000)}, tmp_path / SINGLE)
    checkpoint = Checkpoint(tmp_path)
    with (tmp_path / SINGLE).open("r+b") as file:
        file.truncate(600)
    with pytest.raises(CheckpointError, match="became shorter"):
        checkpoint.read("t")
