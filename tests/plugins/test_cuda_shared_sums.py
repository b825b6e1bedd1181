"""Sums of NVIDIA GPUs in memory that ranks share; a double stands in for torch's memory."""

from __future__ import annotations

import logging
import os
import re
import threading
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import _symmetric_memory as symmetric

from ds_runtime_cuda import shared_memory
from ds_runtime_cuda.nvlink import NvlinkCommunicator
from thread_members import Shared

PLACE = threading.local()  # which rank a thread is


class Member(NvlinkCommunicator):
    """A thread of a group, without torch.distributed."""

    def __init__(self, shared, rank, sizes=(2, 4, 8)):
        self.rank, self.size = rank, len(shared.values)
        self._device, self._group = torch.device("cpu"), SimpleNamespace(group_name="all")
        self._shared, self._sizes = shared, lambda: sizes

    def gather_objects(self, value):
        self._shared.values[self.rank] = value
        self._shared.barrier.wait()
        values = list(self._shared.values)
        self._shared.barrier.wait()
        return values


class Memory:
    """What `size` ranks share; `fault` names what fails, on the last rank if it is one rank's."""

    def __init__(self, size, fault=""):
        self.size, self.fault, self.shared = size, fault, Shared(size)
        self.buffers = [None] * size

    def empty(self, values, dtype, device):
        self._fail("empty")
        assert dtype == torch.float32
        self.buffers[PLACE.rank] = torch.empty(values)
        return self.buffers[PLACE.rank]

    def rendezvous(self, buffer, name):
        assert name == "all" and buffer is self.buffers[PLACE.rank]
        self._fail("rendezvous")
        self.shared.barrier.wait()
        ptrs = [one.data_ptr() + (self.fault == "elsewhere") for one in self.buffers]
        return SimpleNamespace(buffer_ptrs=ptrs)

    def one_shot_all_reduce(self, part, how, name):
        """As torch's kernel: other ranks' parts are at the same place of theirs."""
        assert (how, name) == ("sum", "all") and part.numel() * part.element_size() % 4 == 0
        assert part.data_ptr() == self.buffers[PLACE.rank].data_ptr()
        self.shared.barrier.wait()
        parts = [buffer.view(part.dtype)[: part.numel()] for buffer in self.buffers]
        total = parts[0].clone()
        for other in reversed(parts[1:]) if self.fault == "order" else parts[1:]:
            total += other
        self.shared.barrier.wait()
        return total

    def one_shot_all_reduce_copy(self, part, x, how, name):
        assert part.shape == x.shape and x.dtype == part.dtype and x.is_contiguous()
        assert x.storage_offset() * x.element_size() % 16 == 0, "alignments differ"
        part.copy_(x)
        return self.one_shot_all_reduce(part, how, name)

    def two_shot_all_reduce_out(self, part, how, name, out):
        """Sums lie where the parts were, too."""
        assert out.shape == part.shape and out.is_contiguous()
        out.copy_(self.one_shot_all_reduce(part, how, name))
        if self.fault == "two_shot" and PLACE.rank == self.size - 1:
            out[-1] += 1
        part.copy_(out)
        self.shared.barrier.wait()

    def _fail(self, what):
        if self.fault == what and PLACE.rank == self.size - 1:
            raise RuntimeError(f"no {what} here")


class Meetings:
    """Of threads, which stand for processes."""

    def __init__(self, counts):
        self.counts = counts

    @property
    def count(self):
        return self.counts[PLACE.rank]

    @count.setter
    def count(self, value):
        self.counts[PLACE.rank] = value


def ranks(size, monkeypatch, run, fault="", before=None):
    """What `run(communicator)` returns of each rank. before: meetings of each one's process."""
    monkeypatch.setattr(shared_memory, "_Meetings", Meetings(before or [0] * size))
    memory, shared, found = Memory(size, fault), Shared(size), [None] * size
    monkeypatch.setattr(symmetric, "empty", memory.empty)
    monkeypatch.setattr(symmetric, "rendezvous", memory.rendezvous)
    monkeypatch.setattr(shared_memory, "_ops", lambda: memory)

    def work(rank):
        PLACE.rank = rank
        found[rank] = run(Member(shared, rank))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    return found


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_sums_have_the_bits_of_parts_added_one_by_one(monkeypatch, size, dtype):
    torch.manual_seed(size)
    parts = [(torch.randn(6, 7) * 4.0**rank).to(dtype) for rank in range(size)]
    monkeypatch.delenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", raising=False)

    def run(comm):
        add = comm.ordered_sum(1000)
        return [add(parts[comm.rank].T), add(parts[comm.rank])]

    want = parts[0].float()
    for part in parts[1:]:
        want = want + part.float()
    for turned, found in ranks(size, monkeypatch, run):
        assert torch.equal(found, want.reshape(-1))
        assert torch.equal(turned, want.T.reshape(-1))
    assert os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("empty", "RuntimeError: no empty here"),
        ("order", "RuntimeError: a sum of .* is .* instead of 3.0"),
    ],
)
def test_ranks_that_cannot_share_memory_gather_all_alike(monkeypatch, caplog, fault, why):
    with caplog.at_level(logging.WARNING):
        found = ranks(4, monkeypatch, lambda comm: comm.ordered_sum(1000), fault)
    assert found == [None] * 4
    (said,) = caplog.records  # of rank 0 alone
    assert re.search(f"sums in the order of the ranks gather their parts: {why}", said.getMessage())


def test_a_process_that_had_an_engine_before_gathers(monkeypatch, caplog):
    """torch would wait for ever: it numbers the meetings of a process."""
    with caplog.at_level(logging.WARNING):
        for before in ([3, 0], [None, None]):
            found = ranks(2, monkeypatch, lambda comm: comm.ordered_sum(10), before=before)
            assert found == [None, None]
    assert "number of times ([3, 0])" in caplog.records[0].getMessage()
    found = ranks(2, monkeypatch, lambda comm: comm.ordered_sum(10), before=[3, 3])
    assert None not in found and shared_memory._Meetings.counts == [4, 4]


def test_meetings_are_counted_and_a_failure_is_not_forgotten(monkeypatch):
    group = SimpleNamespace(group_name="all")
    made = shared_memory.SharedMemory(group, 8, torch.device("cpu"))
    monkeypatch.setattr(symmetric, "empty", lambda n, dtype, device: torch.empty(n))
    monkeypatch.setattr(symmetric, "rendezvous", lambda buffer, name: None)
    monkeypatch.setattr(shared_memory._Meetings, "count", 0)
    made.allocate()
    made.meet()
    made.meet()
    assert shared_memory._Meetings.count == 2

    def fail(buffer, name):
        raise RuntimeError("no")

    monkeypatch.setattr(symmetric, "rendezvous", fail)
    with pytest.raises(RuntimeError):
        made.meet()
    assert shared_memory._Meetings.count is None


@pytest.mark.parametrize("without", [(), (0,), (1,), (0, 1)])
def test_groups_of_other_sizes_and_links_are_not_tried(monkeypatch, without):
    """All ranks decide alike, also where one of them alone sees no links."""

    def run(one):
        sizes = () if one.rank in without else (2, 4)
        return Member(one._shared, one.rank, sizes=sizes).ordered_sum(1000)

    size = 2 if without else 3
    assert ranks(size, monkeypatch, run) == [None] * size


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fast_sums_are_sums_with_the_same_bits_on_all_ranks(monkeypatch, size, dtype):
    torch.manual_seed(size)
    parts = [torch.randn(5, 16).to(dtype) for _ in range(size)]
    monkeypatch.delenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", raising=False)

    def run(comm):
        own, apart = parts[comm.rank].clone(), torch.zeros(81, dtype=dtype)
        apart[1:] = parts[comm.rank].view(-1)
        found = {k: (f(own), f(apart[1:].view(5, 16))) for k, f in comm.fast_sums(1024).items()}
        assert torch.equal(own, parts[comm.rank]), "what was given is changed"
        return found

    want = torch.stack([part.double() for part in parts]).sum(0)
    found = ranks(size, monkeypatch, run)
    for one in found:
        assert [*one] == ["one_shot", "two_shot"]
        for whole, part in one.values():
            assert whole.dtype == dtype and torch.equal(whole, found[0]["one_shot"][0])
            assert torch.equal(whole, part)
            bound = size * 8 * torch.finfo(dtype).eps
            assert torch.allclose(whole.double(), want, rtol=0, atol=bound)
    assert os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("empty", "RuntimeError: no empty here"),
        ("two_shot", "RuntimeError: two_shot of torch.float32: 1 of 256 sums are wrong"),
    ],
)
def test_ranks_without_fast_sums_say_why_and_sum_as_the_library(monkeypatch, caplog, fault, why):
    with caplog.at_level(logging.WARNING):
        assert ranks(4, monkeypatch, lambda comm: comm.fast_sums(1024), fault) == [{}] * 4
    (said,) = caplog.records  # of rank 0 alone
    assert said.getMessage() == f"all-reduces of every size are NCCL's: {why}"


def test_a_second_engine_and_other_links_have_no_fast_sums(monkeypatch):
    behind = ranks(2, monkeypatch, lambda comm: comm.fast_sums(64), before=[1, 0])
    assert behind == [{}] * 2
    other = lambda one: Member(one._shared, one.rank, sizes=(4,)).fast_sums(64)  # noqa: E731
    assert ranks(2, monkeypatch, other) == [{}] * 2


def test_torchs_kernels_have_the_arguments_that_they_are_given():
    """They exist in every build of torch; only devices lack them."""
    wanted = {
        "one_shot_all_reduce": "(Tensor input, str reduce_op, str group_name) -> Tensor",
        "one_shot_all_reduce_copy": "(Tensor symm_buffer, Tensor local_input, str reduce_op, "
        "str group_name) -> Tensor",
        "two_shot_all_reduce_out": "(Tensor(a!) input, str reduce_op, str group_name, "
        "Tensor(b!) output) -> Tensor(b!)",
    }
    for name, schema in wanted.items():
        assert str(getattr(shared_memory._ops(), name).default._schema).endswith(schema)
