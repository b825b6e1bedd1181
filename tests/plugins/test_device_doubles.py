"""Platforms' memory, graphs and groups over stand-ins: whole engines, and what devices refuse."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from vendor_doubles import RefusedError, device

from ds_runtime import LLM, SamplingParams
from ds_runtime.ops.binding.branch import branch
from ds_runtime.platform.graphs import TorchGraphs
from ds_runtime.platform.recording import CaptureError
from ds_runtime_kit.models import tiny
from rank_processes import run_ranks

SETTINGS = {
    "platform": "double",
    "plugins": (),
    "dtype": "float32",
    "kv_memory": "2MB",
    "threads": 1,
    "dist_timeout": 60,
    "max_running_requests": 4,
}
PROMPTS = [[7, 9, 30, 12], [100, 3, 5, 8, 120, 17, 4], [66]]
PARAMS = SamplingParams(max_tokens=9, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    tiny.write_tiny(folder, "v3", 3)
    return folder


@pytest.fixture(scope="module")
def expected(checkpoint):
    """Of the CPU's platform."""
    with LLM(checkpoint, **SETTINGS | {"platform": "cpu", "plugins": None}) as llm:
        return [o.token_ids for o in llm.generate(PROMPTS, PARAMS)]


@pytest.fixture(params=device.VENDORS)
def vendor(request, monkeypatch):
    monkeypatch.setenv("PLATFORM_DOUBLE", request.param)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setattr(torch, "stood_in", request.param, raising=False)
    device.stand_in(request.param, lambda o, n, v: monkeypatch.setattr(o, n, v, raising=False))
    device.CALLS.clear()
    yield request.param
    sys.modules.pop("platform_double", None)
    sys.modules.pop("torch_npu", None)


def served(checkpoint, **settings):
    import platform_double

    with LLM(checkpoint, **SETTINGS | settings, extra_plugins=[platform_double]) as llm:
        return [o.token_ids for o in llm.generate(PROMPTS, PARAMS)]


def test_captured_steps_answer_as_eager_ones(vendor, checkpoint, expected):
    assert served(checkpoint) == expected
    assert device.CALLS["captures"] >= 3 and device.CALLS["replays"] >= 8
    assert device.CALLS["set_device"] == 1


def test_captured_steps_fork_where_shared_experts_are_apart(vendor, checkpoint, expected):
    assert served(checkpoint, fusion=("shared_experts=off",)) == expected
    assert bool(device.CALLS["forks"]) == (vendor == "cuda"), "beside routing"


def test_two_ranks_answer_as_one(vendor, checkpoint, expected):
    assert served(checkpoint, tp=2, disable_graph=True) == expected
    assert device.CALLS["joined"] == 1 and device.CALLS["all_reduce"] > 20


def platform(vendor):
    import platform_double

    assert vendor == platform_double.VENDOR
    return platform_double.Double()


def test_memory_is_what_torch_says_once_it_has_the_device(vendor):
    found = platform(vendor).memory()
    assert (found.free, found.total) == (device.FREE, device.TOTAL)


def graphs(backend):
    """Those of torch: a platform may have its own around them."""
    found = getattr(backend, "graphs", backend)
    assert isinstance(found, TorchGraphs)
    return found


def test_a_capture_shares_the_pool_of_those_that_live(vendor):
    backend = platform(vendor).graph_backend()
    x = torch.zeros(3)
    first = backend.capture(lambda: x.add_(1))
    second = backend.capture(lambda: x.mul_(2))
    for replay in (first, second, first):
        replay()
    assert x.tolist() == [7.0] * 3, "captured: 2, replayed: 3, 6, 7"
    assert len({graph.number for graph in graphs(backend)._graphs}) == 1
    del first, second, replay
    backend.capture(lambda: x.zero_())  # another pool: the one before has ended


def test_a_capture_holds_branches_beside_what_follows(vendor):
    made, asked = platform(vendor), []
    module, graph, _ = device.VENDORS[vendor]
    backend = TorchGraphs(getattr(torch, module), graph, torch.device("cpu"), branches=True)
    x, y = torch.ones(2), torch.zeros(2)

    def twice():
        asked.append(device.Graph.current)
        return x * 2

    def run():
        later = branch(twice)
        y.copy_(x + 1)
        y.add_(later())

    run()
    assert y.tolist() == [4.0, 4.0] and asked == [None], "what is not captured has no other stream"
    replay = backend.capture(run)
    assert asked[1] not in (None, backend._stream)
    x.fill_(5)
    replay()
    assert y.tolist() == [16.0, 16.0]
    if vendor != "npu":  # whose captures have another stand-in
        with pytest.raises(RefusedError, match="work that was not joined"):
            backend.capture(lambda: branch(twice) and None)

        def first_alone():
            first, _ = branch(twice), branch(twice)
            y.copy_(first())

        with pytest.raises(RefusedError, match="work that was not joined"):
            backend.capture(first_alone)
        kept = []

        def keeps():
            kept.append(branch(twice))
            branch(twice)()

        backend.capture(keeps)
        with pytest.raises(RefusedError, match="an event of the capture that is under way"):
            backend.capture(lambda: y.copy_(kept[0]()))

    def failing():
        branch(twice)
        raise MemoryError("of the experts")

    with pytest.raises(MemoryError, match="of the experts"):  # and not that work was not joined
        backend.capture(failing)
    with pytest.raises(ZeroDivisionError):
        backend.capture(lambda: branch(lambda: 1 // 0)())
    run()
    assert asked[-1] is None, "nothing is left behind"
    assert made.branches == (vendor == "cuda"), "where it was measured"


def test_what_a_device_refuses_in_a_capture_reaches_the_engine(vendor):
    made = platform(vendor)
    backend, x = made.graph_backend(), torch.ones(2)
    graph = graphs(backend)._graph
    with pytest.raises(CaptureError, match="waits for the device"):
        backend.capture(lambda: x.sum().item())
    with pytest.raises(RefusedError, match="not permitted while a stream is captured"):
        backend.capture(made.synchronize)
    with pytest.raises(RefusedError, match="a capture is under way already"):
        backend.capture(lambda: graph().capture_begin())
    with pytest.raises(RefusedError, match="must be captured on a non-default stream"):
        graph().capture_begin()
    with pytest.raises(RefusedError, match="replay of a graph that is not captured"):
        graph().replay()
    with pytest.raises(TypeError, match="unexpected keyword argument 'pools'"):
        graph().capture_begin(pools=None)
    backend.capture(lambda: None)()  # nothing is left behind


def rank(number, size, address, vendor):
    device.stand_in(vendor)
    torch.stood_in = vendor
    made = platform(vendor)
    group = made.communicator(number, size, address, 60.0)
    found = [group.all_reduce(torch.ones(2, 3).T).tolist()]
    found.append(group.all_gather(torch.tensor([[float(number)]])).tolist())
    found.append(group.gather_objects(number))
    refused = []
    for x in (torch.ones(2, dtype=torch.int16), torch.ones(2, 3).T):
        with pytest.raises(RefusedError) as caught:
            dist.all_reduce(x)
        refused.append(str(caught.value))
    group.close()
    made.local_rank = 5  # of both
    with pytest.raises(RefusedError) as caught:
        made.communicator(number, size, address + "-again", 60.0)
    return found, [*refused, str(caught.value)]


def test_ranks_exchange_through_the_vendors_group(vendor, tmp_path):
    wanted = device.VENDORS[vendor][2]
    for (summed, gathered, objects), refused in run_ranks(rank, 2, tmp_path, vendor):
        assert summed == [[2.0, 2.0]] * 3 and gathered == [[0.0, 1.0]] and objects == [0, 1]
        assert refused[0] == f"{wanted} does not sum torch.int16"
        assert refused[1:] == ["tensors must be contiguous", "duplicate device: ranks have [5, 5]"]


def test_a_group_of_another_backend_is_refused(vendor, monkeypatch):
    made = platform(vendor)
    monkeypatch.setattr(type(made), "collectives", "gloo")
    with pytest.raises(RefusedError, match=r"is joined by .ccl, not gloo"):
        made.communicator(0, 2, "file:///nowhere", 1.0)
