"""Kernels of the previous contracts, called through their adapters, conform to the present ones."""

from __future__ import annotations

from dataclasses import replace

from ds_runtime.ops.reference.attention import ReferenceMlaAbsorb
from ds_runtime.ops.spec import DeviceInfo, Kernel, Offers
from ds_runtime.ops.table import OPS
from ds_runtime.testing.conformance import cases_for, check_case, facts_for

FACTS = facts_for(DeviceInfo("cpu", "any", "any"), "float32")


class FirstAbsorb(ReferenceMlaAbsorb):
    """Absorbed queries alone, as version 1 of mla_absorb has them."""

    def apply_q(self, q_nope, packed):  # type: ignore[override]
        none = q_nope.new_empty(*q_nope.shape[:2], 0)
        return super().apply_q(q_nope, none, packed)


def test_absorbed_queries_get_their_rope_part_behind_them():
    op, formats = OPS["mla_absorb"], frozenset({"dense", "fp8_block"})
    kernel = Kernel(op, f"{__name__}:FirstAbsorb", "older", formats=formats, contract=1)
    offers = Offers((kernel,))
    cases = list(cases_for([kernel], FACTS))
    assert len(cases) > 2
    for one, case in cases:
        check_case(one, case, offers).raise_if_failed()
    taken_for_new = replace(kernel, contract=op.version)
    for _, case in cases:
        assert not check_case(taken_for_new, case, offers).ok
