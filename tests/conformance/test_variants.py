"""Every variant of the CPU's native library that this machine executes, over the ops' samples.

From the best one down to `generic`, with every kind of cache and width of heads that the vendor kit
has: on every machine the same cases of a variant.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from ds_runtime.config import EngineConfig
from ds_runtime.ops.contract import FP8_GROUPS, Facts, Kernel
from ds_runtime.plugins.manager import load_plugins
from ds_runtime_cpu import native
from ds_runtime_cpu.platform import CpuPlatform
from ds_runtime_kit.checks.conformance import check_kernel
from ds_runtime_kit.kit import Subject, subjects


@dataclass(frozen=True)
class Variant:
    """One native kernel under the facts of one variant."""

    isa: str
    subject: Subject

    def __str__(self) -> str:
        return f"{self.isa}-{self.subject}"


def needs_library(kernel: Kernel, facts: Facts) -> bool:
    """Whether the kernel accepts these facts, and would not if no library had been built."""
    real = native.why_not
    native.why_not = lambda: native.NOT_BUILT
    try:
        without = kernel.refuse(facts)
    finally:
        native.why_not = real
    return kernel.refuse(facts) is None and without == native.NOT_BUILT


def variants() -> list[Variant]:
    plugins, found = load_plugins(["cpu"]), []
    for isa in native.runnable():
        platform = CpuPlatform()
        platform.configure(EngineConfig(cpu_isa=isa))
        found += [
            Variant(isa, subject)
            for subject in subjects(plugins, platform.info(), {"cpu"})
            if needs_library(subject.kernel, subject.facts)
        ]
    native.choose(None)
    return found


VARIANTS = variants()


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_variant_conforms(variant: Variant) -> None:
    of = variant.subject
    with native.using(variant.isa):
        results = check_kernel(of.kernel, of.facts, of.offers)
    failures = [f"{r.case}: {r.failure}" for r in results if not r.ok]
    assert not failures, "\n".join(failures)


def test_every_variant_brings_the_native_kernels() -> None:
    ops: dict[str, set[str]] = {}
    for variant in VARIANTS:
        ops.setdefault(variant.isa, set()).add(variant.subject.kernel.op.name)
    assert list(ops) == list(native.runnable())
    for isa, found in ops.items():
        assert found >= {"linear", "experts", "mla_decode", "rms_norm", "cache_write"}, isa
    caches = {(v.isa, v.subject.facts.kv_dtype) for v in VARIANTS}
    assert {kind for _, kind in caches} >= {"float32", "bfloat16", "float8_e4m3fn", FP8_GROUPS}
    assert len(caches) == len(ops) * len({kind for _, kind in caches})
