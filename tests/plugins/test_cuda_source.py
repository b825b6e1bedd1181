"""The CUDA plugin's own kernels: they compile for the device that they are for, and are kept."""

from __future__ import annotations

import ctypes
import re
from importlib.resources import files
from types import SimpleNamespace

import pytest
import torch

from ds_runtime.errors import PluginError
from ds_runtime_cuda import (
    attention,
    experts_streaming,
    fp8_compressed,
    fp8_few,
    gather_logits,
    grouped_fp8,
    normed_sum,
    nvrtc,
)
from ds_runtime_cuda.driver import DriverError
from ds_runtime_cuda.packed12 import experts as token_experts
from ds_runtime_cuda.packed12 import format as packed12
from ds_runtime_cuda.packed12 import linear


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    monkeypatch.setattr(nvrtc, "folder", lambda: tmp_path / "kept")
    return tmp_path / "kept"


def whole(code: bytes) -> bool:
    """Machine code of all three kernels; no two compilations give the same bytes."""
    named = all(name in code for name in (b"arrange", b"experts", b"combine"))
    return code.startswith(b"\x7fELF") and named


FORMS = [form for each in experts_streaming._FORMS.values() for form in each.values()]


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_experts_compile(home, form):
    code = nvrtc.compile_for("sm_90a", "experts_streaming.cu", experts_streaming._defines(form))
    assert whole(code)
    (kept,) = home.iterdir()
    assert whole(kept.read_bytes())
    again = nvrtc._MAGIC + b" as it was"
    kept.write_bytes(again)
    assert (
        nvrtc.compile_for("sm_90a", "experts_streaming.cu", experts_streaming._defines(form))
        == again
    )
    assert (
        nvrtc.compile_for(
            "sm_90a", "experts_streaming.cu", experts_streaming._defines(form), anew=True
        )
        != again
    )
    for torn in (b"", b"garbage"):
        kept.write_bytes(torn)
        assert whole(
            nvrtc.compile_for("sm_90a", "experts_streaming.cu", experts_streaming._defines(form))
        )
        assert whole(kept.read_bytes())


def test_attention_compiles(home):
    code = nvrtc.compile_for("sm_90a", "attention.cu", attention._defines())
    assert code.startswith(b"\x7fELF") and b"attention" in code


def test_grouped_experts_compile(home):
    code = nvrtc.compile_for("sm_90a", "grouped.cu", grouped_fp8._defines())
    assert code.startswith(b"\x7fELF") and b"gate_up" in code and b"down" in code


def test_kernels_of_fewer_bits_compile(home):
    tiles = {*linear._TILES, *linear._UNEVEN.values()}
    made = [("packed12_linear.cu", linear._defines(tile), (b"linear",)) for tile in tiles]
    size = {"ARGS": ctypes.sizeof(packed12._Packed12Args)}
    made += [("packed12.cu", size, (b"count", b"encode"))]
    made += [("fp8_compressed.cu", fp8_compressed.defines(), (b"measure", b"encode"))]
    made += [("packed12_linear_few.cu", linear.few_defines(), (b"few",))]
    made += [("fp8_few.cu", fp8_few.defines(ahead), (b"fp8_few",)) for ahead in (2, 3, 4)]
    made += [("packed12_experts.cu", token_experts.defines(), (b"gate_up", b"down"))]
    for source, defines, names in made:
        code = nvrtc.compile_for("sm_90a", source, defines)
        assert code.startswith(b"\x7fELF") and all(name in code for name in names)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(
    "of", [normed_sum.KERNELS, gather_logits.KERNELS], ids=lambda of: of.source
)
def test_kernels_of_several_ranks_compile(home, of, ranks):
    code = nvrtc.compile_for("sm_90a", of.source, of.defines(ranks))
    assert code.startswith(b"\x7fELF") and all(name.encode() in code for name in of.names)


def test_another_header_is_compiled_anew(home):
    options, source = ("--gpu-architecture=sm_90a",), '#include "a.cuh"\n__global__ void f() {N;}'
    for text in ("#define N", "#define N return", "#define N"):
        assert nvrtc.compiled(source, {"a.cuh": text}, options)[:4] == b"\x7fELF"
    assert len(list(home.iterdir())) == 2


def test_another_layout_of_the_arguments_does_not_compile():
    defines = {**experts_streaming._defines(FORMS[0]), "ARGS": 640}
    with pytest.raises(DriverError, match="as the caller lays them out"):
        nvrtc.compile_for("sm_90a", "experts_streaming.cu", defines)


def test_without_a_folder_to_keep_it_is_compiled_all_the_same(home):
    home.write_text("a file is in its place")
    options = ("--gpu-architecture=sm_90a",)
    assert nvrtc.compiled("__global__ void nothing() {}", {}, options)[:4] == b"\x7fELF"


def no_home():
    raise RuntimeError("Could not determine home directory.")


def test_without_a_home_it_is_compiled_all_the_same(monkeypatch):
    monkeypatch.setattr(nvrtc, "folder", no_home)
    options = ("--gpu-architecture=sm_90a",)
    assert nvrtc.compiled("__global__ void nothing() {}", {}, options)[:4] == b"\x7fELF"


class Damaged:
    """A driver that loads nothing of the bytes `b"\\x7fELF damaged"`."""

    class Code(int):
        name = "CUDA_ERROR_INVALID_IMAGE"

    @classmethod
    def cuModuleLoadData(cls, code):
        return (cls.Code(200),) if code.endswith(b"damaged") else (cls.Code(0), "loaded")


def test_what_was_kept_and_does_not_load_is_made_again(home, monkeypatch):
    _, compiler = nvrtc._library()
    monkeypatch.setattr(nvrtc, "_library", lambda: (Damaged, compiler))
    monkeypatch.setattr(nvrtc.torch.cuda, "get_device_capability", lambda: (9, 0))
    nvrtc.compile_for_device("experts_streaming.cu", experts_streaming._defines(FORMS[0]))
    (kept,) = home.iterdir()
    kept.write_bytes(b"\x7fELF damaged")
    nvrtc.Module("experts_streaming.cu", experts_streaming._defines(FORMS[0]))
    assert whole(kept.read_bytes())


def test_a_kernel_that_cannot_be_loaded_says_what_runs_without(monkeypatch):
    experts_streaming._module.cache_clear()
    grouped_fp8._module.cache_clear()
    monkeypatch.setattr(nvrtc, "compiled", lambda *given: b"\x7fELF damaged")
    monkeypatch.setattr(nvrtc, "_library", lambda: (Damaged, None))
    monkeypatch.setattr(nvrtc.torch.cuda, "get_device_capability", lambda: (9, 0))
    with pytest.raises(PluginError, match=r"CUDA_ERROR_INVALID_IMAGE; --pin experts=triton"):
        experts_streaming._module(FORMS[0], torch.device("cuda", 0))
    with pytest.raises(PluginError, match=r"CUDA_ERROR_INVALID_IMAGE; --pin experts=triton"):
        grouped_fp8._module(torch.device("cuda", 0))


@pytest.mark.parametrize(
    ("source", "args", "maps"),
    [
        ("experts_streaming.cu", experts_streaming._StreamedArgs, ["gate_up", "down", "x", "h"]),
        ("grouped.cu", grouped_fp8._GroupedArgs, ["x", "w"]),
        ("attention.cu", attention._AttentionArgs, ["q", "q_rope", "k", "k_rope", "v"]),
        ("packed12_linear.cu", linear._Packed12LinearArgs, ["x"]),
        ("packed12_linear_few.cu", linear._FewArgs, []),
        ("packed12.cu", packed12._Packed12Args, []),
        ("fp8_compressed.cu", fp8_compressed._Fp8CompressedArgs, []),
        ("packed12_experts.cu", token_experts._TokenExpertsArgs, []),
        ("fp8_few.cu", fp8_few._Fp8FewArgs, []),
        ("normed_sum.cu", normed_sum._NormedSumArgs, []),
        ("gather_logits.cu", gather_logits._GatherLogitsArgs, []),
    ],
)
def test_arguments_lie_in_the_order_of_the_source(source, args, maps):
    text = (files("ds_runtime_cuda") / "csrc" / source).read_text()
    body = re.search(r"struct (?:alignas\(64\) )?Args \{(.*?)\n\};", text, re.S).group(1)
    body = re.sub(r"//.*|\[\d+\]", "", body)
    names = [n.strip(" *\n") for part in re.findall(
        r"(?:const )?(?:TensorMap|float|void|u8|u16|u64|int|long long)\b\*? ([^;]*);", body
    ) for n in part.split(",")]  # fmt: skip
    assert names[: len(maps)] == maps
    fields = [name for name, *_ in args._fields_ if name not in ("maps", "_end")]
    assert names[len(maps) :] == fields[source == "packed12_linear.cu" :]


@pytest.mark.slow
def test_ahead_compiles_all_that_may_be_called(home, monkeypatch):
    monkeypatch.setattr(nvrtc.torch.cuda, "get_device_capability", lambda: (9, 0))

    experts_streaming.compile_experts(SimpleNamespace(weight_format="fp8_block"), (8,))
    experts_streaming.compile_experts(SimpleNamespace(weight_format="dense"), (8,))
    grouped_fp8.compile_experts(SimpleNamespace(weight_format="fp8_block"), (8,))
    attention.compile_attention(SimpleNamespace(), (8,))
    assert len(list(home.iterdir())) == 4
    experts_streaming.compile_coded(SimpleNamespace(weight_format="dense"), (1, 3, 8, 64, 128))
    assert len(list(home.iterdir())) == 8
    experts_streaming.compile_coded(SimpleNamespace(weight_format="fp8_block"), (1, 3, 8, 64, 128))
    assert len(list(home.iterdir())) == 9
    monkeypatch.setattr(nvrtc, "cores", lambda device: 132)
    monkeypatch.setattr(nvrtc.torch.cuda, "current_device", lambda: 0)
    linear.compile_linear(SimpleNamespace(shape=(102400, 2048)), (0, 1, 8, 64, 128, 200))
    assert len(list(home.iterdir())) == 11
    linear.compile_few(SimpleNamespace(), (8,))
    fp8_few.compile_few(SimpleNamespace(), (0,))
    assert len(list(home.iterdir())) == 12
    fp8_few.compile_few(SimpleNamespace(), (0, 8))
    assert len(list(home.iterdir())) == 13
