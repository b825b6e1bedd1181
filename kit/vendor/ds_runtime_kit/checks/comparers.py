"""How results are compared with the oracle's, where a contract leaves freedom."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ds_runtime.ops.contract import Routing
from ds_runtime.ops.dtypes import is_fp8
from ds_runtime.ops.reference.activation import silu_mul
from ds_runtime.ops.reference.attention.dense import mha_prefill
from ds_runtime.ops.reference.attention.index import index_scores
from ds_runtime.ops.reference.matrices.moe import (
    group_scores,
    mask_groups,
    scores_and_choice,
)
from ds_runtime.ops.reference.norm import add_rms_norm, rms_norm
from ds_runtime_kit.checks.numerics import disagreement, relative_error

Verdict = tuple[float, str]

FP8_ROUNDING = 4e-2  # of e4m3: at most 2^-4 per value, 2.6e-2 in the mean square
_SUM = 8e-3  # of two values of a compute dtype, as in norm.py
_GAP = 1e-5  # scores closer than this, relative to the largest, count as tied


def compare(
    op: str, args: Sequence[Any], got: Sequence[Tensor], want: Sequence[Tensor], tolerance: float
) -> Verdict:
    """(worst relative error, "" or what is wrong). `args` are the oracle's, decoded to float64."""
    special = _SPECIAL.get(op)
    if special is not None:
        return special(args, got, want, tolerance)
    worst = 0.0
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        error, failure = disagreement(a, b, tolerance)
        if failure:
            return error, f"result {i}: {failure}"
        worst = max(worst, error)
    return worst, ""


def settled_tokens(logits: Tensor, bias: Tensor | None, routing: Routing) -> Tensor:
    """Tokens whose choice of groups and experts is clear by more than rounding: bool [tokens]."""
    _, choice = scores_and_choice(logits, bias, routing)
    slack = _GAP * choice.abs().amax(-1)
    settled = _gap(mask_groups(choice, routing), routing.top_k) > slack
    if routing.method != "greedy" and routing.topk_group < routing.n_group:
        settled &= _gap(group_scores(choice, routing), routing.topk_group) > slack
    return settled


def _gap(scores: Tensor, k: int) -> Tensor:
    if k >= scores.shape[-1]:
        return torch.full(scores.shape[:-1], float("inf"), dtype=scores.dtype)
    ordered = scores.sort(-1, descending=True).values
    return ordered[:, k - 1] - ordered[:, k]


def _compare_route(
    args: Sequence[Any], got: Sequence[Tensor], want: Sequence[Tensor], tolerance: float
) -> Verdict:
    logits, bias, routing = args
    weights, ids = (t.cpu() for t in got)
    experts, k = routing.num_experts, routing.top_k
    if not (torch.equal(weights[:, k:], want[0][:, k:].to(weights.dtype))
            and torch.equal(ids[:, k:].long(), want[1][:, k:].long())):  # fmt: skip
        return float("inf"), f"shared slots are not {experts}, {experts} + 1, … with weight 1"
    weights, ids = weights[:, :k], ids[:, :k]
    if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= experts):
        return float("inf"), f"ids outside [0, {experts})"
    ordered = ids.long().sort(-1).values
    if (ordered[:, 1:] == ordered[:, :-1]).any():
        return float("inf"), "an expert is chosen twice for one token"
    settled = settled_tokens(logits, bias, routing)
    if not torch.equal(ordered[settled], want[1][:, :k].long().sort(-1).values[settled]):
        return float("inf"), "chooses other experts where the choice is clear"
    expected = scores_and_choice(logits, bias, routing)[0].gather(1, ids.long())
    if routing.renormalize:
        expected = expected / (expected.sum(-1, keepdim=True) + 1e-20)
    return disagreement(weights, expected * routing.scale, tolerance)


def _compare_quantised(
    args: Sequence[Any], got: Sequence[Tensor], want: Sequence[Tensor], tolerance: float
) -> Verdict:
    group, ue8m0 = args[1], args[2]
    scale = got[1].cpu()
    if ue8m0 and not (torch.frexp(scale)[0] == 0.5).all():
        return float("inf"), "a scale is no power of two"
    if (error := relative_error(scale, want[1])) > 1e-5:
        return error, f"scales: relative error {error:.3g} is above 1e-05"
    return disagreement(_decode(got, group), _decode(want, group), tolerance)


def _compare_fused(
    values: Callable[..., Tensor],
) -> Callable[..., Verdict]:
    """Of fusions with quantize_group: what was rounded on the way moves scales a little, and those
    that are powers of two to the next. Codes must give `values` of the other arguments back."""

    def verdict(
        args: Sequence[Any], got: Sequence[Tensor], want: Sequence[Tensor], tolerance: float
    ) -> Verdict:
        *inputs, group, ue8m0 = args
        ratio = got[1].cpu().to(torch.float64) / want[1].to(torch.float64)
        if ue8m0 and not (torch.frexp(got[1].cpu())[0] == 0.5).all():
            return float("inf"), "a scale is no power of two"
        least, most = (0.5, 2.0) if ue8m0 else (0.99, 1.01)
        if ratio.numel() and not (least <= ratio.min() and ratio.max() <= most):
            said = f"scales are {ratio.min():.3g} to {ratio.max():.3g} times those expected"
            return float("inf"), said
        return disagreement(_decode(got, group), values(*inputs), tolerance)

    return verdict


def _decode(pair: Sequence[Tensor], group: int) -> Tensor:
    q, scale = (t.cpu().to(torch.float64) for t in pair)
    return q * scale.repeat_interleave(group, dim=-1)


def _compare_index_prologue(
    args: Sequence[Any], got: Sequence[Tensor], want: Sequence[Tensor], tolerance: float
) -> Verdict:
    """Queries times their scale, rounded as FP8 where that is what they are."""
    q, scale = (t.cpu() for t in got)
    if is_fp8(q.dtype) and not (torch.frexp(scale)[0] == 0.5).all():
        return float("inf"), "a scale is no power of two"
    rounding = FP8_ROUNDING if is_fp8(q.dtype) else 0.0
    made = q.to(torch.float64) * scale.to(torch.float64).unsqueeze(-1)
    return disagreement(made, want[0] * want[1].unsqueeze(-1), max(tolerance, rounding))


def only_defined(op: str, args: Sequence[Any], result: Tensor) -> Tensor:
    """The result without what its contract leaves undefined: scores of tokens that a row does not
    see."""
    if op != "index_scores":
        return result
    columns = torch.arange(result.shape[1], device=result.device)
    return result.masked_fill(columns >= args[5].unsqueeze(1), 0.0)


def _compare_scores(
    args: Sequence[Any], got: Sequence[Tensor], want: Sequence[Tensor], tolerance: float
) -> Verdict:
    made, right = (only_defined("index_scores", args, t[0].cpu()) for t in (got, want))
    return disagreement(made, right, tolerance)


def _compare_slots(
    args: Sequence[Any], got: Sequence[Tensor], want: Sequence[Tensor], tolerance: float
) -> Verdict:
    """The same slots, in any order, with −1 at the end."""
    slots, lens, k = got[0].cpu(), args[1], args[5]
    count = lens.clamp(max=k).unsqueeze(1)
    if not torch.equal(slots >= 0, torch.arange(k) < count):
        return float("inf"), "-1 is not where a row sees fewer tokens, and only there"
    same = slots.sort(1).values == want[0].sort(1).values
    wrong = (~same.all(1)).nonzero().flatten().tolist()
    return (float("inf"), f"rows {wrong[:8]} choose other slots") if wrong else (0.0, "")


def _compare_selected(
    args: Sequence[Any], got: Sequence[Tensor], want: Sequence[Tensor], tolerance: float
) -> Verdict:
    """As many slots as there are, each once and of a token that its row sees; none is worse than
    the worst of the oracle's by more than rounding of the row's largest score."""
    q, weights, cache, table, owners, lens, k = args
    slots, page = got[0].cpu().long(), cache.shape[1]
    if not torch.equal(slots >= 0, torch.arange(k) < lens.clamp(max=k).unsqueeze(1)):
        return float("inf"), "-1 is not where a row sees fewer tokens, and only there"
    scores = index_scores(q, weights, cache, table, owners, lens)
    worst = 0.0
    for row, (chosen, seen) in enumerate(zip(slots, lens.tolist(), strict=True)):
        chosen = chosen[chosen >= 0]
        at = chosen.unsqueeze(1) // page == table[int(owners[row])].long()  # [n, pages]
        tokens = at.int().argmax(1) * page + chosen % page
        if not at.any(1).all() or (tokens >= seen).any() or len(tokens.unique()) < len(tokens):
            return float("inf"), f"row {row} chooses tokens that it does not see, or one twice"
        mine = scores[row, :seen]
        least = mine.topk(len(tokens)).values[-1]
        gap = (least - mine[tokens].amin()) / mine.abs().amax().clamp(min=1e-30)
        worst = max(worst, float(gap))
    return worst, f"the worst choice is {worst:.3g} below the best" if worst > tolerance else ""


def _compare_added(
    args: Sequence[Any], got: Sequence[Tensor], want: Sequence[Tensor], tolerance: float
) -> Verdict:
    """Codes as of other fusions, and the sum."""
    error, failure = disagreement(got[2], want[2], _SUM)
    if failure:
        return error, f"sum: {failure}"
    fused = _compare_fused(lambda *inputs: add_rms_norm(*inputs)[0])
    return fused(args, got[:2], want[:2], tolerance)


def _attended(*args: Any) -> Tensor:
    """MhaPrefill's values from the inputs of MhaPrefillQuantize."""
    q, q_rope, k, k_rope, v, segs, scale = args
    return mha_prefill(q, q_rope, k, k_rope, v, segs, segs, True, scale)[0].flatten(1)


_SPECIAL: dict[str, Callable[..., Verdict]] = {
    "route": _compare_route,
    "quantize_group": _compare_quantised,
    "rms_norm_quantize": _compare_fused(rms_norm),
    "add_rms_norm_quantize": _compare_added,
    "silu_mul_quantize": _compare_fused(silu_mul),
    "mha_prefill_quantize": _compare_fused(_attended),
    "index_prologue": _compare_index_prologue,
    "index_scores": _compare_scores,
    "index_topk": _compare_slots,
    "index_select": _compare_selected,
}
