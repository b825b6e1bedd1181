"""A plugin of an older generation of contracts, frozen, loads, conforms and is selected."""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from faulty import tiny_config

from ds_runtime.assembly.assemble import assemble
from ds_runtime.config import EngineConfig
from ds_runtime.ops.binding.bind import refusal
from ds_runtime.ops.contract import DeviceInfo, Kernel, Offers
from ds_runtime.ops.table import OPS
from ds_runtime.plugins.manager import load_plugins
from ds_runtime.testing.conformance import cases_for, check_case, facts_for

GOLDEN = Path(__file__).parents[1] / "golden"
FOLDER = GOLDEN / "older_generation"
DEVICE = DeviceInfo("cpu", "Older One", "older1")


def digest(folder: Path) -> str:
    files = sorted(f for f in folder.rglob("*") if f.is_file() and f.suffix != ".pyc")
    found = hashlib.sha256()
    for file in files:
        found.update(f"{file.relative_to(folder)}\n".encode() + file.read_bytes())
    return found.hexdigest()


@pytest.fixture(scope="module")
def older() -> Any:
    sys.path.insert(0, str(FOLDER))
    try:
        import ds_older

        yield ds_older
    finally:
        sys.path.remove(str(FOLDER))
        for name in [n for n in sys.modules if n.split(".")[0] == "ds_older"]:
            del sys.modules[name]


@pytest.fixture(scope="module")
def offers(older: ModuleType) -> Offers:
    found = load_plugins([], [older])
    offered = found.offers(facts_for(DEVICE, "float32"))
    assert {r.refusal for r in found.reports.values()} == {None}
    return offered


def named(offers: Offers, op: str) -> Kernel:
    (kernel,) = (k for k in offers.kernels if k.provider == "older" and k.op.name == op)
    return kernel


def test_the_older_plugin_is_as_it_was() -> None:
    assert {FOLDER.name: digest(FOLDER)} == json.loads((GOLDEN / "digests.json").read_text()), (
        "a frozen plugin is never mended: where a contract changes, its adapter is"
    )


def test_every_kernel_of_older_contracts_conforms_to_the_present_ones(offers: Offers) -> None:
    mine = [k for k in offers.kernels if k.provider == "older"]
    assert {k.op.name for k in mine if k.contract != k.op.version} == {"mla_decode"}
    facts = facts_for(DEVICE, "float32")
    for kernel in mine:
        assert len(cases_for([kernel], facts)) > 3, kernel.name
    for kernel, case in cases_for(mine, facts):
        check_case(kernel, case, offers).raise_if_failed()


def test_without_its_adapter_an_older_kernel_is_wrong(offers: Offers) -> None:
    """What the adapter is for: taken for a kernel of version 1, it mistakes rows for sequences."""
    kernel = named(offers, "mla_decode")
    present = replace(kernel, contract=kernel.op.version)
    cases = cases_for([present], facts_for(DEVICE, "float32"))
    failed = {c.label for k, c in cases if c.label != "long" and not check_case(k, c, offers).ok}
    assert failed == {"two rows each", "uneven rows"}


@pytest.mark.parametrize("version", [-1, 2])
def test_a_contract_too_old_or_too_new_is_refused(offers: Offers, version: int) -> None:
    kernel = replace(named(offers, "mla_decode"), contract=version)
    said = refusal(kernel, facts_for(DEVICE, "float32"))
    assert said == f"written for contract {version} of mla_decode, this runtime has 1 and 0"
    kernel = replace(named(offers, "silu_mul"), contract=version)
    said = refusal(kernel, facts_for(DEVICE, "float32"))
    assert said == f"written for contract {version} of silu_mul, this runtime has 1"


def test_contracts_begin_at_one_and_one_has_an_older_generation() -> None:
    assert {op.version for op in OPS.values()} == {1}
    assert {name: op.served for name, op in OPS.items() if op.adapter} == {"mla_decode": (1, 0)}


def test_it_is_selected_with_its_layout_and_the_plan_says_adapted(
    older: ModuleType, tmp_path: Path
) -> None:
    config = EngineConfig(
        model=str(tiny_config(tmp_path / "m")), platform="older", plugins=("cpu",)
    )
    plan = assemble(config, (), [older]).plan
    assert (plan.kv_layout, plan.page_size) == ("older_rows.v1", 32)
    rows = {r.op: r for r in plan.rows}
    assert rows["mla_decode"].kernel == "older.mla_decode"
    assert rows["mla_decode"].note == "frozen; written for contract 0, adapted to 1"
    assert (rows["silu_mul"].kernel, rows["silu_mul"].note) == ("older.silu_mul", "frozen")
    described = assemble(replace(config, platform="auto"), (), [older], device="older").plan
    assert [r.kernel for r in described.rows] == [r.kernel for r in plan.rows]


def test_kernels_of_the_tree_are_written_for_the_present_contracts() -> None:
    plugins = load_plugins()
    kernels = plugins.offers(facts_for(DeviceInfo("cpu", "any", "any"), "float32")).kernels
    assert {k.op.name for k in kernels} == set(OPS)
    assert {k.name: k.contract for k in kernels if k.contract != k.op.version} == {}
