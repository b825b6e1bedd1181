"""The built-in plugin "compiled": references of small ops through torch.compile, for decode steps.

It offers something where `--enable-torch-compile` says so, before what platforms have: for calls of
so many rows, others serve the rest. Torch-free at import.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ds_runtime.common.hookimpl import hookimpl
from ds_runtime.ops.contract import RANK_SPECIALISED, Facts, Kernel
from ds_runtime.ops.table import OPS

PROVIDER = "compiled"
_FP8 = "float8_e4m3fn"
_SMALL = ("rms_norm", "add_rms_norm", "rope", "silu_mul")
_QUANTISING = ("rms_norm_quantize", "add_rms_norm_quantize", "silu_mul_quantize")


def _accept(facts: Facts) -> str | None:
    return None


def _converts_fp8(facts: Facts) -> str | None:
    if _FP8 in facts.device.fast_dtypes:
        return None
    return f"{facts.device.name} does not convert to {_FP8}"


def _offers(names: Iterable[str], facts: Facts) -> list[Kernel]:
    if not facts.compiled_rows:
        return []
    return [
        Kernel(
            op=OPS[name],
            fn=f"ds_runtime.ops.reference.compiling:{name}",
            provider=PROVIDER,
            rank=RANK_SPECIALISED + 1,
            refuse=_converts_fp8 if name in _QUANTISING else _accept,
            phases=frozenset({"prefill", "decode", "verify", "tree"}),
            contract=OPS[name].version,
            below_rows=facts.compiled_rows + 1,
            source="ds_runtime.ops.reference.compiling",
        )
        for name in names
    ]


@hookimpl
def ds_ops(facts: Facts) -> Sequence[Kernel]:
    return _offers(_SMALL + _QUANTISING, facts)


@hookimpl
def ds_topk(facts: Facts) -> Sequence[Kernel]:
    return _offers(("route",), facts)
