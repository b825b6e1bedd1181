"""Plugins of older contracts, frozen as they were written, load, conform and serve."""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from faulty import tiny_config

from ds_runtime.assemble import assemble
from ds_runtime.config import EngineConfig
from ds_runtime.ops.bind import refusal
from ds_runtime.ops.spec import DeviceInfo, Kernel, Offers
from ds_runtime.ops.table import OPS
from ds_runtime.plugins import load_plugins
from ds_runtime_kit.checks.conformance import cases_for, check_case, facts_for

GOLDEN = Path(__file__).parents[1] / "golden"
FOLDERS = sorted(GOLDEN.glob("contracts_*"))
DEVICE = DeviceInfo("cpu", "Golden One", "golden1")


def digest(folder: Path) -> str:
    files = sorted(f for f in folder.rglob("*") if f.is_file() and f.suffix != ".pyc")
    found = hashlib.sha256()
    for file in files:
        found.update(f"{file.relative_to(folder)}\n".encode() + file.read_bytes())
    return found.hexdigest()


@pytest.fixture(scope="module")
def golden() -> Any:
    sys.path.insert(0, str(FOLDERS[0]))
    try:
        import ds_golden_1

        yield ds_golden_1
    finally:
        sys.path.remove(str(FOLDERS[0]))
        for name in [n for n in sys.modules if n.split(".")[0] == "ds_golden_1"]:
            del sys.modules[name]


@pytest.fixture(scope="module")
def offers(golden: ModuleType) -> Offers:
    found = load_plugins([], [golden])
    offered = found.offers(facts_for(DEVICE, "float32"))
    assert {r.refusal for r in found.reports.values()} == {None}
    return offered


@contextmanager
def imported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The package of a golden plugin, forgotten again in the end."""
    package = f"ds_golden_{FOLDERS.index(folder) + 1}"
    monkeypatch.syspath_prepend(str(folder))
    yield importlib.import_module(package)
    for name in [n for n in sys.modules if n.split(".")[0] == package]:
        del sys.modules[name]


@pytest.fixture
def second(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with imported(FOLDERS[1], monkeypatch) as package:
        yield package


@pytest.fixture
def third(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with imported(FOLDERS[2], monkeypatch) as package:
        yield package


def named(offers: Offers, op: str) -> Kernel:
    (kernel,) = (k for k in offers.kernels if k.provider == "golden_1" and k.op.name == op)
    return kernel


def test_golden_plugins_are_as_they_were() -> None:
    assert {f.name: digest(f) for f in FOLDERS} == json.loads(
        (GOLDEN / "digests.json").read_text()
    ), "a golden plugin is never mended: add a folder for the new contracts"


def test_every_kernel_of_older_contracts_conforms_to_the_present_ones(offers: Offers) -> None:
    mine = [k for k in offers.kernels if k.provider == "golden_1"]
    assert {k.contract for k in mine} == {1}
    assert max(k.op.version for k in mine) > 1, "none of them needs an adapter"
    facts = facts_for(DEVICE, "float32")
    for kernel in mine:
        assert len(cases_for([kernel], facts)) > 3, kernel.name
    for kernel, case in cases_for(mine, facts):
        check_case(kernel, case, offers).raise_if_failed()


def test_without_its_adapter_an_older_kernel_is_wrong(offers: Offers) -> None:
    """What the adapter is for: taken for a kernel of version 2, it mistakes rows for sequences."""
    kernel = named(offers, "mla_decode")
    present = replace(kernel, contract=kernel.op.version)
    cases = cases_for([present], facts_for(DEVICE, "float32"))
    failed = {c.label for k, c in cases if c.label != "long" and not check_case(k, c, offers).ok}
    assert failed == {"two rows each", "uneven rows"}


def test_absorption_of_the_first_contract_gets_rope_parts_behind_it(second: ModuleType) -> None:
    facts = facts_for(DeviceInfo("cpu", "Golden Two", "golden2"), "float32")
    found = load_plugins([], [second])
    (kernel,) = (k for k in found.offers(facts).kernels if k.provider == "golden_2")
    assert (kernel.contract, kernel.op.version) == (1, 2)
    offers, cases = Offers((kernel,)), list(cases_for([kernel], facts))
    assert len(cases) > 2
    for one, case in cases:
        check_case(one, case, offers).raise_if_failed()
    taken_for_new = replace(kernel, contract=2)
    assert not any(check_case(taken_for_new, case, offers).ok for _, case in cases)


def test_attention_of_the_first_contract_gets_whole_heads(third: ModuleType) -> None:
    facts = facts_for(DeviceInfo("cpu", "Golden Three", "golden3"), "float32")
    found = load_plugins([], [third])
    (kernel,) = (k for k in found.offers(facts).kernels if k.provider == "golden_3")
    assert (kernel.contract, kernel.op.version) == (1, 2)
    offers, cases = Offers((kernel,)), list(cases_for([kernel], facts))
    assert len(cases) > 3
    for one, case in cases:
        check_case(one, case, offers).raise_if_failed()
    taken_for_new = replace(kernel, contract=2)
    assert not any(check_case(taken_for_new, case, offers).ok for _, case in cases)


@pytest.mark.parametrize("version", [0, 3])
def test_a_contract_too_old_or_too_new_is_refused(offers: Offers, version: int) -> None:
    kernel = replace(named(offers, "mla_decode"), contract=version)
    said = refusal(kernel, facts_for(DEVICE, "float32"))
    assert said == f"written for contract {version} of mla_decode, this runtime has 2 and 1"
    kernel = replace(named(offers, "silu_mul"), contract=version)
    said = refusal(kernel, facts_for(DEVICE, "float32"))
    assert said == f"written for contract {version} of silu_mul, this runtime has 1"


def test_it_is_selected_with_its_layout_and_the_plan_says_adapted(
    golden: ModuleType, tmp_path: Path
) -> None:
    config = EngineConfig(
        model=str(tiny_config(tmp_path / "m")), platform="golden_1", plugins=("cpu",)
    )
    plan = assemble(config, (), [golden]).plan
    assert (plan.kv_layout, plan.page_size) == ("golden_rows.v1", 32)
    rows = {r.op: r for r in plan.rows}
    assert rows["mla_decode"].kernel == "golden_1.mla_decode"
    assert rows["mla_decode"].note == "frozen; written for contract 1, adapted to 2"
    assert (rows["silu_mul"].kernel, rows["silu_mul"].note) == ("golden_1.silu_mul", "frozen")
    described = assemble(replace(config, platform="auto"), (), [golden], device="golden").plan
    assert [r.kernel for r in described.rows] == [r.kernel for r in plan.rows]


def test_kernels_of_the_tree_are_written_for_the_present_contracts() -> None:
    plugins = load_plugins()
    kernels = plugins.offers(facts_for(DeviceInfo("cpu", "any", "any"), "float32")).kernels
    assert {k.op.name for k in kernels} == set(OPS)
    assert {k.name: k.contract for k in kernels if k.contract != k.op.version} == {}
