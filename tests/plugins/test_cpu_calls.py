"""Python's table of native functions against the C header that it repeats."""

from __future__ import annotations

import hashlib
import re
from ctypes import c_double, c_int32, c_int64, c_void_p
from pathlib import Path

import pytest
import torch

import ds_runtime_cpu
from ds_runtime.errors import UnsupportedError
from ds_runtime_cpu import native

SOURCES = Path(ds_runtime_cpu.__file__).parents[1] / "csrc"


def header() -> str:
    return re.sub(r"//.*", "", (SOURCES / "ds_cpu.h").read_text())


def declared() -> dict[str, tuple[type, ...]]:
    """Every `void ds_cpu_<name>(...)` of the header, as ctypes types."""
    text = header()
    found = re.findall(r"DS_EXPORT void ds_cpu_(\w+)\(([^)]*)\)", text)
    return {name: tuple(c_type(a) for a in arguments.split(",")) for name, arguments in found}


def c_type(argument: str) -> type:
    if "*" in argument:
        return c_void_p
    kind = argument.split()[-2]
    return {"int64_t": c_int64, "int32_t": c_int32, "double": c_double}[kind]


def test_signatures_are_those_of_the_header():
    assert dict(native.SIGNATURES) == declared()


# What each version of the interface was, newest last. A change of the header needs another one, in
# the header and in native.py: a library of the other kind would be called with wrong arguments.
INTERFACES = {
    5: "24238db558348764",
    6: "c2403fece5d7b874",
    7: "b17b284ec31a7cc9",
    8: "2bcf5a1afb34aebb",
    9: "4026d80e7e9ea353",
    10: "16edb450ff6bd866",
    11: "15ce354e520dd2bb",
    12: "15ce354e520dd2bb",  # and panel_bytes, which gives a value
    13: "5ed4965102318d87",
    14: "6e48fafe2af9841e",
}


def digest() -> str:
    letters = {c_void_p: "p", c_int64: "q", c_int32: "i", c_double: "d"}
    said = [f"{n}({''.join(letters[k] for k in kinds)})" for n, kinds in declared().items()]
    return hashlib.sha256(" ".join(sorted(said)).encode()).hexdigest()[:16]


def test_another_interface_has_another_version():
    (version,) = re.findall(r"^#define DS_CPU_ABI (\d+)$", header(), re.MULTILINE)
    assert int(version) == native.ABI_VERSION
    now = f"{native.ABI_VERSION}: {digest()!r}"
    assert INTERFACES[native.ABI_VERSION] == digest(), f"raise both versions, and add {now} here"


def test_a_library_of_another_interface_is_a_sentence(monkeypatch):
    """At the first call, which stops the start, and in doctor."""
    monkeypatch.setattr(native, "ABI_VERSION", native.ABI_VERSION + 1)
    name = native._path(native.isa_in_use()).name
    said = f"{name}: interface {native.ABI_VERSION - 1}, this release reads {native.ABI_VERSION}"
    native._opened.cache_clear()
    try:
        with native.using(None), pytest.raises(UnsupportedError) as raised:
            native.calls()
    finally:
        native._opened.cache_clear()
    assert str(raised.value) == f"native library: {said}; install again"  # no other is better
    rows = dict(ds_runtime_cpu.diagnose())
    assert rows["native library"] == f"broken: {said}; install again"


def test_every_function_takes_slots():
    listed = re.findall(r"^DS_SLOTS\((\w+)\)", (SOURCES / "calls.cpp").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(native.SIGNATURES)


@pytest.mark.parametrize("isa", native.runnable())
def test_arguments_may_be_given_beforehand(isa):
    x, weight = torch.randn(3, 40), torch.rand(40)
    weight[7] = 0.0  # a zero byte does not end the arguments
    want, got = torch.empty(3, 40), torch.empty(3, 40)
    with native.using(isa):
        calls = native.calls()
        calls.rms_norm(0, 0, x.data_ptr(), 40, weight.data_ptr(), 1e-6, want.data_ptr(), 3, 40)
        some = calls.bound("rms_norm", 0, 0, None, 40, weight.data_ptr(), None, None, 3, 40)
        some(x.data_ptr(), 1e-6, got.data_ptr())
        every = calls.bound("rms_norm", *(None,) * 9)
        assert torch.equal(got, want)
        every(0, 0, x.data_ptr(), 40, weight.data_ptr(), 1e-6, got.zero_().data_ptr(), 3, 40)
        assert torch.equal(got, want)
        with pytest.raises(AssertionError, match="rms_norm"):
            calls.bound("rms_norm", 0)
    torch.testing.assert_close(want, torch.nn.functional.rms_norm(x, (40,), weight, 1e-6))
