"""The native small ops over tensors of any strides, and over such as no contract allows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_runtime.ops.contract import Routing
from ds_runtime_cpu import native, prologue, routing, sampling, small

pytestmark = pytest.mark.skipif(native.why_not() is not None, reason="no native library")

ROWS, HEADS, D, LORA, EXPERTS, VOCAB = 4, 3, 8, 64, 16, 70
ROUTING = Routing(4, EXPERTS, 4, 2, "sigmoid", "noaux_tc", True, 2.5)


def arguments() -> dict[str, tuple[Callable[..., Any], list[Any]]]:
    torch.manual_seed(0)
    x, residual = torch.randn(ROWS, LORA), torch.randn(ROWS, LORA)
    norm, positions = torch.rand(LORA) + 0.5, torch.arange(5, 5 + ROWS)
    table, slots = torch.randn(40, D), torch.tensor([3, 9, -1, 0])
    q, k_rope = torch.randn(ROWS, HEADS, D + 5), torch.randn(ROWS, D)
    logits = torch.randn(ROWS, VOCAB)
    filters = [torch.tensor([0.0, 1, 0.5, 2]), torch.tensor([0, 5, 0, 9], dtype=torch.int32)]
    filters += [torch.tensor([1, 0.9, 1, 0.5]), torch.tensor([0, 0, 0.1, 0])]
    uniform = torch.rand(ROWS, dtype=torch.float64)
    masks = torch.randint(-(1 << 31), 1 << 31, (2, 3)).int()

    def written(cache: Tensor, *rest: Tensor) -> Tensor:
        cache = cache.clone()
        prologue.cache_write(cache, *rest)
        return cache

    def prepared(cache: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        cache = cache.clone()
        return (*prologue.mla_prologue(*rest[:-1], cache, rest[-1]), cache)

    cache = torch.zeros(2, 8, LORA + D)
    kv = torch.randn(ROWS, LORA + D)
    return {
        "rms_norm": (small.rms_norm, [x, norm, 1e-6]),
        "add_rms_norm": (
            lambda x, r, w, eps: small.add_rms_norm(x, _like(r), w, eps),
            [x, residual, norm, 1e-6],
        ),
        "silu_mul": (small.silu_mul, [x]),
        "embed": (small.embed, [positions, table, 2]),
        "quantize_group": (small.quantize_group, [x, 32, False]),
        "rope": (prologue.rope, [q[..., :D], k_rope, positions, table]),
        "cache_write": (written, [cache, x, k_rope, slots]),
        "mla_prologue": (prepared, [cache, q, kv, norm, 1e-6, positions, table, slots]),
        "router_logits": (routing.router_logits, [x, torch.randn(EXPERTS, LORA)]),
        "route": (routing.route, [torch.randn(ROWS, EXPERTS), torch.randn(EXPERTS), ROUTING]),
        "sample": (sampling.sample, [logits, *filters, uniform]),
        "mask_logits": (
            sampling.mask_logits,
            [logits, masks, torch.tensor([0, 1, -1, 1], dtype=torch.int32)],
        ),
        "logprobs": (sampling.logprobs, [logits, positions, 3]),
    }


def _like(x: Tensor) -> Tensor:
    """A copy with the strides of x, for what is written over."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x)


def spread(x: Tensor) -> Tensor:
    """x with something else between its elements."""
    wide = torch.stack((x, torch.full_like(x, 77)), -1)
    return wide[..., 0]


def turned(x: Tensor) -> Tensor:
    """x whose first dim lies innermost."""
    return x.movedim(0, -1).contiguous().movedim(-1, 0)


def bits(found: Any) -> list[Tensor]:
    tensors = found if isinstance(found, tuple) else (found,)
    assert all(t.is_contiguous() for t in tensors)
    return [t.view(torch.uint8) for t in tensors]


@pytest.mark.parametrize("name", list(arguments()))
@pytest.mark.parametrize("moved", [spread, turned])
def test_any_strides_give_the_same_bits(name, moved):
    function, given = arguments()[name]
    want = bits(function(*given))
    places = [i for i, x in enumerate(given) if isinstance(x, Tensor) and not (x == 0).all()]
    assert places
    for some in ([place] for place in places):
        changed = [moved(x) if i in some else x for i, x in enumerate(given)]
        for a, b in zip(bits(function(*changed)), want, strict=True):
            assert torch.equal(a, b), (name, some)
    everything = [moved(x) if i in places else x for i, x in enumerate(given)]
    assert all(map(torch.equal, bits(function(*everything)), want))


@pytest.mark.parametrize(
    ("name", "place", "wrong"),
    [
        ("rms_norm", 1, torch.ones(LORA // 2)),
        ("add_rms_norm", 1, torch.ones(ROWS, LORA).bfloat16()),
        ("embed", 0, torch.ones(ROWS, dtype=torch.int32)),
        ("rope", 2, torch.ones(ROWS - 1, dtype=torch.int64)),
        ("rope", 3, torch.ones(40, D).double()),
        ("cache_write", 3, torch.ones(ROWS, dtype=torch.int32)),
        ("mla_prologue", 7, torch.ones(ROWS + 1, dtype=torch.int64)),
        ("router_logits", 1, torch.ones(EXPERTS, LORA).bfloat16()),
        ("route", 0, torch.ones(ROWS, 1040)),
        ("route", 1, torch.ones(EXPERTS - 1)),
        ("sample", 0, torch.ones(ROWS, 0)),
        ("sample", 0, torch.ones(ROWS, VOCAB).bfloat16()),
        ("sample", 1, torch.ones(1)),
        ("sample", 2, torch.ones(ROWS, dtype=torch.int64)),
        ("logprobs", 0, torch.ones(ROWS, VOCAB).double()),
    ],
)
def test_what_no_contract_allows_is_not_read(name, place, wrong):
    function, given = arguments()[name]
    with pytest.raises(AssertionError):
        function(*(wrong if i == place else x for i, x in enumerate(given)))


def test_a_dtype_that_no_kernel_takes_is_named():
    with pytest.raises(TypeError, match=r"take float32 or bfloat16 .*, not torch\.float16"):
        small.rms_norm(torch.ones(2, 8).half(), torch.ones(8), 1e-6)
