"""What `model/gguf` writes of a file: the type of each module's weight."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from ds_runtime.checkpoint.gguf.config import METHOD
from ds_runtime.checkpoint.gguf.names import K_B, V_B
from ds_runtime.errors import UnsupportedError, shown
from ds_runtime.ops.contract import DENSE, Encoding
from ds_runtime.weights.loaders.encodings import mapping

__all__ = ["METHOD", "READ", "gguf"]

READ = "ds_runtime.weights.loaders.gguf_blocks:read_part"
_EXPERT = re.compile(r"(.*\.experts)\.\d+\.(.*)")
_KINDS = {
    **dict.fromkeys(("F32", "F16", "BF16"), DENSE),
    "Q4_0": Encoding("int4_group", "blocks", block=(1, 32)),
    "Q5_0": Encoding("int8_group", "blocks", block=(1, 32)),
    "Q8_0": Encoding("int8_group", "blocks", block=(1, 32)),
    "Q6_K": Encoding("int8_group", "blocks", block=(1, 16)),
    "Q4_K": Encoding("q4_k", "blocks"),
    "Q5_K": Encoding("q5_k", "blocks"),
    K_B: Encoding("dense", "kv_halves", {"weight": K_B, "values": V_B}),
}


def gguf(quantization: Mapping[str, Any]) -> Callable[[str], Encoding]:
    """The encoding of each module by its type."""
    types = mapping("types", quantization.get("types"))
    for module, kind in types.items():
        if kind not in _KINDS:
            raise UnsupportedError(f"types.{module} {shown(kind)} is not supported")

    def of(module: str) -> Encoding:
        expert = _EXPERT.fullmatch(module)
        name = module if expert is None else f"{expert[1]}.{expert[2]}"
        return _KINDS[types.get(name, "F32")]

    return of
