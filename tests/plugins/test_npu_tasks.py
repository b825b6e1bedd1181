"""Captured attention that takes lengths from the host, over stand-ins for torch-npu and its graphs.

A task that is not updated attends what the capture was told: the tests of the tests.
"""

from __future__ import annotations

import random
import sys
import types
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from vendor_doubles import RefusedError, device, install, torch_npu
from vendor_doubles.served import INDEXED, TRUE, Told, _errors, on_host

from ds_runtime import LLM, SamplingParams
from ds_runtime.api import hookimpl
from ds_runtime.ops.contract import Dims, Offers
from ds_runtime_bench import shapes
from ds_runtime_bench.checkpoints.checkpoint import make_checkpoint
from ds_runtime_kit.checks.captures import check_captures
from ds_runtime_kit.checks.conformance import TRUE_DIMS, facts_for
from ds_runtime_kit.models import tiny
from ds_runtime_npu import kernels, tasks
from ds_runtime_npu.platform import NpuPlatform

sys.path.append(str(Path(__file__).parents[1] / "e2e" / "plugins"))
import recorded

(DECODE,) = (k for k in kernels.ATTENTION if k.op.name == "mla_decode")
PROLOGUE = f"{__name__}:index_prologue"
# Prefills are not captured, and read what the host has.
KERNELS = [
    kernel
    for kernel in (*kernels.ATTENTION, *kernels.MOE, *kernels.TOPK, *kernels.LINEAR, *kernels.SMALL)
    if kernel.op.name not in ("mha_prefill", "cache_gather", "merge_state", "sparse_prefill")
]
PROLOG = Dims({**TRUE_DIMS, "hidden": 6144, "q_lora": 1536})
OFFERS = Offers(kernels.ATTENTION, (kernels.LATENT_SPLIT,))
SIZES, LENGTHS, NEW = (2, 4, 6), (61, 15, 31, 1, 3), 40  # new tokens: over two page boundaries each


class Double(NpuPlatform):
    """The plugin's own platform; its device computes on the host."""

    name = "double"
    score = -1

    def info(self, rank=0):
        return on_host("npu", "910b")

    def device(self, rank=0):
        return torch.device("cpu")


def plugin(name, **hooks):
    made = types.ModuleType(name)
    vars(made).update({name: hookimpl(hook) for name, hook in hooks.items()})
    return made


def of(hook, *names, fn=None):
    """Kernels in torch, for Triton's, which make no code for the host."""

    def offer(facts):
        found = (replace(k, refuse=lambda facts: None) for k in hook(facts))
        return [kernel if fn is None else replace(kernel, fn=fn) for kernel in found
                if kernel.op.name in names]  # fmt: skip

    return offer


def index_prologue(q, *rest):
    """Queries in the dtype that the lightning indexer reads."""
    queries, scale = recorded.index_prologue(q, *rest)
    return queries.to(q.dtype), scale.float()


PLATFORM = plugin("double", ds_platform=lambda: Double())


@pytest.fixture(autouse=True)
def doubles(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_npu", None)  # behind the tests it is absent again
    device.stand_in("npu", lambda o, n, v: monkeypatch.setattr(o, n, v, raising=False))
    package = sys.modules["torch_npu"]
    made = vars(torch_npu.MODULES["torch_npu"])
    vars(package).update({name: op for name, op in made.items() if "npu_" in name})
    install(monkeypatch, {"torch_npu": package}, torch_npu.ADAPTERS)
    device.CALLS.clear()
    yield
    device.QUEUE.clear()
    device.Group.open = device.Group.updated = None


def stale(monkeypatch):
    """Events are recorded, and tasks keep the lengths of the capture."""
    update = tasks._Replay._update

    def only_record(self, task):
        update(self, tasks.Task(task.event, task.handle, lambda: None))

    monkeypatch.setattr(tasks._Replay, "_update", only_record)


# ---- the kernel ----


def failures(page=16, dtype="bfloat16"):
    facts = facts_for(on_host("npu", "910b"), dtype, TRUE_DIMS, page)
    found = check_captures(DECODE, facts, Double().graph_backend(), OFFERS)
    assert len(found) >= 5
    return [r for r in found if not r.ok]


@pytest.mark.parametrize(("page", "dtype"), [(16, "bfloat16"), (128, "float16")])
def test_a_captured_call_serves_the_next_step(page, dtype):
    assert failures(page, dtype) == []
    assert device.CALLS["updates"] >= 5


def test_a_task_that_is_not_updated_is_found(monkeypatch):
    stale(monkeypatch)
    found = failures()
    assert found and all("other bits than a call" in r.failure for r in found)


def test_a_graph_of_others_is_refused():
    """It would attend the capture's lengths for ever."""
    facts = facts_for(on_host("npu", "910b"), "bfloat16", TRUE_DIMS, 16)
    found = check_captures(DECODE, facts, Double().graph_backend().graphs, OFFERS)
    said = "only the graphs of the platform npu tell a captured one those of the next step"
    assert any(said in r.failure for r in found)


# ---- the graphs ----


def fill(tensor, number):
    tensor.fill_(number)


def nothing():
    pass


fills, plain = partial(device.call, fill), partial(device.call, nothing)


def made(*numbers):
    """A backend, a replay whose tasks fill tensors with what the host holds, and both."""
    backend = Double().graph_backend()
    held, out = list(numbers), [torch.zeros(2) for _ in numbers]

    def run():
        for i, tensor in enumerate(out):
            tasks.capturing().add(lambda i=i, tensor=tensor: fills(tensor, held[i]))

    return backend, backend.capture(run), held, out


def test_a_replay_gives_every_task_its_number():
    _, replay, held, out = made(1, 2, 3)
    for held[:] in ([4, 5, 6], [7, 8, 9]):
        replay()
        assert [t.tolist() for t in out] == [[n] * 2 for n in held]
    assert device.CALLS["updates"] == 6 and device.CALLS["waits"] == 1
    assert tasks.capturing() is None


def test_a_replay_waits_for_the_last_one_of_its_graph_alone():
    """Its tasks and events are in use until then; those of another graph are others."""
    backend, replay, *_ = made(1)
    other = backend.capture(lambda: tasks.capturing().add(plain))
    for run, waits in ((replay, 0), (other, 0), (replay, 1), (other, 2)):
        run()
        assert device.CALLS["waits"] == waits


def test_a_graph_without_tasks_is_replayed_as_it_is():
    backend, x = Double().graph_backend(), torch.zeros(1)
    backend.capture(lambda: x.add_(1))()
    assert x.item() == 2 and device.CALLS["updates"] == device.CALLS["waits"] == 0


def test_an_update_that_fails_lets_the_device_go_on():
    _, replay, held, out = made(1, 2, 3)

    class Odd(Exception):
        pass

    def call():
        raise Odd

    first, second, third = replay._tasks
    replay._tasks[1] = tasks.Task(second.event, second.handle, call)
    held[:] = [4, 5, 6]
    with pytest.raises(Odd):
        replay()
    assert [t[0].item() for t in out] == [4, 2, 3] and not device.QUEUE
    assert device.Group.updated is None and third.handle.stream is first.handle.stream


def test_a_capture_that_fails_leaves_nothing_behind():
    backend, *_ = made(1)

    def run():
        tasks.capturing().add(lambda: 1 / 0)

    with pytest.raises((ZeroDivisionError, RefusedError)):
        backend.capture(run)
    assert tasks.capturing() is None and backend._tasks == []
    backend.capture(lambda: None)()


def test_ops_of_all_graphs_share_what_they_work_on():
    backend = Double().graph_backend()
    like = torch.zeros(6, 2, dtype=torch.bfloat16)
    wide, narrow = backend.scratch("q", like), backend.scratch("q", like[:3])
    assert wide.shape == (6, 2) and narrow.data_ptr() == wide.data_ptr() and len(narrow) == 3
    assert backend.scratch("k", like).data_ptr() != wide.data_ptr()
    assert backend.scratch("q", like.float()).dtype == torch.float32
    assert backend.largest("w", torch.zeros(5)) is backend.largest("w", torch.zeros(4))
    assert backend.largest("w", torch.zeros(6)).numel() == 6


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda npu, s, h: npu.graph_task_update_begin(h.stream, h), "on the current stream"),
        (lambda npu, s, h: npu.graph_task_group_begin(s), "the captured stream"),
        (lambda npu, s, h: npu.graph_task_group_end(s), "no task group is open"),
        (lambda npu, s, h: npu.graph_task_update_end(s), "no update is under way"),
        (lambda npu, s, h: npu.ExternalEvent().wait(s), "the captured stream"),
        (lambda npu, s, h: npu.synchronize(), "an event that nobody has recorded"),
    ],
)
def test_what_the_device_refuses(wrong, said):
    _, replay, *_ = made(1)
    npu, (task,) = torch.npu, replay._tasks
    stream = npu.Stream()
    replay._queue()  # without updates: it stops at the event
    with npu.stream(stream), pytest.raises(RefusedError, match=said):
        wrong(npu, stream, task.handle)
    with pytest.raises(RefusedError, match="an event that nobody has recorded"):
        replay._queue()
    with npu.stream(task.handle.stream), pytest.raises(RefusedError, match="another stream"):
        npu.graph_task_update_begin(task.handle.stream, task.handle)


# ---- engines ----


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return folder, tiny.write_tiny(folder, "v3", 3, **TRUE)


def served(folder, model=None, more=(), **settings):
    """Log-probabilities of an engine on the platform, its mean error, and its kernels."""
    given = {"platform": "double", "plugins": ("npu",), "threads": 1, "dtype": "bfloat16"}
    given |= {"context_length": 256, "kv_memory": "16MB", "page_size": 16}
    given |= {"max_running_requests": SIZES[-1], "chunked_prefill_size": 24}
    given |= {} if settings.get("disable_graph") else {"graph_sizes": SIZES}
    draw = random.Random(7)
    prompts = [[draw.randrange(130) for _ in range(n)] for n in LENGTHS]
    # Of several lengths, so that steps of all sizes come, with and without spare rows.
    params = [
        SamplingParams(max_tokens=NEW - 6 * i, logprobs=1, prompt_logprobs=1, ignore_eos=True)
        for i in range(len(LENGTHS))
    ]
    with LLM(str(folder), **given | settings, extra_plugins=[PLATFORM, *more]) as llm:
        outputs = llm.generate(prompts, params)
        found = {row.op: row.kernel for row in llm.plan.rows}
    answers = [[(e.token, e.logprob) for e in o.logprobs] for o in outputs]
    errors = [*_errors(model, outputs)] if model else [0.0]
    return answers, Told(sum(errors) / len(errors), found)


def test_captured_decode_answers_as_the_reference(checkpoint):
    """Steps with and without spare rows; most sequences grow over several pages."""
    folder, model = checkpoint
    _, told = served(folder, model)
    assert told.kernels["mla_decode"] == "npu.MlaDecode"
    assert device.CALLS["captures"] == len(SIZES) and device.CALLS["replays"] >= NEW - 1
    assert device.CALLS["updates"] == 2 * device.CALLS["replays"], "a task per layer"
    device.CALLS.clear()
    _, eager = served(folder, model, disable_graph=True)
    assert not device.CALLS["replays"]
    assert told.error < 0.055 and told.error < 1.05 * eager.error  # of bfloat16


def test_captured_decode_has_the_bits_of_eager_decode(checkpoint):
    """Where no row is spare: matmuls of other sizes round otherwise."""
    folder, _ = checkpoint
    captured, _ = served(folder, graph_sizes=(1, 2, 3, 4, 5))
    assert device.CALLS["updates"] >= 2 * (NEW - 1)
    assert captured == served(folder, disable_graph=True)[0]


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sparse")
    tiny.write_tiny(folder, "v32", 3, **INDEXED)
    return folder


def test_captured_sparse_decode_has_the_bits_of_eager_decode(sparse):
    """Its lengths are tensors: no task is updated."""
    offer = of(recorded.ds_attention, "index_prologue", fn=PROLOGUE)
    more = (plugin("recorded", ds_attention=offer),)
    keys = {"index_cache_dtype": "bfloat16"}  # as the plugin wishes on its own device
    captured, told = served(sparse, more=more, graph_sizes=(1, 2, 3, 4, 5), **keys)
    assert told.kernels["sparse_decode"] == "npu.sparse_mla"
    assert told.kernels["index_select"] == "npu.index_select"
    assert device.CALLS["replays"] >= NEW - 1 and not device.CALLS["updates"]
    assert captured == served(sparse, more=more, disable_graph=True, **keys)[0]


def test_lengths_of_the_capture_answer_otherwise(checkpoint, monkeypatch):
    folder, model = checkpoint
    wanted, eager = served(folder, model, disable_graph=True)
    stale(monkeypatch)
    found, told = served(folder, model)
    assert all(a[0] == b[0] for a, b in zip(found, wanted, strict=True)), "of the prefill"
    assert all(a[1:] != b[1:] for a, b in zip(found, wanted, strict=True))
    assert told.error > 4 * eager.error


def test_captured_drafts_and_their_verification(tmp_path, monkeypatch):
    """A verification, the draft layer behind it and its further runs: other lengths each."""
    raw = {**shapes.SHAPES["tiny-v3"], **TRUE, "num_nextn_predict_layers": 1}
    monkeypatch.setattr(shapes, "SHAPES", {**shapes.SHAPES, "tiny-v3": raw})
    make_checkpoint(tmp_path, "tiny-v3", "bfloat16")
    drafts = {"speculative_algorithm": "NEXTN", "speculative_num_steps": 3}
    more = (plugin("recorded", ds_ops=of(recorded.ds_ops, "sample", "logprobs")),)
    captured, told = served(tmp_path, more=more, **drafts)
    assert told.kernels["mla_decode"] == "npu.MlaDecode"
    assert device.CALLS["updates"] > device.CALLS["replays"] > 20
    eager, _ = served(tmp_path, more=more, **drafts, disable_graph=True)
    assert [[t for t, _ in a] for a in captured] == [[t for t, _ in a] for a in eager]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: f"{k.op.name}-{k.fn.partition(':')[2]}")
def test_every_kernel_of_captured_steps_is_captured(kernel):
    dims = PROLOG if kernel.op.name == "mla_inputs" else TRUE_DIMS
    facts = facts_for(on_host("npu", "910b"), "bfloat16", dims, 16)
    found = check_captures(kernel, facts, Double().graph_backend(), OFFERS)
    assert found and [r.failure for r in found if not r.ok] == []
