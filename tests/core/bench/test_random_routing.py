"""Random checkpoints choose experts evenly: otherwise their steps read less than real ones."""

from __future__ import annotations

import math

import pytest
import torch

from ds_runtime.description.hf import from_hf
from ds_runtime.ops.reference.matrices.moe import route, router_logits
from ds_runtime_bench.checkpoints.checkpoint import Planned, Pools, plan_tensors
from ds_runtime_bench.shapes import config_of


@pytest.mark.parametrize("shape", ["v3-slice", "v2-lite"])
@pytest.mark.parametrize("tokens", [8, 32, 128])
def test_as_many_experts_are_hit_as_by_uniform_choice(shape: str, tokens: int) -> None:
    raw = config_of(shape, "bfloat16")
    routing = from_hf(raw).routing
    assert routing is not None
    made = {p.name: p for p in plan_tensors(raw) if ".mlp.gate." in p.name}
    pools = Pools(torch.bfloat16, "bfloat16", 0, 1 << 22, (256, 8))
    torch.manual_seed(tokens)
    hits, layers = [], [name for name in made if name.endswith("weight")][:3]
    for name in layers:
        router = tensor(pools, made[name])
        named = name.replace("weight", "e_score_correction_bias")
        bias = tensor(pools, made[named]) if named in made else None
        for _ in range(8):
            x = torch.randn(tokens, router.shape[1])
            x /= x.square().mean(1, keepdim=True).sqrt()
            _, ids = route(router_logits(x, router), bias, routing)
            hits.append(ids.unique().numel())
    count = router.shape[0]
    expected = count * (1 - (1 - routing.top_k / count) ** tokens)
    assert math.isclose(sum(hits) / len(hits), expected, rel_tol=0.03)


def tensor(pools: Pools, planned: Planned) -> torch.Tensor:
    data = torch.frombuffer(bytearray(b"".join(pools.bytes_of(planned))), dtype=torch.uint8)
    dtype = {"F32": torch.float32, "BF16": torch.bfloat16}[planned.dtype]
    return data.view(dtype).view(planned.shape).to(torch.float32)
