"""What Triton compiles is told, with its shape once an engine serves."""

from __future__ import annotations

import logging

import pytest

triton = pytest.importorskip("triton")

from triton import knobs  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

import ds_runtime_triton.jit.heard  # noqa: E402, F401
from ds_runtime.platform import compilations  # noqa: E402


def copy_rows(source, out, SIZE: triton.language.constexpr):
    at = triton.language.arange(0, SIZE)
    triton.language.store(out + at, triton.language.load(source + at))


def compile_copy(size):
    types = {"source": "*fp32", "out": "*fp32", "SIZE": "constexpr"}
    src = ASTSource(fn=JITFunction(copy_rows), signature=types, constexprs={"SIZE": size})
    return triton.compile(src, target=GPUTarget("cuda", 90, 32))


def test_a_compilation_is_counted_and_told_while_an_engine_serves(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    caplog.set_level(logging.WARNING)

    def count():
        return compilations.counted().get(("triton", "copy_rows"), 0)

    before = count()
    compilations.serving(False)
    compile_copy(64)
    assert count() == before + 1 and not caplog.records
    compile_copy(64)  # from the cache
    assert count() == before + 1
    compilations.serving(True)
    try:
        compile_copy(64)
        assert not caplog.records
        compile_copy(128)
    finally:
        compilations.serving(False)
    assert count() == before + 2
    (record,) = caplog.records
    said = record.getMessage()
    assert said.startswith("triton compiled copy_rows while serving, which took ")
    assert said.endswith("s: source=*fp32, out=*fp32, SIZE=128")
