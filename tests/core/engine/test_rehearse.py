"""First runs in which kernels compile side by side: what enters them, and that nothing stays."""

from __future__ import annotations

import sys
import types
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from ds_runtime.engine.capture.recorder import Recorder, rehearsing
from ds_runtime.ops.contract import DeviceInfo, Kernel
from ds_runtime.ops.kernel import Compiles
from ds_runtime.ops.table import OPS
from ds_runtime_kit.checks.conformance import facts_for

FACTS = facts_for(DeviceInfo("cpu", "host", "any"), "bfloat16")


@pytest.fixture
def contexts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A module with contexts that work, and one that does not; what was entered and left."""
    seen = list[str]()

    def named(name: str, works: bool):
        @contextmanager
        def context():
            seen.append(f"+{name}")
            yield works
            seen.append(f"-{name}")

        return context

    module = types.ModuleType("rehearsals")
    module.a, module.b, module.idle = named("a", True), named("b", True), named("idle", False)
    monkeypatch.setitem(sys.modules, "rehearsals", module)
    return seen


def bound(*paths: str) -> SimpleNamespace:
    kernels = [
        (Kernel(OPS["linear"], "m:k", "me", compiles=Compiles(rehearsal=path)), FACTS)
        for path in paths
    ]
    return SimpleNamespace(kernels=lambda: iter(kernels))


def test_every_context_is_entered_once(contexts):
    with rehearsing(bound("rehearsals:a", "", "rehearsals:b", "rehearsals:a")) as anything:
        assert anything and contexts == ["+a", "+b"]
    assert contexts == ["+a", "+b", "-b", "-a"]


@pytest.mark.parametrize("paths", [(), ("",), ("rehearsals:idle",)])
def test_there_may_be_nothing_to_rehearse(contexts, paths):
    with rehearsing(bound(*paths)) as anything:
        assert not anything


def test_one_that_works_is_enough(contexts):
    with rehearsing(bound("rehearsals:idle", "rehearsals:b")) as anything:
        assert anything


def test_what_is_rehearsed_is_not_recorded():
    calls = list[int]()
    replay = Recorder(None).record(lambda: calls.append(1), "a step")
    assert calls == [1]
    replay()
    assert calls == [1, 1]


def test_results_that_no_kernel_writes_are_zeros():
    """What torch leaves unwritten is NaN here, and as large as it can be for integers."""
    pytest.importorskip("triton")
    from ds_runtime_triton.rehearsal import _Zeroed

    torch.use_deterministic_algorithms(True)
    try:
        like = torch.ones(3, 4)
        assert torch.empty(2).isnan().all()
        with torch.inference_mode(), _Zeroed():
            made = (
                torch.empty(2, 3),
                torch.empty((5,), dtype=torch.int64),
                torch.empty(4, 4, dtype=torch.float8_e4m3fn),
                torch.empty_like(like),
                torch.empty_like(like, dtype=torch.int32),
                torch.empty_strided((2, 2), (1, 2)),
                like.new_empty(7),
                like.new_empty((2, 2), dtype=torch.uint8),
                like.new_empty_strided((2, 2), (1, 2)),
            )
        assert not any(t.float().any() for t in made)
        assert torch.empty(2).isnan().all()
    finally:
        torch.use_deterministic_algorithms(False)


def test_launches_compile_and_do_not_run(monkeypatch):
    pytest.importorskip("triton")
    from ds_runtime_triton.jit import entry

    calls = list[tuple[str, tuple[int, ...], dict]]()

    class Compiled:
        def __getitem__(self, grid):
            return lambda *args, **kwargs: calls.append(("launch", args, kwargs))

        def run(self, *args, grid, **kwargs):
            calls.append(("run", args, {"grid": grid, **kwargs}))

    monkeypatch.setattr(entry, "_options", lambda: {"PDL": 0})
    kernel = entry.Entry.__new__(entry.Entry)
    kernel.compiled = Compiled()
    with pytest.raises(KeyError), entry.compiling():
        kernel[(3, 1)](1, 2, BLOCK=4)
        raise KeyError
    kernel[(3, 1)](1, 2, BLOCK=4)
    assert calls == [
        ("run", (1, 2), {"grid": (3, 1), "warmup": True, "BLOCK": 4, "PDL": 0}),
        ("launch", (1, 2), {"BLOCK": 4, "PDL": 0}),
    ]


class _Refused:
    """A compiled kernel as Triton has it, which the device does not load."""

    def __init__(self, module: object) -> None:
        self.module, self._run = module, "a launcher"

    @property
    def run(self) -> str:
        raise RuntimeError("out of resources")


@pytest.mark.parametrize("module", [None, "loaded"])
def test_a_launcher_without_a_function_is_not_kept(module):
    pytest.importorskip("triton")
    from ds_runtime_triton.rehearsal import _ready

    kernel = _ready(_Refused, module)
    assert kernel._run == (None if module is None else "a launcher"), "loaded again, or refused"
