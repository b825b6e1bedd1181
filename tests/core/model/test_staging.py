"""Weights on their way to a device that copies late and in order, and experts read ahead."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from late_device import LateDevice
from safetensors.torch import save_file

from ds_runtime.checkpoint import shards as checkpoint
from ds_runtime.checkpoint import staging
from ds_runtime.checkpoint.reads import Files
from ds_runtime.checkpoint.shards import Checkpoint
from ds_runtime.checkpoint.staging import Staging
from ds_runtime.description.hf import from_hf
from ds_runtime.description.structure import model_of
from ds_runtime.errors import CheckpointError
from ds_runtime.ops.weight import WeightPart
from ds_runtime.parallel.layout import Shard, Shards
from ds_runtime.weights.layer_experts import LayerExperts
from ds_runtime_bench.shapes import config_of


@pytest.fixture(scope="module")
def patched():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@given(sizes=st.lists(st.integers(1, 256), max_size=40))
def test_nothing_is_overwritten_before_the_device_has_it(patched, sizes):
    device = LateDevice(patched)
    ring, there = Staging(torch.device("cpu"), 1024), []
    for number, size in enumerate(sizes):
        room = ring.room(size)
        room.fill_(number % 251 + 1)
        there.append(device.tensor(size))
        ring.send(room, there[-1])
    device.event().synchronize()
    for number, tensor in enumerate(there):
        assert (tensor.data == number % 251 + 1).all(), number


def test_a_checkpoint_reads_the_same_by_way_of_a_device(tmp_path, monkeypatch):
    wanted = {
        "wide": torch.randn(300, 70).to(torch.bfloat16),
        "codes": torch.randn(5, 9, 33).to(torch.float8_e4m3fn),
        "one": torch.tensor(3.5),
        "none": torch.empty(0, 4),
    }
    save_file(wanted, tmp_path / "model.safetensors")
    LateDevice(monkeypatch)
    ring = Staging(torch.device("cpu"), 4096)  # several pieces per tensor
    monkeypatch.setattr(checkpoint, "shares_memory", lambda device: False)
    monkeypatch.setattr(checkpoint, "_STRIP", 700)
    monkeypatch.setattr(Checkpoint, "_ring", lambda self, device: ring)
    monkeypatch.setattr(staging, "event_on", lambda device: torch.Event("cpu"))
    files = Checkpoint(tmp_path)
    found = {name: files.read(name) for name in wanted}
    found["rows"] = files.read("wide", slice(7, 201))
    found["cols"] = files.read("wide", slice(7, 201), slice(3, 50))
    found["stack"] = files.read("codes", slice(2, 9), slice(5, 6), index=3)
    found["sent"] = files.sent(wanted["codes"], "cpu")
    wanted |= {
        "rows": wanted["wide"][7:201],
        "cols": wanted["wide"][7:201, 3:50],
        "stack": wanted["codes"][3, 2:9, 5:6],
        "sent": wanted["codes"],
    }
    for name, tensor in wanted.items():
        assert found[name].shape == tensor.shape and found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name].to(torch.float32), tensor.to(torch.float32)), name


@given(
    lengths=st.lists(st.integers(0, 300), min_size=1, max_size=12),
    dtype=st.sampled_from([torch.uint8, torch.bfloat16, torch.float32]),
    data=st.data(),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_what_is_read_together_is_what_is_read_alone(
    by_way_of_a_device, tmp_path_factory, lengths, dtype, data
):
    folder = tmp_path_factory.mktemp("files")
    numbers = {f"t{i}": torch.randint(0, 250, (n, 3)).to(dtype) for i, n in enumerate(lengths)}
    numbers["odd"] = torch.zeros(5, dtype=torch.uint8)  # what follows begins anywhere
    save_file(numbers, folder / "model.safetensors")
    files, counted = Checkpoint(folder), []
    files.on_read = counted.append
    asked = data.draw(st.lists(st.sampled_from(sorted(numbers)), unique=True))
    with files.together(asked, "meta"):
        for name, wanted in numbers.items():
            found = files.read(name, device="meta")
            assert torch.equal(found, wanted), name
            assert found.numel() == 0 or found.data_ptr() % found.element_size() == 0
            assert torch.equal(files.read(name), wanted), name
            half = slice(wanted.shape[0] // 2, wanted.shape[0])
            assert torch.equal(files.read(name, half, device="meta"), wanted[half]), name
    halves = sum(t[t.shape[0] // 2 :].nbytes for t in numbers.values())
    assert sum(counted) == 2 * sum(t.nbytes for t in numbers.values()) + halves


def test_neighbours_are_read_at_once_and_others_by_themselves(
    by_way_of_a_device, tmp_path, monkeypatch
):
    tensors = {f"t{i}": torch.randn(32, 64) for i in range(6)}
    save_file(tensors, tmp_path / "model.safetensors")
    files, filled = Checkpoint(tmp_path), Files.fill
    size = tensors["t0"].nbytes
    with files.together(["t1", "t0", "t2", "t4"], "meta"):
        assert sorted(by_way_of_a_device) == [size, 3 * size]
        for name in ("t0", "t1", "t2", "t4"):
            assert torch.equal(files.read(name, device="meta"), tensors[name])
        assert len(by_way_of_a_device) == 2
        with monkeypatch.context() as patch:  # the host has small ones as well
            patch.setattr(Files, "fill", None)
            assert torch.equal(files.read("t2"), tensors["t2"])
            patch.setattr(Files, "fill", filled)
            files.read("t3", device="meta")
        assert len(by_way_of_a_device) == 3
    files.read("t0", device="meta")
    assert len(by_way_of_a_device) == 4


class _Loader:
    """Stands for weights.loader.Loader: parts are named, one is damaged."""

    shards = Shards(Shard(), Shard())

    def __init__(self):
        self.read = []
        self.readers = ThreadPoolExecutor(3)

    def shared_slots(self, moe):
        return 0

    def whole(self, linears):
        return nullcontext()

    def part(self, stored, target, piece, pieces):
        assert (piece, pieces) == (0, 1)
        self.read.append(module := stored.module)
        if module == "model.layers.3.mlp.experts.4.up_proj":
            raise CheckpointError("damaged")
        return WeightPart(module, target, (1, 1), {})


def test_experts_are_read_before_they_are_asked_for_and_errors_come_with_their_own():
    load = _Loader()
    raw = config_of("v2-lite", "bfloat16") | {"n_routed_experts": 6}
    node = model_of(from_hf(raw), lambda module: "dense", range(3, 4)).blocks[0].mlp
    experts = LayerExperts(load, node, "dense")
    assert (experts.num_experts, experts.intermediate, experts.hidden) == (6, 1408, 2048)
    for index in range(4):
        names = [w.parts[0].name for w in experts.expert(index)]
        at = f"model.layers.3.mlp.experts.{index}."
        assert names == [at + "gate_proj", at + "up_proj", at + "down_proj"]
    with pytest.raises(CheckpointError, match="damaged"):
        experts.expert(4)
    assert experts.expert(5)[0].parts[0].name.endswith("5.gate_proj")
    load.readers.shutdown()
    assert len(load.read) == len(set(load.read)) == 17
