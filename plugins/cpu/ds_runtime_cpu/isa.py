"""The instruction sets that native libraries are built for, and which of them run here. Torch-free.

What runs is decided from the processor's features (`machine.FEATURES`), so that a plan can be made
without loading a library. A library's own answer, from cpuid, is asked once it is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_AVX2 = frozenset({"avx2", "fma", "f16c"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"}
_AVX512BF16 = _AVX512 | {"avx512_bf16", "avx512vbmi"}
_AMX = _AVX512BF16 | {"amx_tile", "amx_bf16", "amx_int8"}


@dataclass(frozen=True, slots=True)
class Isa:
    """One variant: the features that it needs, and the same limit in the words of torch's parts."""

    name: str
    needs: frozenset[str]
    onednn: str
    aten: str

    def process_env(self) -> Mapping[str, str]:
        """Environment variables that hold torch to this variant."""
        return {"ONEDNN_MAX_CPU_ISA": self.onednn, "ATEN_CPU_CAPABILITY": self.aten}


GENERIC = "generic"
ISAS: Mapping[str, Isa] = {  # best first, unless `usable` says otherwise
    isa.name: isa
    for isa in (
        Isa("amx", _AMX, "AVX512_CORE_AMX", "avx512"),
        Isa("avx512bf16", _AVX512BF16, "AVX512_CORE_BF16", "avx512"),
        Isa("avx512", _AVX512, "AVX512_CORE_VNNI", "avx512"),
        Isa("avx2", _AVX2, "AVX2", "avx2"),
        Isa(GENERIC, frozenset(), "SSE41", "default"),
    )
}
# Not one of the system's, and not for a device's description: VDPBF16PS multiplies less in a second
# than VFMADD does over float32, so weights widened for the latter are faster
# (benchmarks/results/cpu_kernels.md).
SLOW_BF16_DOTS = "slow_bf16_dots"
_WIDENED = frozenset({"avx512_bf16", SLOW_BF16_DOTS})  # bfloat16 is fast by variant avx512, too
_EXTRAS = frozenset({"avx_vnni", "avx512_fp16", "amx_fp16", SLOW_BF16_DOTS})  # no variant needs
_BY_ISA = frozenset().union(_EXTRAS, *(isa.needs for isa in ISAS.values()))


def missing(name: str, features: frozenset[str]) -> list[str]:
    """The features that variant `name` needs and the processor lacks, sorted."""
    return sorted(ISAS[name].needs - features)


def usable(built: list[str], features: frozenset[str]) -> list[str]:
    """Those of the variants in `built` that run on a processor with `features`, best first."""
    names = [n for n in ISAS if n in built and not missing(n, features)]
    if SLOW_BF16_DOTS in features and {"avx512", "avx512bf16"} <= set(names):
        names.remove("avx512bf16")
        names.insert(names.index("avx512") + 1, "avx512bf16")
    return names


def limited(name: str, features: frozenset[str]) -> frozenset[str]:
    """`features` of a processor that has nothing beyond variant `name`. Where variant avx512 is the
    best one for bfloat16, what says so stays: choosing it by name is choosing what is chosen.
    """
    kept = ISAS[name].needs | (_WIDENED if name == "avx512" and features >= _WIDENED else set())
    return (features - _BY_ISA) | (features & kept)
