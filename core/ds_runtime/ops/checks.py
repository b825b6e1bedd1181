"""Gates that many kernels share: common limits of libraries, one sentence each.

A gate is a function of a site's facts. It returns None, or why a kernel cannot serve there. Some
names below are gates, others return one. They know no library: a plugin adds what its own needs.
Torch-free.
"""

from __future__ import annotations

from ds_runtime.ops.contract import FP8_GROUPS, Facts, Fixable, Gate

_FP8 = frozenset({"float8_e4m3fn", FP8_GROUPS})  # kv_dtypes


def devices(prefix: str, family: str, *wanted: str) -> Gate:
    """Returns a gate that refuses all devices except those whose architecture begins with `prefix`.
    family: what people call them. wanted: if any are named, the only architectures that pass.
    """

    def check(facts: Facts) -> str | None:
        arch = facts.device.arch
        if not arch.startswith(prefix):
            return f"runs on {family}, not on {facts.device.family}"
        return archs(*wanted)(facts) if wanted else None

    return check


def dtypes(*wanted: str) -> Gate:
    """Returns a gate that refuses a compute dtype that is none of `wanted`."""

    def check(facts: Facts) -> str | None:
        if facts.dtype in wanted:
            return None
        return f"computes in {' or '.join(wanted)}, not {facts.dtype}"

    return check


def archs(*wanted: str) -> Gate:
    """Returns a gate that refuses an architecture that is none of `wanted`."""

    def check(facts: Facts) -> str | None:
        arch = facts.device.arch
        return None if arch in wanted else f"made for {' and '.join(wanted)}, not for {arch}"

    return check


def multiplies(dtype: str) -> Gate:
    """Returns a gate that refuses a device without a fast matmul of `dtype`."""

    def check(facts: Facts) -> str | None:
        if dtype in facts.device.fast_dtypes:
            return None
        return f"{facts.device.name} does not multiply {dtype}"

    return check


def latent(latent: int, rope: int) -> Gate:
    """Returns a gate that refuses a model unless kv_lora is `latent` and qk_rope is `rope`."""

    def check(facts: Facts) -> str | None:
        found = facts.dims.get("kv_lora", 0), facts.dims.get("qk_rope", 0)
        if found == (latent, rope):
            return None
        return f"made for {latent} latent and {rope} rotated values, not {found[0]} and {found[1]}"

    return check


def head_dims(nope: int, rope: int, value: int) -> Gate:
    """Returns a gate that refuses a model unless qk_nope, qk_rope and v are `nope`, `rope` and
    `value`.
    """

    def check(facts: Facts) -> str | None:
        dims = facts.dims
        found = dims.get("qk_nope", 0), dims.get("qk_rope", 0), dims.get("v", 0)
        if found == (nope, rope, value):
            return None
        wanted, has = (f"{a} + {b} and {c}" for a, b, c in ((nope, rope, value), found))
        return f"made for heads of {wanted} dims, not {has}"

    return check


def heads(most: int, multiple: int = 1) -> Gate:
    """Returns a gate that refuses more than `most` heads of a rank, or a number that is no
    multiple.
    """

    def check(facts: Facts) -> str | None:
        found = facts.dims.get("heads", 0)
        if found > most:
            return Fixable(f"takes at most {most} heads, not {found}", "raise --tp")
        return f"takes multiples of {multiple} heads, not {found}" if found % multiple else None

    return check


def same_kv(facts: Facts) -> str | None:
    """A gate that refuses a KV cache of another dtype than the compute dtype."""
    if facts.kv_dtype == facts.dtype:
        return None
    said = f"reads a cache of the compute dtype {facts.dtype}, not {facts.kv_dtype}"
    return Fixable(said, "pass --kv-cache-dtype auto")


def wide_latents(because: str) -> Gate:
    """Returns a gate that refuses a KV cache of FP8 latents, with the sentence `because`."""

    def check(facts: Facts) -> str | None:
        if facts.kv_dtype not in _FP8:
            return None
        return Fixable(because, "pass --kv-cache-dtype auto")

    return check


def same_index(facts: Facts) -> str | None:
    """A gate that refuses index keys of another dtype than the compute dtype."""
    if facts.index_dtype == facts.dtype:
        return None
    said = f"reads index keys of the compute dtype {facts.dtype}, not {facts.index_dtype}"
    return Fixable(said, f"pass --index-cache-dtype {facts.dtype}")


def page_sizes(*sizes: int) -> Gate:
    """Returns a gate that refuses a page size that is none of `sizes`. The last is the one to
    suggest.
    """

    def check(facts: Facts) -> str | None:
        if facts.page_size in sizes:
            return None
        said = f"page size {facts.page_size}, takes {' or '.join(map(str, sorted(sizes)))}"
        return Fixable(said, f"pass --page-size {sizes[-1]}")

    return check


def page_multiples(of: int, most: int, best: int) -> Gate:
    """Returns a gate that refuses a page size above `most`, or no multiple of `of`. best: to
    suggest.
    """

    def check(facts: Facts) -> str | None:
        if facts.page_size % of == 0 and facts.page_size <= most:
            return None
        said = f"page size {facts.page_size}, takes multiples of {of} up to {most}"
        return Fixable(said, f"pass --page-size {best}")

    return check


def linear_groups(inputs: int, outputs: int = 1) -> Gate:
    """Returns a gate for a weight [out, in]: `in` must be a multiple of `inputs`, `out` of
    `outputs`.
    """

    def check(facts: Facts) -> str | None:
        if not facts.shape:
            return None
        rows, cols = facts.shape[-2:]
        if cols % inputs:
            return f"quantises groups of {inputs} inputs, and {cols} are not whole groups"
        return f"needs a multiple of {outputs} outputs, not {rows}" if rows % outputs else None

    return check


def expert_widths(multiple: int) -> Gate:
    """Returns a gate for `experts`: width and hidden of facts.shape must be multiples of
    `multiple`.
    """

    def check(facts: Facts) -> str | None:
        odd = [n for n in facts.shape[1:] if n % multiple]
        return f"needs widths in multiples of {multiple}, and {odd[0]} is none" if odd else None

    return check


def sixteen_bytes(facts: Facts) -> str | None:
    """A gate for `experts` with 16-bit weights: their rows must be whole 16 bytes."""
    odd = [n for n in facts.shape[1:] if n % 8]
    return f"needs rows of whole 16 bytes, and {odd[0]} values are none" if odd else None
