"""Formats that no kernel reads: converted, said in the plan, refused where the user wants none."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from ds_runtime.assembly import assemble as assembling
from ds_runtime.assembly.assemble import assemble
from ds_runtime.assembly.estimate import needed_bytes, packed_bytes
from ds_runtime.assembly.plan import render
from ds_runtime.config import EngineConfig
from ds_runtime.description.tree import joined
from ds_runtime.errors import ConfigError, UnsupportedError
from ds_runtime.ops.binding.bind import Binder
from ds_runtime.ops.binding.pins import Pin
from ds_runtime.ops.contract import (
    RANK_PLATFORM,
    DeviceInfo,
    Dims,
    Facts,
    Kernel,
    Site,
)
from ds_runtime.ops.formats import FORMATS
from ds_runtime.ops.kernel import Footprint
from ds_runtime.ops.table import OPS
from ds_runtime.plugins.hookspecs import hookimpl
from ds_runtime.plugins.manager import load_plugins
from ds_runtime_kit.models.tiny import write_tiny

FACTS = Facts(DeviceInfo("cpu", "", ""), Dims({}), dtype="bfloat16")
REFERENCE = load_plugins(()).offers(FACTS)


def kernel(name: str, *formats: str, rank: int = RANK_PLATFORM) -> Kernel:
    return Kernel(OPS["linear"], f"acme:{name}", "acme", rank, formats=frozenset(formats))


def decided(fmt: str, *kernels: Kernel, compact: bool = False, pins: tuple[Pin, ...] = ()):
    offers = replace(REFERENCE, kernels=(*REFERENCE.kernels, *kernels))
    site = Site("linear", 3, "self_attn.o_proj", weight_format=fmt, shape=(64, 64))
    found, decision = Binder(offers, FACTS, pins, compact=compact).decide(site, "")
    assert found is not None
    return found.name, decision.site.weight_format, decision


@pytest.mark.parametrize(
    ("fmt", "read", "compact", "want"),
    [
        ("nvfp4", ("dense",), False, "dense"),
        ("nvfp4", ("dense", "fp8_block"), False, "dense"),  # numbers before bytes
        ("nvfp4", ("dense", "fp8_block"), True, "fp8_block"),
        ("nvfp4", ("dense", "nvfp4"), True, "nvfp4"),
        ("w4afp8", ("dense", "int4_group"), False, "int4_group"),  # the same numbers
        ("fp8_tensor", ("dense", "fp8_block"), False, "fp8_block"),
        ("mxfp4", ("dense", "mxfp8"), False, "mxfp8"),
        ("int8_block", ("fp8_block",), False, "fp8_block"),  # rounded, where dense is not read
        ("int4_actorder", ("dense",), True, "dense"),
    ],
)
def test_the_format_that_a_weight_is_held_in(
    fmt: str, read: tuple[str, ...], compact: bool, want: str
) -> None:
    name, held, decision = decided(fmt, kernel("mine", *read), compact=compact)
    assert (name, held) == ("acme.mine", want)
    assert decision.site.stored == ("" if held == fmt else fmt)
    kept = replace(kernel("mine", *read), footprint=Footprint(keeps=frozenset(read)))
    name, held, decision = decided(fmt, kept, compact=compact)
    assert decision.converts.startswith(f"{fmt} → {want} (") is (held != fmt)


def test_a_kernel_that_reads_a_format_and_holds_it_dense_says_so() -> None:
    spread = "fp8_block → dense (8 → 16 bits per weight; exact to the compute dtype)"
    both, alone = kernel("mine", "fp8_block", "dense"), kernel("mine", "fp8_block")
    none = replace(alone, footprint=Footprint(keeps=frozenset()))
    for spreads in (both, none):
        assert decided("fp8_block", spreads)[2].converts == spread
    kept = replace(both, footprint=Footprint(keeps=frozenset({"fp8_block"})))
    for keeps in (alone, kept):
        assert decided("fp8_block", keeps)[2].converts == ""


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_platform_with_dense_kernels_alone_serves_every_format(fmt: str) -> None:
    name, held, _ = decided(fmt, kernel("mine", "dense"))
    assert (name, held) == ("acme.mine", "dense")


def test_without_any_kernel_of_the_platform_the_reference_reads_what_is_stored() -> None:
    name, held, decision = decided("nvfp4")
    assert (name, held, decision.converts) == ("reference.ReferenceLinear", "nvfp4", "")


def test_a_kernel_that_reads_it_wins_whatever_its_rank() -> None:
    native = kernel("native", "mxfp4", rank=1)
    assert decided("mxfp4", kernel("mine", "dense", rank=90), native)[0] == "acme.native"


def test_a_pin_may_convert_and_names_the_refusal_if_it_cannot() -> None:
    pin = (Pin("linear", "*", "acme"),)
    assert decided("mxfp4", kernel("mine", "dense"), pins=pin)[1] == "dense"
    odd = replace(kernel("mine", "dense"), refuse=lambda facts: "no")
    with pytest.raises(ConfigError, match="does not read weight format 'mxfp4'; it reads dense"):
        decided("mxfp4", odd, pins=pin)


class Acme:
    """A plugin whose one linear reads dense weights."""

    @hookimpl
    def ds_quant_loaders(self, facts: Facts) -> list[Kernel]:
        fn = "ds_runtime.ops.reference.matrices.linear:ReferenceLinear"
        return [Kernel(OPS["linear"], fn, "acme", 99, formats=frozenset({"dense"}))]


def config(folder: Path, **more: object) -> EngineConfig:
    values = {"model": str(folder), "platform": "cpu", "plugins": ("cpu",), "dtype": "float32"}
    return EngineConfig(**{**values, **more})  # type: ignore[arg-type]


def write_blocks(folder: Path) -> None:
    """A checkpoint that says it holds int8 in blocks. Without weights: plain ones beside such a
    config would be read as they are."""
    write_tiny(folder, "v3")
    (folder / "model.safetensors").unlink()
    path = folder / "config.json"
    blocks = {"quant_method": "blockwise_int8", "weight_block_size": [128, 128]}
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": blocks}))


def test_where_dense_weights_do_not_fit_they_are_rounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_blocks(tmp_path)
    dense = assemble(config(tmp_path))
    needed = packed_bytes(dense.model, dense.binding, "float32", 0)
    device = assembling._device
    for memory, held in ((needed, "dense"), (needed - 1, "int8_channel"), (0, "dense")):
        small = partial(replace, memory=memory)
        monkeypatch.setattr(assembling, "_device", lambda *args, made=small: made(device(*args)))
        found = assemble(config(tmp_path))
        formats = {site.weight_format for site, _ in found.binding.choices if site.stored}
        assert held in formats, memory
        (row,) = (r for r in found.plan.conversions() if r.op == "experts")
        assert row.converts.startswith(f"int8_block → {held} (8 → ")
    assert needed_bytes(found) >= needed


def test_the_plan_says_so_and_strict_ops_refuses(tmp_path: Path) -> None:
    """int8 in blocks, which the platform here has no kernel for."""
    write_blocks(tmp_path)
    plan = assemble(config(tmp_path)).plan
    held = {row.op: row for row in plan.conversions()}
    assert {"linear", "experts", "mla_absorb"} == held.keys()
    said = "int8_block → dense (8 → 16 bits per weight; exact to the compute dtype)"
    assert held["linear"].converts == said
    assert not plan.heavy_references()
    assert f"[converts {said}]" in render(plan)
    with pytest.raises(UnsupportedError, match=r"--strict-ops: weights would be converted .*int8_"):
        assemble(config(tmp_path, strict_ops=True))


def test_parts_of_several_formats_are_joined_dense() -> None:
    assert joined(["mxfp4", "mxfp4"]) == ("mxfp4", "")
    assert joined(["nvfp4", "fp8_block"]) == ("dense", "fp8_block and nvfp4")
