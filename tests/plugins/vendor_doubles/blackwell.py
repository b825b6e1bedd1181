"""Stand-ins for what the CUDA plugin calls on compute capability 10 alone, in float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from vendor_doubles import require
from vendor_doubles.maths import spread

FP8, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
STEPS = (E2M1[1:8] + E2M1[:7]) / 2


class SfLayout:
    layout_128x4, layout_8x4, layout_linear = 0, 1, 2


def unpacked(codes):
    return E2M1[torch.stack((codes & 15, codes >> 4), -1).flatten(-2).long()]


def packed_words(scale, rows, cols):
    """DeepGEMM's int32 scales of a [rows, cols] weight back to float32 [..., rows, cols / 128]."""
    groups = cols // 128
    require(scale.shape[-2:] == (rows, -(-groups // 4)), "four exponents to a word")
    require(scale.stride(-2) == 1 and scale.stride(-1) % 4 == 0, "transposed, 16-byte columns")
    exponents = scale.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    exponents = exponents[..., :groups].int()
    return torch.exp2(exponents.float() - 127)


# ---- layouts: what the kernels below undo ----


def places(high, wide):
    """Where a scale of [high, wide] lies: tiles of 128 × 4, in each 32 times 4 rows of 4."""
    m, k = torch.arange(high).unsqueeze(1), torch.arange(wide).unsqueeze(0)
    inside = m % 32 * 16 + m % 128 // 32 * 4 + k % 4
    return (m // 128 * (wide // 4) + k // 4) * 512 + inside


def block_scale_interleave(unswizzled_sf):
    require(unswizzled_sf.dtype == torch.uint8 and unswizzled_sf.ndim == 2, "bytes")
    rows, groups = unswizzled_sf.shape
    padded = F.pad(unswizzled_sf, (0, -groups % 4, 0, -rows % 128))
    swizzled = torch.empty(padded.numel(), dtype=torch.uint8)
    swizzled[places(*padded.shape)] = padded
    return swizzled


def uninterleaved(swizzled, rows, groups):
    """The scales [rows, groups] again, as bytes."""
    high, wide = -(-rows // 128) * 128, -(-groups // 4) * 4
    require(swizzled.numel() == high * wide, "tiles of 128 × 4")
    return swizzled.reshape(-1).view(torch.uint8)[places(high, wide)][:rows, :groups]


def tile_order(rows, tile):
    """Some order of rows within tiles; what matters is that the kernel undoes it."""
    at = torch.arange(rows)
    return at // tile * tile + (at % tile * 37 + 11) % tile


def shuffle_matrix_a(input_tensor, epilogue_tile_m):
    require(input_tensor.shape[0] % epilogue_tile_m == 0, "whole tiles")
    return input_tensor[tile_order(len(input_tensor), epilogue_tile_m)]


def shuffle_matrix_sf_a(input_tensor, epilogue_tile_m):
    require(input_tensor.shape[0] % 128 == 0 and input_tensor.shape[1] % 4 == 0, "whole tiles")
    return block_scale_interleave(shuffle_matrix_a(input_tensor, epilogue_tile_m))


def reorder_rows_for_gated_act_gemm(x):
    half = len(x) // 2
    return torch.stack((x[:half], x[half:]), 1).flatten(0, 1)


def unshuffled(codes, scale, gated):
    """One expert's codes and scales in plain order: the first half, then the second."""
    rows, groups = scale.shape
    order = tile_order(rows, 128)
    back = torch.empty_like(order)
    back[order] = torch.arange(rows)
    plain = uninterleaved(scale, rows, groups)[back]
    codes = codes[back]
    if gated:
        halves = torch.cat((torch.arange(0, rows, 2), torch.arange(1, rows, 2)))
        plain, codes = plain[halves], codes[halves]
    return codes, plain


# ---- rounding ----


def to_nvfp4(x, top):
    """(packed codes, e4m3 scales) of x · top, in groups of 16."""
    groups = x.float().view(x.shape[0], -1, 16) * top
    scale = (groups.abs().amax(-1) / 6).clamp(max=448).to(FP8)
    sized = (groups / scale.float().clamp(min=2**-9).unsqueeze(-1)).nan_to_num(0)
    codes = torch.bucketize(sized.abs(), STEPS) | (sized < 0).long() << 3
    codes = codes.view(x.shape).to(torch.uint8)
    return codes[:, 0::2] | codes[:, 1::2] << 4, scale


def nvfp4_quantize(a, a_global_sf, sfLayout):
    require(a.dtype == torch.bfloat16 and a.is_contiguous() and a.shape[1] % 16 == 0, "bfloat16")
    require(a_global_sf.numel() == 1 and a_global_sf.dtype == torch.float32, "one scale")
    codes, scale = to_nvfp4(a, a_global_sf)
    scale = scale.view(torch.uint8)
    if sfLayout == SfLayout.layout_128x4:
        high, wide = -(-len(a) // 128) * 128, -(-scale.shape[1] // 4) * 4
        return codes, block_scale_interleave(scale).view(high, wide)
    require(sfLayout == SfLayout.layout_linear, "a layout that is known")
    return codes, scale


def mxfp8_quantize(input, is_sf_swizzled_layout):
    require(input.dtype == torch.bfloat16 and input.is_contiguous(), "bfloat16 rows")
    groups = input.float().view(input.shape[0], -1, 32)
    power = torch.ceil(torch.log2(groups.abs().amax(-1).clamp(min=1e-30) / 448))
    power = power.clamp(-127, 127).nan_to_num(0)
    q = (groups / torch.exp2(power).unsqueeze(-1)).view(input.shape).to(FP8)
    scale = (power + 127).to(torch.uint8)
    return q, block_scale_interleave(scale) if is_sf_swizzled_layout else scale.flatten()


# ---- matmuls ----


def mm_fp4(a, b, a_descale, b_descale, alpha, out_dtype):
    (m, k), n = a.shape, b.shape[1]
    require(b.t().is_contiguous() and a.is_contiguous() and b.shape[0] == k, "b column-major")
    require(n % 32 == 0 and k % 32 == 0, "tiles")
    require(alpha.shape == (1,) and alpha.dtype == torch.float32, "alpha")
    groups = 2 * k // 16
    rows = [uninterleaved(s.contiguous(), r, groups).contiguous().view(FP8)
            for s, r in ((a_descale, m), (b_descale.t(), n))]  # fmt: skip
    x = spread(unpacked(a), rows[0], 1, 16)
    w = spread(unpacked(b.t()), rows[1], 1, 16)
    return (x @ w.T * alpha).to(out_dtype)


def mm_mxfp8(a, b, a_descale, b_descale, out_dtype):
    (m, k), n = a.shape, b.shape[1]
    require(a.dtype == b.dtype == FP8 and b.t().is_contiguous(), "FP8, b column-major")
    require(a_descale.ndim == b_descale.ndim == 1, "swizzled scales")
    require(k % 128 == 0 and n % 32 == 0, "tiles")
    rows = [uninterleaved(s, r, k // 32).contiguous().view(E8M0)
            for s, r in ((a_descale, m), (b_descale, n))]  # fmt: skip
    return (spread(a, rows[0], 1, 32) @ spread(b.t(), rows[1], 1, 32).T).to(out_dtype)


# ---- experts ----


def swiglu_experts(x, ids, weights, upper, lower, rounded):
    """Σ w · lower_e(rounded(e, up, gate)), rounded being of up · silu(gate); up comes first."""
    out = torch.zeros(x.shape[0], lower.shape[1])
    for t in range(x.shape[0]):
        for e, weight in zip(ids[t].tolist(), weights[t].float().tolist(), strict=True):
            up, gate = (x[t] @ upper[e].T).chunk(2)
            out[t] += weight * (rounded(e, up, gate) @ lower[e].T)
    return out


def trtllm_fp4_block_scale_routed_moe(
    topk_ids,
    routing_bias,
    hidden_states,
    hidden_states_scale,
    gemm1_weights,
    gemm1_weights_scale,
    gemm1_bias,
    gemm1_alpha,
    gemm1_beta,
    gemm1_clamp_limit,
    gemm2_weights,
    gemm2_weights_scale,
    gemm2_bias,
    output1_scale_scalar,
    output1_scale_gate_scalar,
    output2_scale_scalar,
    num_experts,
    top_k,
    n_group,
    topk_group,
    intermediate_size,
    local_expert_offset,
    local_num_experts,
    routed_scaling_factor,
    hidden_states_scale_layout,
):
    ids, weights = topk_ids
    none = (routing_bias, gemm1_bias, gemm1_alpha, gemm1_beta, gemm1_clamp_limit, gemm2_bias)
    require(all(v is None for v in (*none, n_group, topk_group, routed_scaling_factor)), "plain")
    require(hidden_states_scale_layout == SfLayout.layout_linear, "linear scales")
    require(ids.dtype == torch.int32 and ids.shape[1] == top_k, "int32 ids")
    require(local_num_experts == num_experts and local_expert_offset == 0, "all experts")
    mx = hidden_states.dtype == FP8
    group, kind = (32, E8M0) if mx else (16, FP8)
    both = []
    for codes, scale in (
        (gemm1_weights, gemm1_weights_scale),
        (gemm2_weights, gemm2_weights_scale),
    ):
        require(codes.dtype == torch.uint8 and scale.dtype == FP8, "packed codes, byte scales")
        wide = []
        for e in range(num_experts):
            plain = unshuffled(codes[e], scale[e].view(torch.uint8), codes is gemm1_weights)
            wide.append(spread(unpacked(plain[0]), plain[1].contiguous().view(kind), 1, group))
        both.append(torch.stack(wide))
    require(both[0].shape[1] == 2 * intermediate_size, "both halves")
    scale = hidden_states_scale.view(torch.uint8).view(kind)
    if mx:
        require(output1_scale_scalar is output2_scale_scalar is None, "no scalars")
        x = spread(hidden_states, scale.view(len(ids), -1), 1, 32)

        def rounded(e, up, gate):
            q, power = mxfp8_quantize((F.silu(gate) * up).bfloat16()[None], False)
            return spread(q, power[None].view(E8M0), 1, 32)[0]

        return [swiglu_experts(x, ids, weights, *both, rounded).to(torch.bfloat16)]
    scalars = output1_scale_scalar, output1_scale_gate_scalar, output2_scale_scalar
    require(all(s.shape == (num_experts,) and s.dtype == torch.float32 for s in scalars), "scalars")
    x = spread(unpacked(hidden_states), scale.view(len(ids), -1), 1, 16)

    def rounded(e, up, gate):
        act = F.silu(gate * scalars[1][e]) * (up * scalars[0][e])
        codes, sizes = to_nvfp4(act[None], 1.0)
        return spread(unpacked(codes), sizes, 1, 16)[0] * scalars[2][e]

    return [swiglu_experts(x, ids, weights, *both, rounded).to(torch.bfloat16)]


def cutlass_fused_moe(
    input,
    token_selected_experts,
    token_final_scales,
    fc1_expert_weights,
    fc2_expert_weights,
    output_dtype,
    quant_scales,
    use_fused_finalize,
):
    inward, scale1, alpha1, outward, scale2, alpha2 = quant_scales
    require(not use_fused_finalize and input.dtype == torch.bfloat16, "a fixed order of sums")
    require(fc1_expert_weights.dtype == fc2_expert_weights.dtype == torch.int64, "FP4 in longs")
    require(scale1.dtype == scale2.dtype == torch.int32, "scales in words")
    require(inward.numel() == outward.numel() == 1, "one activation scale each")
    both = []
    for words, scale in ((fc1_expert_weights, scale1), (fc2_expert_weights, scale2)):
        wide = []
        for codes, sizes in zip(words.view(torch.uint8), scale.view(torch.uint8), strict=True):
            plain = uninterleaved(sizes.contiguous(), len(codes), codes.shape[1] * 2 // 16)
            wide.append(spread(unpacked(codes), plain.contiguous().view(FP8), 1, 16))
        both.append(torch.stack(wide))
    codes, sizes = to_nvfp4(input, inward)
    x = spread(unpacked(codes), sizes, 1, 16)

    def rounded(e, up, gate):
        act = F.silu(gate * alpha1[e]) * (up * alpha1[e])
        codes, sizes = to_nvfp4(act[None], outward)
        return spread(unpacked(codes), sizes, 1, 16)[0] * alpha2[e]

    ids, weights = token_selected_experts, token_final_scales
    return [swiglu_experts(x, ids, weights, *both, rounded).to(output_dtype)]


def convert_sf_to_mma_layout(sf, m, k, num_groups):
    groups = k // 16
    tiles = -(-m // 128), -(-groups // 4)
    require(sf.numel() == num_groups * tiles[0] * tiles[1] * 512, "whole tiles of 128 × 4")
    require(m % 128 == 0 and k % 64 == 0, "whole tiles")
    return sf.view(num_groups, *tiles, 32, 4, 4).permute(3, 4, 1, 5, 2, 0)


class CuteDslMoEWrapper:
    def __init__(
        self, num_experts, top_k, hidden_size, intermediate_size, use_cuda_graph, device,
        use_fused_finalize, quant_mode,
    ):  # fmt: skip
        require(quant_mode == "w4a4" and not use_fused_finalize, "a fixed order of sums")
        require(hidden_size % 128 == 0 and intermediate_size % 128 == 0, "whole tiles")
        self.sizes = num_experts, hidden_size, intermediate_size
        self.top_k = top_k

    def run(
        self, x, x_sf, token_selected_experts, token_final_scales, w1_weight, w1_weight_sf,
        w1_alpha, fc2_input_scale, w2_weight, w2_weight_sf, w2_alpha,
    ):  # fmt: skip
        experts, hidden, inter = self.sizes
        require(x.dtype == torch.uint8, "quant_mode='w4a4' requires packed uint8 input")
        require(x.shape[1] == hidden // 2 and x_sf.shape == (len(x), hidden // 16), "linear scales")
        require(token_selected_experts.shape[1] == self.top_k, "top_k")
        require(token_selected_experts.dtype == torch.int32, "int32 ids")
        alphas = w1_alpha, w2_alpha
        require(all(a.shape == (experts,) and a.dtype == torch.float32 for a in alphas), "alphas")
        require(fc2_input_scale.numel() == 1, "one scale")
        both = []
        for codes, scale, rows, cols in (
            (w1_weight, w1_weight_sf, 2 * inter, hidden),
            (w2_weight, w2_weight_sf, hidden, inter),
        ):
            require(codes.shape == (experts, rows, cols // 2), "[experts, rows, cols / 2]")
            require(scale.shape == (32, 4, rows // 128, 4, cols // 64, experts), "MMA's layout")
            flat = scale.permute(5, 2, 4, 0, 1, 3).reshape(experts, -1)
            wide = [
                spread(
                    unpacked(c), uninterleaved(s, rows, cols // 16).contiguous().view(FP8), 1, 16
                )
                for c, s in zip(codes, flat, strict=True)
            ]
            both.append(torch.stack(wide))
        turns = both[0].view(experts, -1, 2, 64, hidden)  # 64 rows of up, 64 of gate
        both[0] = turns.transpose(1, 2).reshape(experts, 2 * inter, hidden)
        rows = spread(unpacked(x), x_sf.view(FP8), 1, 16)

        def rounded(e, up, gate):
            act = F.silu(gate * w1_alpha[e]) * (up * w1_alpha[e])
            codes, sizes = to_nvfp4(act[None], fc2_input_scale)
            return spread(unpacked(codes), sizes, 1, 16)[0] * w2_alpha[e]

        ids, weights = token_selected_experts, token_final_scales
        return swiglu_experts(rows, ids, weights, *both, rounded).to(torch.bfloat16)


FLASHINFER = (
    convert_sf_to_mma_layout,
    CuteDslMoEWrapper,
    block_scale_interleave,
    shuffle_matrix_a,
    shuffle_matrix_sf_a,
    reorder_rows_for_gated_act_gemm,
    nvfp4_quantize,
    mxfp8_quantize,
    mm_fp4,
    mm_mxfp8,
    trtllm_fp4_block_scale_routed_moe,
    cutlass_fused_moe,
)
