"""Collectives of the CPU platform between real processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ds_runtime.errors import UnsupportedError
from ds_runtime.parallel import group as groups
from ds_runtime.parallel.group import SoloCommunicator
from ds_runtime.parallel.mesh import Mesh
from ds_runtime.parallel.world import World
from ds_runtime.platform.contract import Platform
from ds_runtime_cpu.platform import CpuPlatform
from ds_runtime_cuda import nvlink
from ds_runtime_cuda.platform import CudaPlatform
from ds_runtime_npu.platform import NpuPlatform
from ds_runtime_rocm.platform import RocmPlatform
from ds_runtime_xpu.platform import XpuPlatform
from parts import mostly_slow
from rank_processes import run_ranks


def worker(rank: int, size: int, address: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    group = CpuPlatform().communicator(rank, size, address, timeout=60)
    out: dict[str, Any] = {"rank": group.rank, "size": group.size}
    for dtype in (torch.float32, torch.bfloat16):
        part = torch.full((3, 5), 2.0 + rank, dtype=dtype)
        out[str(dtype)] = group.all_reduce(part.T.contiguous().T).tolist()
    out["gather"] = group.all_gather(torch.tensor([[rank, 10.0 + rank], [5.0, 6.0]])).tolist()
    rows = torch.tensor([[rank, 2], [3, 4]])
    out["rows"] = group.gather_rows(rows.T.contiguous().T).tolist()
    for dtype in (torch.float32, torch.bfloat16):
        parts = torch.arange(size * 2.0).repeat(3, 1).T.to(dtype) + rank  # [size · 2, 3]
        out[f"part {dtype}"] = group.reduce_scatter(parts).tolist()
    out["turned"] = group.all_to_all(torch.arange(size)[:, None] + 10 * rank).tolist()
    out["told"] = group.broadcast(torch.full((2,), rank), size - 1).tolist()
    if rank == 0:
        group.send(torch.tensor([1.5, 2.5]), size - 1)
    elif rank == size - 1:
        out["sent"] = group.receive((2,), torch.float32, 0).tolist()
    group.barrier()
    out["objects"] = group.gather_objects({"rank": rank})
    group.close()
    return out


@pytest.mark.parametrize("size", mostly_slow([2, 3], 1))
def test_every_collective(tmp_path, size):
    found = run_ranks(worker, size, tmp_path)
    total = float(sum(2 + r for r in range(size)))
    for out in found:
        assert out["size"] == size
        assert out["rows"] == [row for r in range(size) for row in ([r, 2], [3, 4])]
        for dtype in ("torch.float32", "torch.bfloat16"):
            sums = [size * (2 * out["rank"] + i) + sum(range(size)) for i in range(2)]
            assert out[f"part {dtype}"] == [[float(s)] * 3 for s in sums]
        for dtype in ("torch.float32", "torch.bfloat16"):
            assert out[dtype] == [[total] * 5] * 3
        assert out["gather"][0] == [v for r in range(size) for v in (r, 10.0 + r)]
        assert out["gather"][1] == [5.0, 6.0] * size
        assert out["turned"] == [[10 * r + out["rank"]] for r in range(size)]
        assert out["told"] == [size - 1] * 2
        assert out.get("sent", [1.5, 2.5]) == [1.5, 2.5]
        assert out["objects"] == [{"rank": r} for r in range(size)]


def crossed(rank: int, size: int, address: str) -> tuple[Any, ...]:
    """Four ranks in two groups of attention, each by heads: what rank 0 … 3 sum and gather."""
    torch.set_num_threads(1)
    world = World(Mesh(size, 2), CpuPlatform().communicator(rank, size, address, timeout=60))
    own = torch.full((1, 2), 2.0**rank)
    groups = [world.group(axis) for axis in ("tp", "attn_tp", "attn_dp")]
    out = [group.all_reduce(own.clone()).tolist()[0][0] for group in groups]
    out += [group.gather_rows(own)[:, 0].tolist() for group in groups]
    turned = [group.all_to_all(own.repeat(group.size, 1))[:, 0].tolist() for group in groups]
    heads = groups[1]
    if heads.rank == 0:
        heads.send(own, 1)
        sent = None
    else:
        sent = heads.receive((1, 2), torch.float32, 0).tolist()[0][0]
    told = heads.broadcast(own.clone(), 1).tolist()[0][0]
    groups[2].barrier()
    objects = [group.gather_objects(rank) for group in groups]
    world.close()
    return out, turned, sent, told, objects


def test_a_process_is_in_several_groups(tmp_path):
    for rank, found in enumerate(run_ranks(crossed, 4, tmp_path)):
        heads, rows = [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]
        members = [[0, 1, 2, 3], heads, rows]
        values = [[2.0**r for r in ranks] for ranks in members]
        out, turned, sent, told, objects = found
        assert out == [sum(v) for v in values] + values
        assert turned == values and objects == members
        assert sent == (None if rank % 2 == 0 else 2.0 ** heads[0]) and told == 2.0 ** heads[1]


def test_one_rank_needs_no_group():
    group = SoloCommunicator()
    x = torch.ones(2, 3)
    assert group.size == 1 and group.all_reduce(x) is x and group.all_gather(x) is x
    assert group.gather_rows(x) is x and group.reduce_scatter(x) is x
    assert group.all_to_all(x) is x and group.broadcast(x, 0) is x
    assert group.gather_objects(7) == [7] and group.split([[0]]) is group
    group.barrier()
    with pytest.raises(ValueError, match="nobody to send to"):
        group.send(x, 0)
    with pytest.raises(ValueError, match="nobody sends to it"):
        group.receive((1,), torch.float32, 0)


def test_a_platform_without_communicator_serves_one_rank():
    with pytest.raises(UnsupportedError, match="--tp 2: platform cpu connects no ranks"):
        Platform.communicator(CpuPlatform(), 0, 2, "unused")


@pytest.mark.parametrize("kind", [CudaPlatform, NpuPlatform, RocmPlatform, XpuPlatform])
@pytest.mark.parametrize(("local", "device"), [(None, 1), (3, 3)])
def test_a_group_is_joined_with_the_device_of_the_local_rank(monkeypatch, kind, local, device):
    """Where several engines run, rank 1 of the second group has another device than that of the
    first.
    """
    told = []

    def join(*given, device, sizes=None):
        told.append((given[1:3], device))

    monkeypatch.setattr(groups, "TorchCommunicator", join)
    monkeypatch.setattr(nvlink, "NvlinkCommunicator", join)
    monkeypatch.setattr(kind, "device", lambda self, rank=0: f"device {rank}")
    platform = kind()
    platform.local_rank = local
    platform.communicator(1, 2, "file:///nowhere")
    assert told == [((1, 2), f"device {device}")]
