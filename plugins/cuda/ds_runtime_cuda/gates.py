"""What refuses a kernel of this plugin: gates that several offers share. Torch-free."""

from __future__ import annotations

from ds_runtime.api import FP8_GROUPS, OPS, Facts, Fixable, Gate, Kernel, gates
from ds_runtime_cuda.software import INSTALL, LIBRARIES

FP8, DENSE = frozenset({"fp8_block"}), frozenset({"dense"})
LATENT_PAGES = frozenset({"latent_pages.v1"})
SCALED_PAGES = frozenset({"latent_fp8_groups.v1"})
INDEX_PAGES = frozenset({"index_pages.v1"})
_CONTRACTS = {"mla_decode": 2}  # the version that each op's kernels are written for; else 1
_LATENT, _ROPE = 512, 64
_BLOCK = 128
_DISTRIBUTION = {library.module: library.distributions[0] for library in LIBRARIES}


def gpu(facts: Facts) -> str | None:
    arch = facts.device.arch
    return None if arch.startswith("sm") else f"runs on NVIDIA GPUs, not on {facts.device.type}"


def arch(*wanted: str) -> Gate:
    def check(facts: Facts) -> str | None:
        arch = facts.device.arch
        return None if arch in wanted else f"made for {' and '.join(wanted)}, not for {arch}"

    return gates(gpu, check)


def dtype(*wanted: str) -> Gate:
    def check(facts: Facts) -> str | None:
        if facts.dtype in wanted:
            return None
        return f"computes in {' or '.join(wanted)}, not {facts.dtype}"

    return check


def library(module: str, *functions: str) -> Gate:
    def check(facts: Facts) -> str | None:
        features = facts.device.features
        if module not in features:
            return Fixable(f"{_DISTRIBUTION[module]} is not installed", INSTALL)
        if f"{module}:mixed" in features:
            return f"two packages have been installed into {module}/: uninstall both, then one"
        missing = [f for f in functions if f"{module}.{f}" not in features]
        if missing:
            return f"the installed {module} has no {', '.join(missing)}; {INSTALL} brings one"
        return None

    return check


def latent(facts: Facts) -> str | None:
    latent, rope = facts.dims.get("kv_lora", 0), facts.dims.get("qk_rope", 0)
    if (latent, rope) != (_LATENT, _ROPE):
        return f"made for {_LATENT} latent and {_ROPE} rotated values, not {latent} and {rope}"
    return None


def same_kv(facts: Facts) -> str | None:
    if facts.kv_dtype != facts.dtype:
        said = f"reads a cache of the compute dtype {facts.dtype}, not {facts.kv_dtype}"
        return Fixable(said, "pass --kv-cache-dtype auto")
    return None


def scaled_kv(facts: Facts) -> str | None:
    if facts.kv_dtype != FP8_GROUPS:
        said = f"reads a cache of {FP8_GROUPS}, not of {facts.kv_dtype}"
        return Fixable(said, "pass --kv-cache-dtype fp8")
    return None


def most_heads(facts: Facts) -> str | None:
    heads = facts.dims.get("heads", 0)
    return f"takes up to 128 heads, not {heads}" if heads > 128 else None


def fp8_keys(facts: Facts) -> str | None:
    if facts.index_dtype != "float8_e4m3fn":
        said = f"scores float8_e4m3fn keys, not {facts.index_dtype}"
        return Fixable(said, "pass --index-cache-dtype fp8")
    heads, d = facts.dims.get("index_heads", 0), facts.dims.get("index_dim", 0)
    if heads > 64 or d not in (32, 64, 128):
        return f"takes up to 64 index heads of 32, 64 or 128 values, not {heads} of {d}"
    return None


def pages(*sizes: int) -> Gate:
    def check(facts: Facts) -> str | None:
        if facts.page_size in sizes:
            return None
        said = f"page size {facts.page_size}, takes {' or '.join(map(str, sizes))}"
        return Fixable(said, f"pass --page-size {sizes[-1]}")

    return check


def heads_192(facts: Facts) -> str | None:
    dims = facts.dims
    shape = dims.get("qk_nope", 0) + dims.get("qk_rope", 0), dims.get("v", 0)
    return None if shape == (192, 128) else f"made for heads of 192 and 128 dims, not {shape}"


def blocks(*, out: int = 1) -> Gate:
    """Inputs in whole groups of 128; outputs a multiple of `out`."""

    def check(facts: Facts) -> str | None:
        if not facts.shape:
            return None
        rows, cols = facts.shape[-2:]
        if cols % _BLOCK:
            return f"quantises groups of {_BLOCK} inputs, and {cols} are not whole groups"
        if rows % out:
            return f"needs a multiple of {out} outputs, not {rows}"
        return None

    return check


def expert_blocks(facts: Facts) -> str | None:
    """Both matmuls in whole blocks: (experts, width, hidden)."""
    cut = [n for n in facts.shape[1:] if n % _BLOCK]
    return f"needs whole blocks of {_BLOCK}, and {cut[0]} are none" if cut else None


def sixteen_bytes(facts: Facts) -> str | None:
    odd = [n for n in facts.shape[1:] if n % 8]
    return f"needs rows of whole 16 bytes, and {odd[0]} values are none" if odd else None


def multiplies_fp8(facts: Facts) -> str | None:
    if "float8_e4m3fn" in facts.device.fast_dtypes:
        return None
    return f"{facts.device.name} does not multiply float8_e4m3fn"


def offer(
    op: str,
    fn: str,
    rank: int,
    *checks: Gate,
    formats: frozenset[str] = frozenset(),
    layouts: frozenset[str] = LATENT_PAGES,
    graph_safe: bool = True,
    note: str = "",
    packing: str = "",
    from_rows: int = 0,
) -> Kernel:
    fp8, module = formats == FP8, fn.partition(":")[0]
    return Kernel(
        op=OPS[op],
        fn=f"ds_runtime_cuda.{fn}",
        provider="cuda" if module == "torch_ops" else module,
        rank=rank,
        refuse=gates(gpu, *checks),
        formats=formats,
        layouts=layouts if OPS[op].layout else frozenset(),
        phases=frozenset({"prefill", "decode", "verify"}),
        contract=_CONTRACTS.get(op, 1),
        graph_safe=graph_safe,
        note=note,
        numerics="fp8_w8a8" if fp8 else "",
        keeps=FP8 if fp8 else frozenset(),
        packing=packing,
        from_rows=from_rows,
    )


BF16, HALVES = dtype("bfloat16"), dtype("bfloat16", "float16")
