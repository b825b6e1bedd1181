"""A vendor's plugin of an older generation: a platform, kernels of every kind, and one of them for
version 0 of its contract."""

from __future__ import annotations

from ds_runtime.api import (
    OPS,
    RANK_SPECIALISED,
    Change,
    Facts,
    Kernel,
    Layout,
    Platform,
    hookimpl,
)


def _refuse(facts: Facts) -> str | None:
    if facts.device.arch != "older1":
        return f"made for older1, not for {facts.device.arch}"
    return None


def _offer(op: str, formats: frozenset[str] = frozenset()) -> Kernel:
    return Kernel(
        OPS[op],
        f"ds_older.kernels:{op}",
        "older",
        RANK_SPECIALISED,
        _refuse,
        formats=formats,
        layouts=frozenset({"older_rows.v1"}) if OPS[op].layout else frozenset(),
        note="frozen",
        contract=0 if op == "mla_decode" else 1,
    )


def _bytes_per_token(facts: Facts) -> int:
    return 4 * (facts.dims["kv_lora"] + facts.dims["qk_rope"])


LAYOUT = Layout("older_rows", 1, "ds_older.kernels:allocate", _bytes_per_token)


@hookimpl
def ds_platform() -> Platform:
    from ds_older.platform import OlderPlatform

    return OlderPlatform()


@hookimpl
def ds_attention() -> list[Kernel | Layout]:
    return [LAYOUT, _offer("mla_decode"), _offer("cache_write"), _offer("cache_gather")]


@hookimpl
def ds_quant_loaders() -> list[Kernel]:
    return [_offer("linear", frozenset({"dense"}))]


@hookimpl
def ds_ops(facts: Facts) -> list[Kernel]:
    return [_offer("silu_mul"), _offer("rms_norm")]


@hookimpl
def ds_defaults(facts: Facts) -> list[Change]:
    if facts.device.arch != "older1":
        return []
    return [Change("page_size", 32, "its pages are larger")]
