"""The CPU plugin: what it brings. Decides without torch; kernels load when they are bound."""

from __future__ import annotations

from ds_runtime.api import plugin


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


hooks = plugin(  # no probe: every machine has a CPU, and torch runs on all that it is built for
    platform="ds_runtime_cpu.platform:CpuPlatform",
    offers="ds_runtime_cpu.kernels:OFFERS",
    diagnose="ds_runtime_cpu:diagnose",
    backends={"attention_backend": {"intel_amx": "cpu"}},
)
