"""Triton's launches, recorded instead of run, and a platform on the CPU that says it is an H200.

What would be compiled is told by Triton's own specialisation of a launch's arguments. Results are
zeros. Not for a process in which Triton interprets.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget

from ds_runtime.api import DeviceInfo, MemoryInfo, Platform, compiled, hookimpl
from ds_runtime.ops.reference import sampling as reference
from ds_runtime_triton.kernels import SMALL

CORES = 132
COMPILED: dict[tuple[str, str], str] = {}  # (kernel, key of a compilation) → what it is made for
_CACHES: list[dict] = []
_NOTHING = SimpleNamespace(module=None, run=None)  # stands for a compiled kernel


class Driver:
    """Of one device of compute capability 9.0."""

    utils = SimpleNamespace(get_device_properties=lambda device: {"multiprocessor_count": CORES})

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def set_current_device(self, device):
        pass

    def get_current_stream(self, device):
        return 0


def _compile(*, key, fn, **told):
    types, fixed = told["compile"]["signature"], told["compile"]["constants"]
    names = list(types)
    at = {names[place[0]]: value for place, value in fixed.items()}
    divides = {names[place[0]] for place, some in told["compile"]["configs"][0].items() if some}
    said = (f"{n}={at.get(n, t)}{'/16' * (n in divides)}" for n, t in types.items())
    COMPILED[fn.name, str(key)] = (
        f"{fn.name}: {', '.join(said)}, warps={told['compile']['num_warps']}"
    )
    compiled("triton", fn.name, 0.0)
    cache = fn.jit_function.device_caches[0][0]
    cache[key] = _NOTHING
    _CACHES.append(cache)
    return True  # nothing is left to compile


def forget():
    """As if nothing had been compiled."""
    COMPILED.clear()
    while _CACHES:
        _CACHES.pop().clear()


@contextlib.contextmanager
def recording(zeroed=True):
    """Launches only leave their key in COMPILED, in this thread. zeroed: results are zeros."""
    triton.runtime.driver.set_active(Driver())
    knobs.runtime.jit_cache_hook = _compile
    from ds_runtime_triton.jit.entry import compiling
    from ds_runtime_triton.rehearsal import _Zeroed

    with compiling(), _Zeroed() if zeroed else contextlib.nullcontext():
        yield


class _Again:
    """GraphBackend whose replays run the step."""

    def capture(self, run):
        run()
        return run


class Described(Platform):
    name = "described"
    score = -1
    captures = captures_prefill = True

    def info(self, rank=0):
        fast = frozenset({"float32", "bfloat16", "float16", "float8_e4m3fn"})
        features = frozenset({"triton", "bf16", "fp8"})
        return DeviceInfo(
            "cpu", "recorded", "sm90", features=features, fast_dtypes=fast, cores=CORES
        )

    def device(self, rank=0):
        return torch.device("cpu")

    def memory(self, rank=0):
        return MemoryInfo(total=1 << 32, free=1 << 32)

    def graph_backend(self, rank=0):
        return _Again()


def mask_logits(logits, masks, which):
    """Triton's launch, and the result: what is drawn has to follow its grammar."""
    sampling().mask_logits(logits, masks, which)
    return reference.mask_logits(logits, masks, which)


def sample(logits, *settings):
    sampling().sample(logits, *settings)
    return logits.argmax(1)


def sampling():
    return import_module("ds_runtime_triton.sampling")


def _offer(op):
    return replace(
        next(k for k in SMALL if k.op.name == op), fn=f"launches:{op}", provider="launches", rank=90
    )


@hookimpl
def ds_platform():
    return Described()


@hookimpl
def ds_ops(facts):
    return [_offer("mask_logits"), _offer("sample")]
