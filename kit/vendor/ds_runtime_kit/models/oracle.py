"""transformers as the oracle: log-probabilities, and how close each position is to a tie."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

TIE = 1e-5


class Oracle:
    """A transformers model in float32 and a float64 copy that tells positions near a tie."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.double = copy.deepcopy(model).double()
        self.double.config._experts_implementation = "eager"  # the others know no float64
        self.gaps: list[Tensor] = []
        for module in self.double.modules():
            if type(module).__name__.endswith("TopkRouter"):
                module.register_forward_pre_hook(self._record)
            if type(module).__name__.endswith("Indexer"):
                module.register_forward_pre_hook(self._record_index, with_kwargs=True)

    @torch.no_grad()
    def logprobs(self, tokens: Sequence[int]) -> Tensor:
        """[T, vocab] float32, of all positions."""
        logits: Tensor = self.model(torch.tensor([list(tokens)])).logits[0]
        return logits.log_softmax(-1)

    @torch.no_grad()
    def near_tie(self, tokens: Sequence[int]) -> Tensor:
        """[T] bool: where routing or the best token hangs on less than TIE."""
        self.gaps = []
        logits = self.double(torch.tensor([list(tokens)])).logits[0]
        self.gaps.append(_gap(logits, 1))
        return torch.stack(self.gaps).amin(0) < TIE

    def draw_prompt(self, length: int, seed: int) -> list[int]:
        """Random tokens of which no position is near a tie, so that every one can be compared."""
        draw = random.Random(seed)
        for _ in range(20):
            tokens = [draw.randrange(self.model.config.vocab_size) for _ in range(length)]
            if not self.near_tie(tokens).any():
                return tokens
        raise AssertionError(f"20 random prompts of {length} tokens all have near ties")

    def _record(self, router: Any, arguments: tuple[Tensor, ...]) -> None:
        x = arguments[0].reshape(-1, arguments[0].shape[-1])
        scores = x @ router.weight.T
        v3 = hasattr(router, "e_score_correction_bias")
        choice = scores.sigmoid() + router.e_score_correction_bias if v3 else scores.softmax(-1)
        limited = v3 or router.topk_method == "group_limited_greedy"
        if limited and router.topk_group < router.num_group:
            grouped = choice.view(x.shape[0], router.num_group, -1)
            groups = grouped.topk(2 if v3 else 1, dim=-1).values.sum(-1)
            self.gaps.append(_gap(groups, router.topk_group))
            kept = groups >= groups.topk(router.topk_group).values[:, -1:]
            closed = float("-inf")
            choice = grouped.masked_fill(~kept.unsqueeze(-1), closed).flatten(1)
        self.gaps.append(_gap(choice, router.top_k))

    def _record_index(
        self, indexer: Any, arguments: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """How clear each position's choice is: the scores as the indexer makes them."""
        from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek_v3

        rope = deepseek_v3.apply_rotary_pos_emb
        if type(indexer).__name__.startswith("Glm"):
            rope = deepseek_v3.apply_rotary_pos_emb_interleave
        x, resid, (cos, sin) = arguments[:3]
        heads, d, r = indexer.n_heads, indexer.head_dim, indexer.qk_rope_head_dim
        q = indexer.wq_b(resid).unflatten(-1, (heads, d))
        k = indexer.k_norm(indexer.wk(x)).unsqueeze(2)
        turned = rope(q[..., :r], k[..., :r], cos, sin, unsqueeze_dim=2)
        q, k = (torch.cat((t, a[..., r:]), -1)[0] for t, a in zip(turned, (q, k), strict=True))
        dots = torch.relu(torch.einsum("thd,sd->ths", q, k[:, 0])) * d**-0.5
        weights = indexer.weights_proj(x[0].to(indexer.weights_proj.weight.dtype)).to(dots.dtype)
        scores = torch.einsum("ths,th->ts", dots, weights * heads**-0.5)
        future = torch.ones_like(scores, dtype=torch.bool).triu(1)
        gap = _gap(scores.masked_fill(future, float("-inf")), indexer.index_topk)
        self.gaps.append(gap.nan_to_num(float("inf")))  # −inf twice: nothing is left out


def _gap(values: Tensor, k: int) -> Tensor:
    """Between the k-th and the next best value: [T]."""
    if k >= values.shape[-1]:
        return torch.full(values.shape[:1], float("inf"), dtype=values.dtype)
    best = values.topk(k + 1, dim=-1).values
    return best[:, k - 1] - best[:, k]


def compare(
    oracle: Oracle, prompts: Sequence[Sequence[int]], logits: Sequence[Tensor], tolerance: float
) -> None:
    """Log-probabilities within `tolerance` and the same best token, except near ties (≤ 0.1 %)."""
    left_out = positions = 0
    for tokens, ours in zip(prompts, logits, strict=True):
        expected, tied = oracle.logprobs(tokens), oracle.near_tie(tokens)
        found = ours.log_softmax(-1)
        assert found.shape == expected.shape and ours.dtype == torch.float32
        positions += len(tokens)
        left_out += int(tied.sum())
        worst = (found - expected).abs().amax(-1).masked_fill(tied, 0.0)
        assert worst.max() <= tolerance, f"{worst.max():.2e} at position {int(worst.argmax())}"
        same = (found.argmax(-1) == expected.argmax(-1)) | tied
        assert same.all(), f"another best token at {(~same).nonzero().flatten().tolist()}"
    assert left_out <= 0.001 * positions, f"{left_out} of {positions} positions are near a tie"
