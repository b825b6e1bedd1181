"""--enable-torch-compile: small ops of small steps, compiled before anything is served."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_runtime import LLM, SamplingParams
from ds_runtime.assembly.assemble import assemble
from ds_runtime.config import EngineConfig
from ds_runtime.engine.device.first_steps import representatives
from ds_runtime.errors import ConfigError, KernelError
from ds_runtime.ops.binding.bound import BoundOps
from ds_runtime.ops.binding.by_rows import shares_of
from ds_runtime.ops.contract import DeviceInfo, Kernel
from ds_runtime.ops.kernel import RowRange
from ds_runtime.ops.reference import activation, norm
from ds_runtime.ops.reference.compiling import check_compiler
from ds_runtime.ops.reference.matrices import moe
from ds_runtime.ops.table import OPS
from ds_runtime.plugins.manager import load_plugins
from ds_runtime_kit.checks.conformance import check_kernel, facts_for
from examples import examples
from parts import is_deep

# Modules of torch that its compiler imports.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
SMALL = {"rms_norm", "add_rms_norm", "silu_mul", "route"}
FLAGS = ("enable_torch_compile",)


def decided(device=None, **flags):
    config = EngineConfig(model="demo", enable_torch_compile=True, **flags)
    return assemble(config, (*FLAGS, *flags), device=device)


def compiled(assembly):
    return {d.op: d.note for d in assembly.binding.decisions if d.provider == "compiled"}


def test_small_ops_of_small_steps_are_bound_on_a_cpu_whose_steps_run_op_by_op():
    assembly = decided(platform="cpu", torch_compile_max_bs=8)
    assert compiled(assembly) == {op: f"cpu.{op} otherwise" for op in SMALL}
    assert assembly.facts.compiled_rows == 8 and not assembly.facts.graph_capture
    (change,) = (c for c in assembly.plan.changes if c[0] == "disable_graph")
    assert change[1:] == (
        "False → True",
        "core",
        "what torch.compile makes for the host cannot be recorded",
    )


@pytest.mark.parametrize("device", ["h200", "b200", "a100", "mi300x", "b60"])
def test_steps_that_a_gpu_captures_hold_them(device):
    assembly = decided(device)
    found = compiled(assembly)
    assert set(found) >= SMALL and assembly.facts.graph_capture
    assert all(note.endswith(" otherwise") for note in found.values())


def test_nothing_is_offered_unless_asked_for():
    config = EngineConfig(model="demo", torch_compile_max_bs=8)
    assembly = assemble(config, ("torch_compile_max_bs",), device="h200")
    assert not compiled(assembly) and assembly.facts.compiled_rows == 0
    assert "compiled" not in {k.provider for k in assembly.offers.kernels}


def test_a_pin_beats_it():
    assert "silu_mul" not in compiled(decided(platform="cpu", pin=("silu_mul=cpu",)))


@pytest.mark.parametrize("most", [0, -3])
def test_rows_are_at_least_one(most):
    with pytest.raises(ConfigError, match=r"--torch-compile-max-bs .*: must be at least 1"):
        EngineConfig(torch_compile_max_bs=most)


def some_rows(bounds):
    first, below = bounds
    return not below or first < below


def bounds_to(most):
    return st.tuples(st.integers(0, most), st.integers(0, most)).filter(some_rows)


@given(st.tuples(st.integers(-9, 9), st.integers(-9, 9)))
def test_bounds_that_no_call_meets_are_refused(bounds):
    if min(bounds) >= 0 and some_rows(bounds):
        assert RowRange("", *bounds).holds(bounds[0])
    else:
        with pytest.raises(ValueError, match="no number of rows is at least first"):
            RowRange("", *bounds)


def bounded(i, first, below):
    return Kernel(OPS["silu_mul"], f"m:k{i}", f"p{i}", rows=RowRange("", first, below))


@settings(max_examples=examples(300), deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 9)).filter(some_rows), min_size=1, max_size=5
    ),
    st.integers(0, 12),
)
def test_functions_divide_calls_by_rows(bounds, rows):
    """The first that asks for so many rows, of those before the first that asks for nothing."""
    accepted = [bounded(i, *each) for i, each in enumerate(bounds)]
    shares = shares_of(accepted)
    free = next((k for k in accepted if not k.rows.bounded), None)
    before = accepted if free is None else accepted[: accepted.index(free)]
    expected = next((k for k in before if k.rows.holds(rows)), free or accepted[0])
    if shares is None:
        assert expected is accepted[0]
    else:
        serving = next((k for k in shares.some if k.rows.holds(rows)), shares.rest)
        assert serving is expected


@settings(max_examples=examples(200), deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.integers(0, 40)).filter(some_rows), min_size=1, max_size=4
    ),
    st.integers(1, 40),
    st.integers(1, 9),
    st.sets(st.integers(0, 3)),
)
def test_every_variant_of_a_kernel_comes_at_rows_that_it_serves(bounds, most, step, absent):
    """Whichever of the kernels leave their calls to the rest: they hold another form of a weight,
    which this one lacks."""
    shares = shares_of([bounded(i, *each) for i, each in enumerate(bounds)])
    if shares is None:
        return
    variants = [
        (lambda rows, k=kernel: (k.name, rows // step), ranges)
        for kernel in shares.kernels
        for ranges in shares.rows_of(kernel, most)
    ]
    rows = representatives(variants)
    here = [k for i, k in enumerate(shares.some) if i not in absent]

    def variant(n):
        serves = next((k for k in here if k.rows.holds(n)), shares.rest)
        return serves.name, n // step

    assert {variant(n) for n in rows} == {variant(n) for n in range(1, most + 1)}


def test_a_kernel_that_fails_is_the_one_that_is_named(monkeypatch):
    """Of two that divide one place's calls."""
    from ds_runtime.ops.reference import compiling

    def fails(x):
        raise ValueError("planted")

    monkeypatch.setattr(compiling, "silu_mul", fails)
    assembly = decided(platform="cpu", torch_compile_max_bs=2, dtype="float32")
    bound = BoundOps(assembly.binding)
    (layer, module) = next(
        (s.layer, s.module) for s, _ in assembly.binding.choices if s.op == "silu_mul"
    )
    with bound.checking(assembly.plugins.owners):
        view = bound.at(layer, module)
        assert view.silu_mul(torch.ones(3, 8)).shape == (3, 4)
        with pytest.raises(KernelError, match=r"kernel compiled\.silu_mul .*planted"):
            view.silu_mul(torch.ones(2, 8))


@pytest.fixture
def entered():
    """Calls of references, counted by their code: what is compiled has another."""
    functions = (norm.rms_norm, norm.add_rms_norm, activation.silu_mul, moe.route)
    codes = {f.__code__: f.__name__ for f in functions}
    seen = Counter()

    def look(frame, event, arg):
        if event == "call" and frame.f_code in codes:
            seen[codes[frame.f_code]] += 1

    sys.setprofile(look)
    yield seen
    sys.setprofile(None)


@pytest.mark.slow
def test_it_compiles_where_it_may_and_never_else(entered):
    """A call like none before runs op by op."""
    from ds_runtime.ops.reference.compiling import compiling, silu_mul

    def graphs():
        return torch._dynamo.utils.counters["stats"]["unique_graphs"]

    def call(*shape):
        x = torch.randn(*shape)
        entered.clear()
        out = silu_mul(x)
        ran = dict(entered)
        assert torch.allclose(out, activation.silu_mul(x), atol=1e-6)
        return ran

    before = graphs()
    assert call(5, 24) == {"silu_mul": 1} and graphs() == before
    with compiling():
        call(5, 24)
    made = graphs()
    assert made == before + 1
    assert call(5, 24) == call(3, 24) == call(31, 24) == {}  # any number of rows from two on
    assert call(5, 26) == {"silu_mul": 1}  # another width
    assert graphs() == made


def run(tmp_path, **environ):
    code = "from ds_runtime.cli import main; import sys; sys.exit(main(sys.argv[1:]))"
    args = ["generate", "a", "--enable-torch-compile", "--platform", "cpu"]
    clean = {k: v for k, v in os.environ.items() if k not in ("CXX", "CC")}
    clean["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", code, *args],
        env={**clean, **environ},
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stderr


def test_without_a_compiler_the_start_says_so(tmp_path):
    code, said = run(tmp_path, PATH=str(tmp_path))
    assert code == 1 and said.splitlines()[-1].endswith(
        "--enable-torch-compile: it needs a C++ compiler, and there is none: install g++ or "
        "clang++, or leave the flag out"
    )


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"CXX": "/nowhere/g++"}, "CXX names /nowhere/g++"),
        ({"CC": "/nowhere/gcc"}, "CC names /nowhere/gcc"),
        ({"CXX": "", "CC": "/nowhere/gcc"}, "CC names /nowhere/gcc"),
        ({"CXX": "/nowhere/g++", "CC": sys.executable}, "CXX names /nowhere/g++"),
    ],
)
def test_a_compiler_that_is_not_there_is_named(monkeypatch, environ, named):
    for name in ("CXX", "CC"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"and {re.escape(named)}, which is not there: install"):
        check_compiler()


@pytest.mark.slow
def test_a_compiler_that_fails_is_a_sentence(tmp_path):
    code, said = run(tmp_path, CXX="/bin/false")
    assert code == 1 and "Traceback" not in said
    assert "does not compile here: " in said and "leave the flag out" in said


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_answers_stay_and_nothing_compiles_while_it_serves(dtype, entered):
    texts = []
    prompts = ["Once upon a time there was", "def main():", "a", "b" * 60]
    params = SamplingParams(max_tokens=24, temperature=0.0)
    values = {"dtype": dtype, "kv_memory": "150MB", "chunked_prefill_size": 16}
    for on in (False, True):
        with LLM("demo", platform="cpu", enable_torch_compile=on, **values) as llm:
            stats = torch._dynamo.utils.counters["stats"]
            entered.clear()
            before = dict(stats)
            texts.append([o.text for o in llm.generate(prompts, params)])
            assert dict(stats) == before and not entered
    if dtype == "float32":
        assert texts[0] == texts[1]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", *(["float32"] if is_deep() else [])])
@pytest.mark.parametrize("op", sorted({*SMALL, "rope"}))
def test_conforms(op, dtype):
    """In float32 before a release: in each run its answers are those without it, above."""
    from ds_runtime.ops.reference.compiling import compiling

    cpu = DeviceInfo("cpu", "cpu", "any")
    facts = replace(facts_for(cpu, dtype), compiled_rows=1 << 20)
    (kernel,) = (
        k
        for k in load_plugins(()).offers(facts).kernels
        if k.provider == "compiled" and k.op.name == op
    )
    with compiling():
        results = check_kernel(kernel, facts)
    assert results and not [r for r in results if r.failure]
