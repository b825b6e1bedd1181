"""`ds-runtime conform --ranks N`: each operation of groups in real processes, each fault found."""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from types import SimpleNamespace

import pytest
import torch

from ds_runtime.cli import main
from ds_runtime.ops.reference import norm
from ds_runtime_cpu.platform import CpuPlatform
from ds_runtime_kit.ranks.checks import FLOATS
from ds_runtime_kit.ranks.optional import NONE
from ds_runtime_kit.ranks.questions import GROUP_OPS, OPTIONAL, _cases
from ds_runtime_kit.ranks.runs import RankResult, as_lines


def expected(op, size):
    """Cases of one operation of a group of Gloo, which has none of those that a plugin brings."""
    late = (f"rank {rank} late" for rank in (0, size - 1))
    shapes = ("(1, 8)", "(7, 33)", "(32, 7168)")
    if op in ("barrier", "gather_objects"):
        return ["plain", *late]
    if op in ("ordered_sum", "fast_sums", "normed_sum", "gather_logits"):
        return ["none here"]
    sums = op in ("all_reduce", "reduce_scatter", "all_reduce_async")
    dtypes = ("float32", "bfloat16", "float16", *(() if sums else ("int64", "uint8")))
    plain = [f"{dtype} {shape}" for dtype in dtypes for shape in shapes]
    plain += [f"{dtype} whole numbers" for dtype in dtypes] if sums else []
    if op == "all_reduce_async":
        return [*plain, "a rank late"]
    empty = (f"rank {rank} empty" for rank in (0, size - 1))
    none = () if op == "gather_rows" else ("no rows",)  # which has one at least
    return [*plain, *late, *empty, "strided", *none]


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_operation_over_gloo(capsys, size):
    assert main(["conform", "--ranks", str(size), "--platform", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert not [one for one in found if one["failure"]]
    groups = {one["group"] for one in found}
    more = {f"attn_tp {size // 2} of {size}", f"attn_dp 2 of {size}"} if size > 2 else set()
    assert groups == {f"all {size}", f"all {size}, split", *more}
    dead = [one for one in found if one["case"] == "a dead rank"]
    asked = Counter((one["op"], one["group"], one["case"]) for one in found if one not in dead)
    assert asked == Counter(
        (op, group, case)
        for group in groups
        for op in (*GROUP_OPS, *OPTIONAL)
        for case in expected(op, int(re.search(r"(\d+)( of \d+)?", group)[1]))
    )
    assert [one["op"] for one in found if one["case"] == "a dead rank"] == ["all_reduce"]


class Threads:
    """Ranks that are threads; `fault` names what their communicators do wrong."""

    def __init__(self, fault, size=2):
        self.fault, self.size = fault, size
        self.values = [None] * size
        self.barrier = threading.Barrier(size, timeout=20)

    def exchange(self, rank, value):
        self.values[rank] = value
        self.barrier.wait()
        values = list(self.values)
        self.barrier.wait()
        return values


class Thread:
    def __init__(self, group, rank):
        self.group, self.rank, self.fault, self.size = group, rank, group.fault, group.size
        if group.fault != "no such sum":
            self.all_reduce_async = self._started

    def _wrong(self, *names):
        return self.fault in names

    def all_reduce(self, x):
        found = self._sum(self.group.exchange(self.rank, x))
        if self._wrong("bits differ") and self.rank and found.numel():
            found.view(-1)[0] = torch.nextafter(found.view(-1)[0], torch.tensor(9e9).to(x.dtype))
        return found.float() if self._wrong("another dtype") else found

    def _sum(self, xs):
        if self._wrong("a rank is left out"):
            xs = xs[:-1]
        if self._wrong("in e4m3"):
            xs = [x.to(torch.float8_e4m3fn).to(x.dtype) for x in xs]
        found = torch.stack(xs).float().sum(0).to(xs[0].dtype)
        return found * (found.abs() >= 2**-4) if self._wrong("small sums are 0") else found

    def _started(self, x):
        xs = [y.clone() for y in self.group.exchange(self.rank, x)]
        self.group.barrier.wait()
        found = self._sum([xs[0], xs[0]] if self._wrong("one part twice") else xs)
        if self._wrong("ranks disagree") and self.rank:
            found.view(-1)[0] = torch.nextafter(found.view(-1)[0], torch.tensor(9e9).to(x.dtype))
        if self._wrong("the one before"):
            self.started = getattr(self, "started", found)
            self.started, found = found, self.started
        return lambda: found.float() if self._wrong("in float32") else found

    def reduce_scatter(self, x):
        total = self._sum(self.group.exchange(self.rank, x))
        mine = 1 - self.rank if self._wrong("the part of another") else self.rank
        return total.tensor_split(self.size)[mine]

    def all_gather(self, x):
        xs = self.group.exchange(self.rank, x)
        return torch.cat(xs, 0 if self._wrong("another dimension") else -1)

    def gather_rows(self, x):
        xs = self.group.exchange(self.rank, x)
        return torch.cat(xs[::-1] if self._wrong("another order") else xs)

    def all_to_all(self, x):
        xs = self.group.exchange(self.rank, x)
        if self._wrong("nothing moves"):
            return x
        return torch.cat([y.tensor_split(2)[self.rank] for y in xs])

    def broadcast(self, x, source):
        return self.group.exchange(self.rank, x)[0 if self._wrong("one source") else source]

    def send(self, x, to):
        self.group.exchange(self.rank, x)

    def receive(self, shape, dtype, source):
        got = self.group.exchange(self.rank, None)[source]
        return torch.zeros_like(got) if self._wrong("lost") else got

    def barrier(self):
        if not self._wrong("no wait"):
            self.group.barrier.wait()

    def ordered_sum(self, values):
        if self._wrong("no such sum"):
            return None

        def add(x):
            xs = [y.reshape(-1) for y in self.group.exchange(self.rank, x)]
            if self._wrong("in its own dtype"):
                return (xs[0] + xs[1]).float()
            found = xs[0].float() + xs[1].float()
            return found.view(x.shape) if self._wrong("as it came") else found

        return add

    def fast_sums(self, nbytes):
        if self._wrong("no such sum"):
            return {}
        return dict.fromkeys(("one_shot", "two_shot"), self.add)

    def normed_sum(self, nbytes):
        return None if self._wrong("no such sum") else Normed(self)

    def gather_logits(self, nbytes):
        return None if self._wrong("no such sum") else self._side_by_side

    def _side_by_side(self, x, out):
        xs = [y.clone() for y in self.group.exchange(self.rank, x)]
        self.group.barrier.wait()
        if self._wrong("the other order"):
            xs.reverse()
        found = torch.cat(xs, 1).float()[:, : out.shape[1]]
        if self._wrong("one column late"):
            found = found.roll(1, 1)
        if self._wrong("own part alone"):
            found = torch.cat([x, x], 1).float()[:, : out.shape[1]]
        out.copy_(found)
        if self._wrong("in place"):
            x.add_(1)
        if self._wrong("beyond out") and out.numel():
            torch.as_strided(out, (1,), (1,), out.storage_offset() + out.numel()).fill_(0)

    def add(self, x):
        assert x.is_contiguous()
        xs = self.group.exchange(self.rank, x)
        found = self._sum(xs)
        if self._wrong("one part twice"):
            found = xs[0] + xs[0]
        elif self._wrong("ranks disagree") and self.rank:
            found.view(-1)[0] = torch.nextafter(found.view(-1)[0], torch.tensor(9e9).to(x.dtype))
        elif self._wrong("in float32"):
            found = found.float()
        elif self._wrong("flat"):
            found = found.view(-1)
        self.group.barrier.wait()
        if self._wrong("in place"):
            x.copy_(found)
        return found

    def gather_objects(self, value):
        values = self.group.exchange(self.rank, value)
        return [value] * 2 if self._wrong("own twice") else values


class Normed:
    """Sums of a thread with their norm."""

    def __init__(self, comm):
        self.comm = comm

    def __call__(self, x, residual, weight, eps):
        wrong, total = self.comm._wrong, self._total(x)
        normed, summed = norm.add_rms_norm(total, residual, weight, eps)
        if wrong("the sum alone"):
            return normed, total
        if wrong("a norm of the sum alone"):
            return norm.rms_norm(total, weight, eps), summed
        if wrong("in place"):
            x.copy_(summed)
        if wrong("in float32"):
            return normed.float(), summed
        if wrong("ranks disagree") and self.comm.rank and normed.numel():
            normed.view(torch.int16).view(-1)[0] += 1
        return normed, summed

    def quantized(self, x, residual, weight, eps, ue8m0):
        total = self._total(x)
        powers = ue8m0 and not self.comm._wrong("scales of any size")
        given = weight * 2 if self.comm._wrong("twice as large") else weight
        made = norm.add_rms_norm_quantize(total, residual, given, eps, 128, powers)
        return made[0], made[1].half() if self.comm._wrong("half scales") else made[1], made[2]

    def _total(self, x):
        xs = [y.clone() for y in self.comm.group.exchange(self.comm.rank, x)]
        self.comm.group.barrier.wait()
        return (xs[0].float() + xs[not self.comm._wrong("one part twice")].float()).to(x.dtype)


FAST = ("one part twice", "ranks disagree", "in float32", "flat", "in place")
NORMED = (
    *FAST[:3],
    "in place",
    "the sum alone",
    "a norm of the sum alone",
    "scales of any size",
    "twice as large",
    "half scales",
)
GATHERED = ("the other order", "one column late", "own part alone", "in place", "beyond out")


@cache
def failures(op, fault, size=2):
    """(case, what is wrong) of all ranks. Raises what a rank raises: nothing was found by that."""
    group = Threads(fault, size)

    def work(rank):
        try:
            asked = _cases(CpuPlatform(), Thread(group, rank), op)
            return [(case, run()) for case, run in asked]
        except BaseException:
            group.barrier.abort()  # nobody waits for this one
            raise

    with ThreadPoolExecutor(size) as pool:
        ranks = [pool.submit(work, rank) for rank in range(size)]
    errors = [e for rank in ranks if (e := rank.exception()) is not None]
    # Those that the first one has left alone say so, and not why.
    for e in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
        raise e
    return [(case, said) for rank in ranks for case, said in rank.result() if said]


@pytest.mark.parametrize(
    ("op", "fault"),
    [
        ("all_reduce", "a rank is left out"),
        ("all_reduce", "bits differ"),
        ("all_reduce", "another dtype"),
        ("reduce_scatter", "the part of another"),
        ("all_gather", "another dimension"),
        ("gather_rows", "another order"),
        ("all_to_all", "nothing moves"),
        ("broadcast", "one source"),
        ("send_receive", "lost"),
        ("barrier", "no wait"),
        ("gather_objects", "own twice"),
        ("ordered_sum", "in its own dtype"),
        ("ordered_sum", "as it came"),
        *(("all_reduce_async", fault) for fault in (*FAST[:3], "the one before")),
        *(("fast_sums", fault) for fault in FAST),
        *(("normed_sum", fault) for fault in NORMED),
        *(("gather_logits", fault) for fault in GATHERED),
    ],
)
def test_a_wrong_communicator_is_found(op, fault):
    assert failures(op, None) == []
    assert failures(op, fault)


def test_what_a_rank_raises_is_no_answer(monkeypatch):
    def broken(self, x):
        raise ValueError("broken")

    monkeypatch.setattr(Thread, "all_gather", broken)
    with pytest.raises(ValueError, match="broken"):
        failures.__wrapped__("all_gather", None)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow), 8])
@pytest.mark.parametrize("fault", ["a rank is left out", "in e4m3", "small sums are 0"])
@pytest.mark.parametrize("op", ["all_reduce", "reduce_scatter", "all_reduce_async"])
def test_wrong_sums_of_any_number_of_ranks_are_found_in_every_dtype(op, fault, size):
    assert failures(op, None, size) == []
    found = [case for case, said in failures(op, fault, size) if " off: at " in said]
    assert {case.split()[0] for case in found} >= {*FLOATS}


@pytest.mark.parametrize("fault", ["a rank is left out", "in e4m3", "small sums are 0"])
def test_wrong_fast_sums_are_found_in_every_dtype(fault):
    found = [case for case, said in failures("fast_sums", fault) if " off: at " in said]
    assert {tuple(case.split()[:2]) for case in found} >= {
        *itertools.product(("one_shot", "two_shot"), FLOATS[:2])
    }


@pytest.mark.parametrize("op", OPTIONAL)
def test_a_communicator_may_have_the_librarys_sum_alone(op):
    ((case, run),) = _cases(CpuPlatform(), Thread(Threads("no such sum"), 0), op)
    assert case == "none here" and run() == ""
    ((case, run),) = _cases(CpuPlatform(), SimpleNamespace(size=2), op)  # without the method
    assert case == "none here" and run() == ""


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("op", OPTIONAL)
def test_what_a_platform_promises_is_set_up(op, size):
    """Named for 2 ranks over one link alone. Kernels of their own may need a newer device."""
    comm, platform = Thread(Threads("no such sum", size), 0), CpuPlatform()
    table = {"ordered_sum": "ordered_sums", "all_reduce_async": None}.get(op, "fast_sums")
    for link, named in ((platform.info().link, (2,)), ("another", (2, 4))):
        setattr(platform, table or "fast_sums", {link: named})
        ((case, run),) = _cases(platform, comm, op)
        promised = size == 2 and link != "another" and table is not None
        if promised and op in ("ordered_sum", "fast_sums"):
            assert f"{table} of platform cpu names 2 ranks" in run()
            assert run().endswith(", and nothing was set up")
        else:
            assert run() == ""
            assert ("though fast_sums of platform cpu names 2 ranks" in case) == promised


@pytest.mark.parametrize("most", [2, 1024])
def test_lines_have_columns(most):
    """Whatever the longest operation and the longest group are called."""
    groups = ("all 2", f"attn_tp {most // 2} of {most}")
    ops = (*GROUP_OPS, *OPTIONAL)
    found = [RankResult(op, group, NONE) for op in ops for group in groups]
    lines = as_lines(found)
    assert len({line.index("  none here") for line in lines}) == 1
    rows = [re.split(" {2,}", line) for line in lines]
    assert [(op, group) for op, group, _ in rows] == [(op, g) for op in ops for g in groups]
    assert as_lines([]) == []


PLUGIN = """
import ctypes, os, time
from ds_runtime.api import TorchCommunicator, hookimpl
from ds_runtime_cpu.platform import CpuPlatform

class Odd(TorchCommunicator):
    def all_reduce(self, x):
        try:
            return super().all_reduce(x)
        except RuntimeError:
            fault = os.environ["ODD"]
            if fault == "gives a sum":
                return x
            wait = (ctypes.PyDLL if fault == "holds the lock" else ctypes.CDLL)(None).sleep
            while fault in ("waits", "holds the lock"):
                wait(3600)
            raise

    def broadcast(self, x, source):
        fault, odd = os.environ["ODD"], self.rank and tuple(x.shape) == (7, 33)
        if fault == "leaves" and odd:
            os._exit(3)
        while fault == "hangs" and odd:
            time.sleep(1)
        return super().broadcast(x, source)

class Platform(CpuPlatform):
    name = "odd"
    def communicator(self, rank, size, init_method, timeout=600.0):
        limit = 5.0 if os.environ["ODD"] == "leaves" else timeout
        return Odd("gloo", rank, size, init_method, limit)

@hookimpl
def ds_platform():
    return Platform()
"""
INFO = {
    "METADATA": "Metadata-Version: 2.1\nName: odd-ranks\nVersion: 1\n",
    "entry_points.txt": "[ds_runtime]\nodd = odd_ranks\n",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "case", "failure", "note"),
    [
        ("none", "a dead rank", "", ""),
        ("waits", "a dead rank", "", "rank 0 waited for ever, and was ended"),
        ("holds the lock", "a dead rank", "rank 0 had not ended 10 s after rank 1 was dead", ""),
        ("gives a sum", "a dead rank", "rank 0 got a sum although rank 1 was dead", ""),
        ("hangs", "float32 (7, 33)", "rank [01]: has not returned after 15 s without a word", ""),
        ("leaves", "float32 (7, 33)", "rank 1: its process has ended \\(exit code 3\\)", ""),
    ],
)
def test_what_hangs_or_ends_is_told(tmp_path, monkeypatch, fault, case, failure, note):
    from ds_runtime_kit.ranks import runs

    info = tmp_path / "odd_ranks-1.dist-info"
    info.mkdir()
    for name, text in INFO.items():
        (info / name).write_text(text)
    (tmp_path / "odd_ranks.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("ODD", fault)
    monkeypatch.setattr(runs, "_QUIET", 15.0)
    found = {(r.op, r.case): r for r in runs.check_ranks("odd", ["odd", "cpu"], 2)}
    wrong = {key: r for key, r in found.items() if r.failure}
    op = "all_reduce" if case == "a dead rank" else "broadcast"
    assert re.match(failure or "$", found[op, case].failure) and found[op, case].note == note
    assert set(wrong) == ({(op, case)} if failure else set())
    lines = runs.as_lines(list(found.values()))
    assert not note or f"  {case}: {note}" in lines
