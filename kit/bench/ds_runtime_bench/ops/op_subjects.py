"""Which subject measures which op, and the one of the fusion before attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

from ds_runtime.ops.weight import MlaWeights
from ds_runtime_bench.ops import work
from ds_runtime_bench.ops.inputs import INPUTS
from ds_runtime_bench.ops.place import (
    Place,
    Subject,
    copied,
    held,
    pack_copies,
    random_weight,
    subject,
)
from ds_runtime_bench.ops.subjects import (
    Absorb,
    Decode,
    ExpandedDecode,
    Experts,
    Function,
    Linear,
    Router,
)


class MlaInputs:
    """`apply` over copies of one layer's weights before attention."""

    def __init__(self, place: Place) -> None:
        self.place, self.kernel = place, place.made()
        dims, fmt = place.facts.dims, place.facts.weight_format
        heads, inner, lora = (dims[k] for k in ("heads", "q_lora", "kv_lora"))
        qk, kv = dims["qk_nope"] + dims["qk_rope"], dims["qk_nope"] + dims["v"]
        shapes = (
            (inner, dims["hidden"]),
            (heads * qk, inner),
            (lora + dims["qk_rope"], dims["hidden"]),
            (heads * kv, lora),
        )
        base = [random_weight(place, *shape, fmt) for shape in shapes]

        def pack() -> object:
            four = (copied(weight, place.device) for weight in base)
            q_a, q_b, kv_a, kv_b = four
            norms = place.normal(inner), place.normal(lora)
            weights = MlaWeights(q_a, q_b, kv_a, kv_b, *norms)
            return self.kernel.pack(weights, place.facts)

        self.packed = pack_copies(place, pack)

    def at(self, tokens: int) -> Iterator[Subject]:
        place = self.place
        args = (
            place.normal(tokens, place.facts.dims["hidden"]),
            1e-6,
            place.positions(tokens),
            place.cos_sin(tokens),
            place.cache(-(-max(1, tokens) // place.facts.page_size)),
            place.positions(tokens),
        )
        calls = [partial(self.kernel.apply, *args, packed) for packed in self.packed]
        todo = work.mla_inputs(place.facts.dims, held(place), place.facts.dtype, tokens)
        yield subject(place, "", calls, todo, self.packed)


MAKERS: Mapping[str, Callable[[Place], Function | Linear | Experts | Decode | MlaInputs]] = {
    **dict.fromkeys(INPUTS, Function),
    "linear": Linear,
    "mla_absorb": Absorb,
    "mla_inputs": MlaInputs,
    "experts": Experts,
    "mla_decode": Decode,
    "mha_decode": ExpandedDecode,
    "router_logits": Router,
}
