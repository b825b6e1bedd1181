"""What a call gives back, as the table has it, is what references give back for every sample."""

from __future__ import annotations

import pytest
import torch

from ds_runtime.ops.contract import DeviceInfo, Kernel
from ds_runtime.ops.contracts.results import form
from ds_runtime.ops.formats import FORMATS
from ds_runtime.ops.table import OPS, RESULTS
from ds_runtime.plugins.manager import load_plugins
from ds_runtime_kit.checks.conformance import cases_for, facts_for, run_case

HOST = DeviceInfo("cpu", "host", "any")
# These only write; the next are for kernels that have them, which no reference does.
SILENT = {"lora_delta", "cache_write", "cache_move"}
EXTRA = {"linear.apply_quantized", "linear.apply_float32", "experts.apply_quantized"}
TAGS = frozenset({"latent_pages.v1", "expanded_pages.v1", "index_pages.v1"})


class Seen:
    """A reference that notes what it gives, and what the table says of that."""

    def __init__(self, name, facts, made, found):
        self._name, self._facts, self._made, self._found = name, facts, made, found

    def __getattr__(self, name):
        own = f"{self._name}.{name}"
        value = getattr(self._made, name)
        if own not in RESULTS:
            return value
        return looked(own, self._facts, value, self._found)


def looked(name, facts, call, found):
    def run(*args):
        result = call(*args)  # of a foreign Packed: TypeError
        expected = RESULTS[name](facts, *args)
        results = result if isinstance(result, tuple) else (result,)
        found.append((name, expected, tuple(map(form, results))))
        return result

    return run


def forms(kernel, case, monkeypatch, offers):
    """Of all calls."""
    from ds_runtime_kit.checks import conformance

    found, name = [], kernel.op.name

    def load(_):
        made = plain(kernel)
        if kernel.op.kind == "function":
            return looked(name, case.facts, made, found)
        return lambda facts: Seen(name, facts, made(facts), found)

    with monkeypatch.context() as patch:
        plain = conformance.load_kernel
        patch.setattr(conformance, "load_kernel", load)
        run_case(kernel, case, offers)
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("op", [name for name in OPS if name not in SILENT])
def test_references_give_what_the_table_says(monkeypatch, op, dtype):
    facts = facts_for(HOST, dtype)
    offers = load_plugins(()).offers(facts)
    kernel = Kernel(
        OPS[op], OPS[op].reference, "here", formats=frozenset(FORMATS), layouts=TAGS,
        contract=OPS[op].version, phases=frozenset({"prefill", "decode", "verify", "tree"}),
    )  # fmt: skip
    methods = set()
    cases = [case for _, case in cases_for((kernel,), facts)]
    assert cases
    for case in cases:
        for name, expected, found in forms(kernel, case, monkeypatch, offers):
            assert found == expected, (name, case.label)
            methods.add(name)
    assert methods == {n for n in RESULTS if n.partition(".")[0] == op} - EXTRA


def test_the_table_has_every_op_that_gives_something_back():
    assert {name.partition(".")[0] for name in RESULTS} | SILENT == set(OPS)


def test_forms_are_of_tensors():
    assert form(torch.zeros(2, 3)) == ((2, 3), "float32")
