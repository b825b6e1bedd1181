"""An op is declared once: a contract, a reference, and the model's list of places know its name."""

from __future__ import annotations

import ast
import filecmp
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from ds_runtime.ops.contract import Kernel
from ds_runtime.ops.kernel import Compiles, Footprint, Promises, RowRange
from ds_runtime.ops.table import OPS

ROOT = Path(__file__).parents[2]
ROOMS = (ROOT / "core", ROOT / "kit")
OPS_ROOM = Path("core/ds_runtime/ops")

# Rooms whose files call ops, or list where the model does.
CALLERS = tuple(
    f"core/ds_runtime/{room}/" for room in ("model", "engine", "lora", "weights", "description")
)
# These names are words, too: keys of configs, flags, parts of a model, fields of requests.
WORDS = frozenset(
    {"experts", "linear", "rope", "sample", "logprobs", "route", "embed", "index_topk", "silu_mul"}
)
ELSEWHERE = {  # file → why it names ops beside those that it calls
    "core/ds_runtime/assembly/rules.py": "leaves a fusion out of some draft layers",
    "core/ds_runtime/ops/binding/backends.py": "flags of other engines stand for pins of these ops",
    "core/ds_runtime/cli/known/kernels.py": "refused flags of other engines name the pin to give",
    "core/ds_runtime/ops/binding/invariant.py": "flags bring these ops: its errors name them",
    "core/ds_runtime/assembly/estimate.py": "what a step holds beside its weights",
    "core/ds_runtime/assembly/room.py": "second forms of experts give way first",
    "core/ds_runtime/ops/binding/adapters.py": "an adapter is named after its op",
    "core/ds_runtime/ops/reference/__init__.py": "offers second kernels of these ops",
    "core/ds_runtime/api.py": "hands out the references of these ops",
    "core/ds_runtime/measured/costs.py": "what loads of routed experts are",
    "core/ds_runtime/predict/calls.py": "which calls a step makes follows from fused ones",
    "core/ds_runtime/predict/places.py": "which ops make codes for a linear",
    "kit/bench/ds_runtime_bench/ops/tune.py": "codes are timed, and experts of other ranks",
    "kit/bench/ds_runtime_bench/ops/subjects.py": "a dim",
    "kit/bench/ds_runtime_bench/shapes.py": "keys of config.json",
    "kit/vendor/ds_runtime_kit/bisect/repro_case.py": "a kind of stored value",
    "kit/vendor/ds_runtime_kit/checks/conformance.py": "a dim",
    "kit/vendor/ds_runtime_kit/checks/inputs.py": "a cache is read and written by its own kernels",
    "kit/vendor/ds_runtime_kit/checks/refusals.py": "a dim",
    "kit/vendor/ds_runtime_kit/devices/null_kernels.py": "tokens must follow the random number",
    "kit/vendor/ds_runtime_kit/kit.py": "its kernels alone ask for pages of 64",
    "kit/vendor/ds_runtime_kit/models/tiny.py": "keys of config.json",
    "kit/vendor/ds_runtime_kit/support.py": "a true shape of each weight, for the gates",
}


def naming(op: str) -> set[str]:
    """The files of core and kit that name an op; of words, as a string or a field of a view."""
    found = rf"\b{op}\b" if op not in WORDS else rf"""["']{op}["']|\bops\.{op}\b"""
    files = (p for room in ROOMS for p in room.rglob("*.py"))
    return {p.relative_to(ROOT).as_posix() for p in files if re.search(found, p.read_text())}


def own(op: str) -> set[str]:
    """Its contract and its reference; a fusion's name their parts', too."""
    everyone = [OPS[op], *(o for o in OPS.values() if op in o.uses)]
    paths = (path for o in everyone for path in (o.protocol, o.reference))
    modules = {path.partition(":")[0].replace(".", "/") for path in paths}
    return {f"core/{module}.py" for module in modules}


def others(op: str) -> set[str]:
    return {f for f in naming(op) - own(op) if not f.startswith(CALLERS) and not shared(f)}


def shared(file: str) -> bool:
    """References build on each other, and contracts are worded by others; front ends have fields
    of requests that are called alike."""
    below = file.startswith((f"{OPS_ROOM}/reference/", f"{OPS_ROOM}/contracts/"))
    front = file.startswith(("core/ds_runtime/server/", "core/ds_runtime/offline/"))
    said = file in ("core/ds_runtime/sampling_params.py", "core/ds_runtime/ops/declare.py")
    return (below and file not in ELSEWHERE) or front or said


@pytest.mark.parametrize("op", OPS)
def test_an_op_is_named_where_it_is_declared_and_called(op: str) -> None:
    assert others(op) <= set(ELSEWHERE), "declare it with the op, or say why it stands here"


def test_files_that_name_ops_still_do() -> None:
    assert set(ELSEWHERE) <= {file for op in OPS for file in naming(op)}


CONTRACT = '''class ClampedSiluMul(Protocol):
    """silu(min(gate, limit)) · clamp(up, −limit, limit); all else as in SiluMul."""

    def __call__(self, gate_up: Tensor, limit: float) -> Tensor: ...


def clamped_silu_mul_samples(facts: Facts) -> Iterator[Case]:
    """Values on both sides of the limit."""
    for tokens, n in ((0, 64), (1, 8), (5, 33)):
        make = cases.Maker(facts, label := f"{tokens}x{n}")
        yield cases.case(label, facts, make.normal(tokens, 2 * n, scale=9), 7.0)


'''
FIELD = """    clamped_silu_mul: ClampedSiluMul = op(
        reference=f"{_REF}:clamped_silu_mul",
        tolerance={"float32": 1e-5, "bfloat16": 1.2e-2, "float16": 2e-3},
        results={"": lambda f, x, limit: ((half(x), name_of(x)),)},
        rows={"": (0,)},
        cost=Cost(
            {"": (lambda p, n: (p.normal(n, 2 * p.width), 7.0), _multiplied)}, by_width=True
        ),
        summary="SwiGLU activation of limited values",
    )
"""
REFERENCE = '''

def clamped_silu_mul(gate_up: Tensor, limit: float) -> Tensor:
    """Reference of ClampedSiluMul."""
    gate, up = gate_up.to(wide(gate_up.dtype)).chunk(2, dim=-1)
    limited = F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
    return limited.to(gate_up.dtype).contiguous()
'''
SITE = '        yield Site("silu_mul", mlp.layer, mlp.module)\n'

USE = """
import sys
from dataclasses import replace
from importlib.machinery import PathFinder

sys.meta_path.insert(0, PathFinder)  # the copy comes before the tree, however that is installed
import torch
from ds_runtime.config import EngineConfig
from ds_runtime.ops.binding.bound import BoundOps
from ds_runtime.ops.kernel import Promises
from ds_runtime.ops.table import OPS
from ds_runtime.platform.contract import Ceilings
from ds_runtime.plugins.manager import load_plugins
from ds_runtime_bench.ops import measure
from ds_runtime_kit.checks.conformance import cases_for, check_case
from ds_runtime_kit.kit import check_rows, subjects

op = "clamped_silu_mul"
assert OPS[op].kind == "function" and OPS[op].parameters[""] == ("gate_up", "limit")
for platform in ("null", "cpu"):
    config = EngineConfig(platform=platform, plugins=(platform,), dtype="float32")
    assembly = measure.assembled(config, ("platform",), "tiny-v3", None)
    view = BoundOps(assembly.binding).at(0, "mlp")
    y = view.clamped_silu_mul(torch.full((2, 8), 50.0), 7.0)
    assert y.shape == (2, 4) and round(float(y.max())) == (0 if platform == "null" else 49), y
    type(assembly.platform).ceilings = lambda self, rank=0: Ceilings(1e9, {}, 1 << 20)
    measured = measure.Measurement(assembly, 20, 32 << 20, 1e-4)
    figures = list(measured.figures([op], (3,), ()))
    names = {f"{f.kernel}, {f.what}" for f in figures}
    assert figures and not any(f.error for f in figures), figures
    assert names == {f"{'null' if platform == 'null' else 'reference'}.{op}, 320"}, names
found = [s for s in subjects(load_plugins(()), assembly.facts.device) if s.kernel.op.name == op]
assert {s.kernel.name for s in found} == {"reference.clamped_silu_mul"}
for subject in found[:3]:
    cases = cases_for((subject.kernel,), subject.facts)
    assert len(cases) == 3
    for kernel, case in cases:
        check_case(kernel, case).raise_if_failed()
    promised = replace(subject.kernel, promises=Promises(batch_invariant=True))
    assert check_rows(replace(subject, kernel=promised))
print("served")
"""


def test_another_op_touches_three_files(tmp_path: Path) -> None:
    """A contract, a reference and the model's list of places: then there are kernels that compute
    nothing, inputs to time it with and cases of conformance."""
    copy = tmp_path / "ds_runtime"
    shutil.copytree(ROOT / "core/ds_runtime", copy, ignore=shutil.ignore_patterns("__pycache__"))
    contract, reference = copy / "ops/contracts/activation.py", copy / "ops/reference/activation.py"
    area = "class ActivationOps(Area):"
    contract.write_text(contract.read_text().replace(area, CONTRACT + area) + FIELD)
    reference.write_text(reference.read_text() + REFERENCE)
    sites = copy / "description/sites.py"
    listed = sites.read_text()
    assert SITE in listed
    sites.write_text(listed.replace(SITE, SITE + SITE.replace("silu_mul", "clamped_silu_mul")))
    assert changed(copy) == {contract, reference, sites}
    ran = subprocess.run(
        [sys.executable, "-c", USE],
        env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.stdout.endswith("served\n"), ran.stderr[-2000:]


def changed(copy: Path) -> set[Path]:
    """Files of the copy that differ."""
    files = [p for p in copy.rglob("*") if p.is_file()]
    own = ROOT / "core/ds_runtime"
    return {p for p in files if not filecmp.cmp(p, own / p.relative_to(copy), shallow=False)}


GROUPS = {"promises": Promises, "rows": RowRange, "footprint": Footprint, "compiles": Compiles}


def read_of(owners: frozenset[str]) -> Iterator[str]:
    """Attributes that the core reads of what has one of these names."""
    for path in (ROOT / "core").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                owner = node.value
                name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
                if name in owners:
                    yield node.attr


@pytest.mark.parametrize("group", GROUPS)
def test_no_field_of_a_group_of_a_kernel_is_dead(group: str) -> None:
    """The binder, the model or the memory estimate reads each, or a method of the group does."""
    source = (ROOT / OPS_ROOM / "kernel.py").read_text()
    (own,) = (
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == GROUPS[group].__name__
    )
    asked = {
        node.attr
        for method in own.body
        if isinstance(method, ast.FunctionDef) and method.name != "__post_init__"
        for node in ast.walk(method)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self"
    }
    read = {*read_of(frozenset({group})), *asked}
    assert {f.name for f in fields(GROUPS[group])} <= read
    assert "taps" not in read


def test_a_kernel_has_few_fields_and_none_is_dead() -> None:
    names = {f.name for f in fields(Kernel)}
    assert len(names) <= 16 and GROUPS.keys() <= names
    read = {*read_of(frozenset({"kernel", "k", "self", "chosen", "each", "best"}))}
    assert names <= read
    assert "taps" not in read
