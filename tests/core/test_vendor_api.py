"""What plugins share: `Provider`, `Library`, `exports`, `plugin` and the gates of `checks`."""

from __future__ import annotations

import math
import sys
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_runtime.api import (
    FP8_GROUPS,
    RANK_SPECIALISED,
    Change,
    DeviceInfo,
    Dims,
    Facts,
    Fixable,
    Footprint,
    Kernel,
    Library,
    Platform,
    Promises,
    Provider,
    Refusal,
    checks,
    exports,
    hookimpl,
    plugin,
    torch_built_for,
    visible,
)
from ds_runtime.ops.kernel import Compiles
from ds_runtime.ops.provider import Declared
from ds_runtime.ops.table import OPS
from ds_runtime.plugins import hookspecs
from ds_runtime.plugins.manager import load_plugins

DEVICE = DeviceInfo("acme", "Acme X1", "acme_x1")
FACTS = Facts(DEVICE, Dims({"heads": 4}), dtype="bfloat16", kv_dtype="bfloat16")
OWN = Promises(batch_invariant=True)
ACME = Provider(
    "acme",
    "ds_runtime_acme",
    checks.devices("acme", "Acme devices", "acme_x1"),
    contracts={"route": 2},
    numerics={"fp8_block": "fp8_w8a8"},
    declared={"compiles": Compiles(rehearsal="ahead:context"), "promises": OWN},
)


def having(*features: str) -> Facts:
    return replace(FACTS, device=replace(DEVICE, features=frozenset(features)))


@pytest.mark.parametrize("op", sorted(OPS))
def test_an_offer_has_what_the_provider_says(op: str) -> None:
    kernel = ACME.offer(op, "module:fn", RANK_SPECIALISED)
    layouts = {"kv": {"latent_pages.v1"}, "index": {"index_pages.v1"}, "": set()}
    assert kernel.layouts == layouts[OPS[op].layout]
    assert (kernel.fn, kernel.provider) == ("ds_runtime_acme.module:fn", "acme")
    assert kernel.contract == (2 if op == "route" else 1)
    assert kernel.phases == {"prefill", "decode", "verify"}
    assert kernel.compiles == Compiles(rehearsal="ds_runtime_acme.ahead:context")
    assert kernel.promises.batch_invariant


@given(st.sets(st.sampled_from(["dense", "fp8_block", "int8_channel", "mxfp4"])))
def test_who_reads_dense_weights_keeps_no_other_encoding(formats: set[str]) -> None:
    kernel = ACME.offer("linear", "m:f", RANK_SPECIALISED, formats=formats)
    assert kernel.formats == formats
    assert kernel.keeps == (set() if "dense" in formats else formats)
    assert kernel.numerics == ("fp8_w8a8" if formats == {"fp8_block"} else "")
    none = Footprint(keeps=frozenset())
    own = ACME.offer("linear", "m:f", 30, formats=formats, footprint=none, numerics="x")
    assert own.keeps == set() and own.numerics == "x"


def test_an_offer_says_more_than_the_provider() -> None:
    own = {"layouts": {"mine.v1"}, "phases": {"tree"}, "contract": 7}
    kernel = ACME.offer(
        "mla_decode", "m:f", 3, checks.same_kv, compiles=Compiles("m:compile"), **own
    )
    assert (kernel.layouts, kernel.phases, kernel.contract) == ({"mine.v1"}, {"tree"}, 7)
    assert (kernel.compiles, kernel.rank) == (Compiles("ds_runtime_acme.m:compile"), 3)


def test_the_devices_gate_is_asked_first() -> None:
    kernel = ACME.offer("mla_decode", "m:f", 3, checks.same_kv)
    elsewhere = DeviceInfo("cpu", "host", "x86-64")
    wrong = replace(FACTS, kv_dtype="float8_e4m3fn")
    assert kernel.refuse(replace(wrong, device=elsewhere)) == "runs on Acme devices, not on CPUs"
    newer = replace(DEVICE, arch="acme_x9")
    assert kernel.refuse(replace(wrong, device=newer)) == "made for acme_x1, not for acme_x9"
    assert str(kernel.refuse(wrong)).startswith("reads a cache of the compute dtype")
    assert kernel.refuse(FACTS) is None


def test_offers_may_declare_every_field_of_a_kernel() -> None:
    own = {"op", "fn", "provider", "rank", "refuse"}
    assert set(Declared.__annotations__) == {f.name for f in fields(Kernel)} - own
    with pytest.raises(KeyError, match="silu_mull"):
        ACME.offer("silu_mull", "m:f", 3)
    with pytest.raises(TypeError, match="workspaces"):
        ACME.offer("silu_mul", "m:f", 3, workspaces=None)  # type: ignore[call-arg]


NUMBERS = st.integers(-3, 9) | st.floats() | st.booleans() | st.text(max_size=3) | st.none()


@given(st.sampled_from(["copies", "second_form"]), NUMBERS)
def test_a_footprint_takes_numbers_alone(name: str, value: object) -> None:
    """Its fields are added up for the estimate of memory: text would be repeated."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and math.isfinite(value) and (value > 0 or (value == 0 and name == "second_form")):
        assert getattr(Footprint(**{name: value}), name) == value
        return
    with pytest.raises(ValueError if number else TypeError, match=f"Footprint: {name} is .*: give"):
        Footprint(**{name: value})


@pytest.mark.parametrize("name", ["workspace", "reads"])
def test_a_footprint_takes_functions(name: str) -> None:
    assert getattr(Footprint(**{name: max}), name) is max
    with pytest.raises(TypeError, match=f"Footprint: {name} is 3: give a function"):
        Footprint(**{name: 3})


@pytest.mark.parametrize("keeps", ["fp8_block", {"fp8_block"}, ["dense"], frozenset({3})])
def test_a_footprint_keeps_a_frozenset_of_names(keeps: object) -> None:
    with pytest.raises(TypeError, match=r"Footprint: keeps is .*: give a frozenset of names"):
        Footprint(keeps=keeps)  # type: ignore[arg-type]


@given(st.sampled_from([f.name for f in fields(Compiles)]), st.text(max_size=12) | st.integers())
def test_what_compiles_is_a_lazy_path(name: str, path: object) -> None:
    module, _, attr = str(path).partition(":")
    lazy = all(part.isidentifier() for part in [*module.split("."), attr])
    if path == "" or (isinstance(path, str) and lazy):
        assert getattr(Compiles(**{name: path}), name) == path
        return
    error = ValueError if isinstance(path, str) else TypeError
    with pytest.raises(error, match=f"Compiles: {name} is .*: give a lazy 'module:attr'"):
        Compiles(**{name: path})


@pytest.mark.parametrize("path", ["m:f", "a.b.c:d", "_x:y1"])
def test_a_lazy_path_names_a_module_and_what_is_in_it(path: str) -> None:
    assert Compiles(ahead=path, rehearsal=path, variant=path).variant == path


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


LIBRARY = Library(
    "lib",
    ("lib-new", "lib-old"),
    (
        exports.names(),
        exports.names("sub"),
        exports.names("native", beside="*.so"),
        exports.text("op", "*.so", "op(Tensor x)"),
    ),
    install="pip install lib-new",
    ours=lambda folder: (folder / "sub.py").is_file(),
    other=Fixable("another package is called lib", "pip uninstall lib"),
)


def test_a_library_is_found_without_an_import(tmp_path: Path) -> None:
    def look(*brought: str) -> set[str]:
        return set(LIBRARY.find({"lib": tmp_path}.get, lambda d: "1" if d in brought else None))

    assert set(LIBRARY.find(lambda m: None)) == set()
    code = {"__init__.py": "def f(): raise SystemExit", "native.py": "def g(): ..."}
    write(tmp_path, code)
    assert look() == {"lib:other"}
    write(tmp_path, {"sub.py": "class C: ..."})
    assert look("lib-new") == {"lib", "lib.f", "lib.sub.C"}
    write(tmp_path, {"a.so": "\0op(Tensor x) -> ()\0", "b.so": ""})
    assert look() == {"lib", "lib.f", "lib.sub.C", "lib.native.g", "lib.op"}
    assert look("lib-new", "lib-old") - look() == {"lib:mixed"}


def test_a_librarys_gate_says_what_is_missing_and_what_brings_it() -> None:
    gate = LIBRARY.has("f", "sub.C")
    assert gate(having("lib", "lib.f", "lib.sub.C")) is None
    for features, said, remedy in (
        ((), "lib-new is not installed", "pip install lib-new"),
        (("lib", "lib.f"), "the installed lib has no sub.C", "pip install lib-new"),
        (("lib",), "the installed lib has no f, sub.C", "pip install lib-new"),
        (("lib:other",), "another package is called lib", "pip uninstall lib"),
    ):
        found = gate(having(*features))
        assert isinstance(found, Fixable) and found.remedy == remedy
        assert found == f"{said}: {remedy}"
    mixed = gate(having("lib", "lib.f", "lib.sub.C", "lib:mixed"))
    assert mixed is not None and "uninstall both, then one" in mixed
    assert Library("bare").has()(having()) == "bare is not installed"


def test_a_library_reports_its_versions() -> None:
    assert LIBRARY.report({"lib-old": "1.2"}.get) == ("lib", "lib-old 1.2")
    both = {"lib-old": "1.2", "lib-new": "2.0"}.get
    assert LIBRARY.report(both) == ("lib", "lib-new 2.0, lib-old 1.2")
    assert LIBRARY.report({}.get) == ("lib", "not installed: pip install lib-new")
    lazy = Library("lib", install=lambda: "later")
    assert lazy.report({}.get) == ("lib", "not installed: later")
    assert Library("nobody_has_this").features() == frozenset()


class Own(Platform):
    name = "acme"


OFFERS = (ACME.offer("silu_mul", "m:f", RANK_SPECIALISED),)
PRESENT: list[Refusal] = []
LAZY = f"{__name__}:"


def made(**given: object) -> ModuleType:
    module = ModuleType("acme")
    module.hooks = plugin(**given)  # type: ignore[attr-defined, arg-type]
    return module


def seek() -> Refusal | None:
    return PRESENT[0] if PRESENT else None


def wishes(facts: Facts) -> list[Change]:
    return [Change("page_size", 64, "it is read whole")]


def diagnose() -> list[tuple[str, str]]:
    return [("lib", "1.2")]


def test_a_plugin_brings_what_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = made(
        platform=f"{LAZY}Own",
        probe=f"{LAZY}seek",
        offers=f"{LAZY}OFFERS",
        defaults=wishes,
        diagnose=f"{LAZY}diagnose",
        flags={"--acme": "tp"},
    )
    refusal = Refusal("absent", "no card")
    hooks = whole.hooks
    assert hooks.FLAGS == {"--acme": "tp"} and not hasattr(hooks, "BACKENDS")
    assert hooks.PROBE() is None and hooks.DIAGNOSE() == [("lib", "1.2")]
    monkeypatch.setitem(sys.modules, "ds_runtime_acme.ahead", ahead := ModuleType("ahead"))
    ahead.context = print  # type: ignore[attr-defined]
    plugins = load_plugins(["reference"], [whole])
    assert OFFERS[0] in plugins.offers(FACTS).kernels
    (wished,) = dict(plugins.call("ds_defaults", config=None, facts=FACTS))["acme"]
    assert wished.field == "page_size"
    assert hooks.ds_ops(FACTS) is OFFERS
    monkeypatch.setattr(sys.modules[__name__], "PRESENT", [refusal])
    assert hooks.PROBE() is refusal is hooks.ds_platform() and hooks.DIAGNOSE() == []


def test_a_plugin_has_no_hook_that_it_was_not_told() -> None:
    module = made(offers=f"{LAZY}OFFERS")
    brought = [name for name in hookspecs.HOOKS if hasattr(module.hooks, name)]
    assert brought == ["ds_ops"] and module.hooks.PROBE() is None
    more = made(ds_cli=lambda subcommands: None)
    assert load_plugins(["reference"], [more]).implementing("ds_cli") == ["acme"]
    with pytest.raises(TypeError, match="'ds_opz', which is no hook"):
        plugin(ds_opz=print)


def test_hooks_are_lazy() -> None:
    """Nothing that they name is imported, or has to be there, before they are called."""
    hooks = made(platform="nowhere:P", offers="nowhere:O", diagnose="nowhere:d").hooks
    for ask in (hooks.ds_platform, hooks.DIAGNOSE, lambda: hooks.ds_ops(FACTS)):
        with pytest.raises(ModuleNotFoundError, match="nowhere"):
            ask()


def test_a_hook_beside_hooks_is_refused_with_a_sentence() -> None:
    module = made(offers=f"{LAZY}OFFERS")
    module.ds_cli = hookimpl(lambda subcommands: None)  # type: ignore[attr-defined]
    found = load_plugins(["reference"], [module]).reports["acme"].refusal
    assert found is not None and found.kind == "broken"
    assert "ds_cli is defined next to `hooks`: give it to plugin(ds_cli=…)" in found.reason


def test_a_module_called_hooks_is_not_taken_for_them() -> None:
    module = ModuleType("acme")
    module.hooks = ModuleType("acme.hooks")  # type: ignore[attr-defined]
    module.ds_ops = hookimpl(lambda facts: OFFERS)  # type: ignore[attr-defined]
    assert load_plugins(["reference"], [module]).implementing("ds_ops")[0] == "acme"


def test_gates_that_several_plugins_have() -> None:
    multiplies = checks.multiplies("float32")
    assert multiplies(FACTS) is None
    assert checks.multiplies("int8")(FACTS) == "Acme X1 does not multiply int8"
    wide = checks.wide_latents("it multiplies no FP8")
    assert wide(FACTS) is None
    for kv in ("float8_e4m3fn", FP8_GROUPS):
        assert wide(replace(FACTS, kv_dtype=kv)) == (
            "it multiplies no FP8: pass --kv-cache-dtype auto"
        )
    same = replace(FACTS, index_dtype="bfloat16")
    assert checks.same_index(same) is None
    assert "pass --index-cache-dtype bfloat16" in str(checks.same_index(FACTS))
    assert checks.sixteen_bytes(replace(FACTS, shape=(3, 64, 128))) is None
    assert "33 values are none" in str(checks.sixteen_bytes(replace(FACTS, shape=(3, 64, 33))))


@given(st.lists(st.integers(0, 9)), st.integers(0, 8))
def test_a_variable_shows_devices_up_to_the_first_that_none_has(ids: list[int], n: int) -> None:
    shown = visible(", ".join(map(str, ids)), n)
    assert shown == ids[: len(shown)] and all(i < n for i in shown)
    assert len(shown) == len(ids) or ids[len(shown)] >= n
    assert visible("", n) == [] == visible("-1", n) == visible("GPU-1f", n)


def test_what_torch_was_built_for_is_read_from_its_version_file(tmp_path: Path) -> None:
    write(tmp_path, {"version.py": "hip: Optional[str] = '7.1.2'\nxpu = None\n"})
    folder = {"torch": tmp_path}.get
    assert torch_built_for("hip", folder) == "7.1.2"
    assert torch_built_for("xpu", folder) == "" == torch_built_for("hip", {}.get)
