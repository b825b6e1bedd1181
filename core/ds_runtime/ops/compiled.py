"""The built-in plugin "compiled": references of small ops through torch.compile, for decode steps.

It offers something where `--enable-torch-compile` says so, before what platforms have: for calls of
this many rows, others serve the rest. Torch-free at import.
"""

from __future__ import annotations

from collections.abc import Sequence

from ds_runtime.common.hookimpl import hookimpl
from ds_runtime.ops.contract import RANK_SPECIALISED, Facts, Kernel, gates
from ds_runtime.ops.kernel import RowRange
from ds_runtime.ops.table import OPS

PROVIDER = "compiled"
_FP8 = "float8_e4m3fn"


def _converts_fp8(facts: Facts) -> str | None:
    if _FP8 in facts.device.fast_dtypes:
        return None
    return f"{facts.device.name} does not convert to {_FP8}"


@hookimpl
def ds_ops(facts: Facts) -> Sequence[Kernel]:
    if not facts.compiled_rows:
        return []
    return [
        Kernel(
            op=op,
            fn=f"ds_runtime.ops.reference.compiling:{op.name}",
            provider=PROVIDER,
            rank=RANK_SPECIALISED + 1,
            refuse=_converts_fp8 if op.name.endswith("_quantize") else gates(),
            phases=frozenset({"prefill", "decode", "verify", "tree"}),
            contract=op.version,
            rows=RowRange(below=facts.compiled_rows + 1),
        )
        for op in OPS.values()
        if op.compiles
    ]
