"""That kernels of expanded keys and values compile for GPUs: the interpreter does not tell."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from interpreter import needs_triton

pytestmark = needs_triton
TARGETS = [("cuda", 80, 32), ("cuda", 90, 32), ("cuda", 100, 32), ("hip", "gfx942", 64)]
COMPILE = """
import sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from ds_runtime_triton.jit import expanded

HALF = "*bf16"
DECODE = {"PAGE": 64, "SPLIT": True, "NOPE": 128, "ROPE": 64, "V": 128, "BLOCK_N": 32, "PDL": 0}
name, arch, warp = sys.argv[1:]
target = GPUTarget(name, int(arch) if arch.isdigit() else arch, int(warp))

def compiled(entry, types, constants):
    names = entry.compiled.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    constexprs = {(i,): constants[n] for i, n in enumerate(names) if n in constants}
    source = ASTSource(entry.compiled, signature, constexprs=constexprs)
    assert triton.compile(source, target=target, options={"num_warps": 4}).asm

caches = [HALF] if arch in ("80", "gfx942") else [HALF, "*fp8e4nv"]
for cache in caches:
    tensors = {"q": HALF, "q_rope": HALF, "cache": cache, "out": HALF, "bits": "*i64"}
    tensors |= {"partial": "*fp32", "sums": "*fp32", "scale": "fp32"}
    tensors |= dict.fromkeys(("table", "owner", "lens"), "*i32")
    for tree in (False, True):
        compiled(expanded.mha_decode_kernel, tensors, {**DECODE, "TREE": tree})
    tensors = {"cache": cache, "values": HALF, "k_rope": HALF, "slots": "*i64"}
    compiled(expanded.expanded_write_kernel, tensors, {"BLOCK": 1024, "ROPE": 64, "PDL": 0})
print("compiled")
"""


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: f"{t[0]}{t[1]}")
def test_kernels_compile(target, tmp_path):
    environ = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, *map(str, target)],
        env={**environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.strip().endswith("compiled"), done.stderr[-2000:]
