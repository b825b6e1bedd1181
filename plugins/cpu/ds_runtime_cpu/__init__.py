"""The CPU plugin: hooks only. Decides without torch; kernels load when they are bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ds_runtime.api import Facts, Kernel, Platform, Refusal, hookimpl


def probe() -> Refusal | None:
    """None: every machine has a CPU, and torch runs on all that it can be installed on."""
    return None


def diagnose() -> list[tuple[str, str]]:
    """What `ds-runtime doctor` says of the native library and of memory, without torch."""
    from ds_runtime_cpu import native, placement

    built = f"built for {', '.join(native.built_for())}; {native.isa_in_use()} is used here"
    broken = native.check()
    return [
        ("native library", native.why_not() or (f"broken: {broken}" if broken else built)),
        ("memory nodes", placement.say_nodes(placement.nodes(placement.allowed_cpus()))),
        ("large pages", placement.say_large_pages()),
    ]


PROBE: Callable[[], Refusal | None] = probe
DIAGNOSE: Callable[[], list[tuple[str, str]]] = diagnose


@hookimpl
def ds_platform() -> Platform:
    from ds_runtime_cpu.platform import CpuPlatform

    return CpuPlatform()


@hookimpl
def ds_attention(facts: Facts) -> Sequence[Kernel]:
    from ds_runtime_cpu.kernels import ATTENTION

    return ATTENTION


@hookimpl
def ds_moe(facts: Facts) -> Sequence[Kernel]:
    from ds_runtime_cpu.kernels import MOE

    return MOE


@hookimpl
def ds_topk(facts: Facts) -> Sequence[Kernel]:
    from ds_runtime_cpu.kernels import ROUTING

    return ROUTING


@hookimpl
def ds_quant_loaders(facts: Facts) -> Sequence[Kernel]:
    from ds_runtime_cpu.kernels import LINEAR_KERNELS

    return LINEAR_KERNELS


@hookimpl
def ds_ops(facts: Facts) -> Sequence[Kernel]:
    from ds_runtime_cpu.kernels import SMALL_OPS

    return SMALL_OPS
