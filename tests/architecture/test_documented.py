"""Every hook and every op says what it is, and what it names exists."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from typing import Any

import pytest

from ds_runtime.ops import contracts, table
from ds_runtime.ops.contract import FP4_KEYS, DeviceInfo, load_attr
from ds_runtime.ops.declare import Area, Op
from ds_runtime.ops.reference.cases import Case
from ds_runtime.ops.table import OPS, Ops
from ds_runtime.plugins import hookspecs
from ds_runtime_kit.checks.conformance import facts_for

ROOT = Path(__file__).parents[2]
ops = pytest.mark.parametrize("op", OPS.values(), ids=OPS)


def methods(protocol: Any) -> Iterator[tuple[str, Any]]:
    for name, member in vars(protocol).items():
        if inspect.isfunction(member) and (name == "__call__" or not name.startswith("_")):
            yield name, member


def test_the_list_of_hooks_is_complete() -> None:
    specified = [n for n, f in vars(hookspecs).items() if n.startswith("ds_") and callable(f)]
    assert sorted(specified) == sorted(hookspecs.HOOKS)
    assert set(hookspecs.OFFER_HOOKS) <= set(hookspecs.HOOKS)


@pytest.mark.parametrize("hook", hookspecs.HOOKS)
def test_a_hook_is_documented_with_its_signature(hook: str) -> None:
    function = getattr(hookspecs, hook)
    assert len(inspect.getdoc(function) or "") > 40
    signature = str(inspect.signature(function)).replace("'", "")
    assert f"def {hook}{signature}" in (ROOT / "docs/hooks.md").read_text()


def test_the_docs_name_no_hook_that_does_not_exist() -> None:
    named = set(re.findall(r"^def (ds_\w+)\(", (ROOT / "docs/hooks.md").read_text(), re.M))
    assert named == set(hookspecs.HOOKS)


def test_every_op_of_every_area_is_in_the_table_and_has_a_field() -> None:
    found = {}
    for area in walk_packages(contracts.__path__, f"{contracts.__name__}."):
        module = import_module(area.name)
        areas = [a for a in vars(module).values() if inspect.isclass(a) and issubclass(a, Area)]
        found |= {n: op for a in areas for n, op in vars(a).items() if isinstance(op, Op)}
    assert found == OPS
    view = Ops.of({}, "here")
    assert list(vars(view)) == list(OPS)
    for op in OPS:
        with pytest.raises(RuntimeError, match=f"op '{op}' is not bound at site 'here'"):
            getattr(view, op)()
    with pytest.raises(AttributeError, match="frozen"):
        view.rms_norm = None
    assert table.__doc__


@ops
def test_a_contract_speaks_of_versions_that_are_served(op: Op) -> None:
    """A version that is named is the present one, or one whose kernels are adapted."""
    doc = inspect.getdoc(load_attr(op.protocol)) or ""
    named = {int(n) for n in re.findall(r"\b[Vv]ersion (\d+)", doc)}
    assert named <= set(op.served), f"{op.name} names versions {named}, served are {op.served}"


@ops
def test_an_op_says_what_its_arguments_are(op: Op) -> None:
    """Each argument of each method, here or in the contract that its docstring refers to."""
    doc = inspect.getdoc(load_attr(op.protocol)) or ""
    arguments = {name for names in op.parameters.values() for name in names}
    missing = [n for n in arguments if not re.search(rf"\b{n}\b", doc)]
    refers = re.search(r"\bas in [A-Z]\w+\b", doc)
    assert not missing or refers, f"the contract of {op.name} does not say what {missing} are"


@ops
def test_an_op_states_its_contract(op: Op) -> None:
    protocol = load_attr(op.protocol)
    assert len(inspect.getdoc(protocol) or "") > 60, "the docstring is the contract"
    assert op.summary
    assert {"float32", "bfloat16", "float16"} <= set(op.tolerance)
    fours = {row for row in op.tolerance if row.endswith("a4") or row == FP4_KEYS}  # four bits
    assert all(0 <= op.tolerance[r] < (0.3 if r in fours else 0.1) for r in op.tolerance)
    named = dict(methods(protocol))
    assert ("__call__" in named) is (op.kind == "function")
    for name, method in named.items():
        signature = inspect.signature(method)
        parameters = list(signature.parameters.values())[1:]
        assert signature.return_annotation is not inspect.Signature.empty, name
        assert all(p.annotation is not inspect.Parameter.empty for p in parameters), name


@ops
def test_what_an_op_names_exists(op: Op) -> None:
    assert callable(load_attr(op.reference))
    facts = facts_for(DeviceInfo("cpu", "any", "any"), "float32")
    cases = list(load_attr(op.samples)(facts))
    assert len(cases) >= 3
    assert all(isinstance(c, Case) and c.calls for c in cases)
    assert len({c.label for c in cases}) == len(cases), "labels differ"
    assert set(op.uses) <= set(OPS)
    if op.composition:
        fused = list(inspect.signature(load_attr(op.composition)).parameters)
        contract = list(inspect.signature(load_attr(op.protocol).__call__).parameters)
        assert fused == ["ops", *contract[1:]]
        assert op.uses
