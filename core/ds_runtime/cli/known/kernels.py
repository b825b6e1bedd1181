"""Which kernel computes what."""

from __future__ import annotations

from collections.abc import Mapping

from ds_runtime.cli.known.notation import ends, ignored
from ds_runtime.config.spelling import ALWAYS, Spelling

_BEST = "the best kernel of the device is bound: --pin OP=KERNEL chooses another"

KERNELS: Mapping[str, str | Spelling] = {
    "--disable-shared-experts-fusion": Spelling(
        "is --fusion shared_experts=off here", {"fusion": "shared_experts=off"}
    ),
    "--enforce-shared-experts-fusion": Spelling(
        "is --fusion shared_experts=on here", {"fusion": "shared_experts=on"}
    ),
    "--enable-deterministic-inference": "batch_invariant",
    "--dsa-prefill-backend": "nsa_prefill_backend",
    "--dsa-decode-backend": "nsa_decode_backend",
    "--dsa-topk-backend": "nsa_topk_backend",
    "--sparse-indexer-topk-backend": "nsa_topk_backend",
    "--moe-backend": "moe_runner_backend",
    **ends("is --attention-backend PROVIDER here", "--attention-config X"),
    **ends(
        "is --pin linear=KERNEL here, or --pin linear@SITE=KERNEL",
        """
        --fp8-gemm-backend auto|X  --fp4-gemm-backend auto|X  --bf16-gemm-backend auto|X
        --linear-backend auto|X
        """,
    ),
    **ends("is --pin OP=KERNEL here", "--kernel-config X --ir-op-priority X"),
    **ends("is --pin mha_prefill=KERNEL here", "--prefill-attention-backend X"),
    **ends("is --pin mla_decode=KERNEL here", "--decode-attention-backend X"),
    **ends(
        "is --attention-backend PROVIDER here, or --pin OP=KERNEL",
        """
        --dsv4-attn-backend auto|X  --dsv4-prefill-backend auto|X
        """,
    ),
    **ends("is --pin index_topk=KERNEL here", "--dsa-paged-mqa-logits-backend auto|X"),
    **ignored(
        _BEST,
        """
        --enable-lean-attention  --[no-]enable-dsa-fused-indexer
        --[no-]enable-fused-qk-norm-rope  --enable-w4a4-mxfp4-megamoe
        --disable|enable-cascade-attn
        """,
    ),
    **ends(
        "index keys are FP8 or of the compute dtype: --index-cache-dtype",
        """
        --enable-deepseek-v4-fp4-indexer
        """,
    ),
    **ignored("products of float32 are computed in float32", "--enable-tf32-matmul"),
    **ignored(ALWAYS, "--no-enable-tf32-matmul"),
    **ignored("is always so here: sampling follows each request", "--mlx-enable-sampling"),
    **ends(
        "the head has the compute dtype: --dtype float32 is for the whole model",
        """
        --enable-fp32-lm-head
        """,
    ),
    **ignored(
        "--pin lora_delta=KERNEL chooses it",
        """
        --lora-backend X  --max-lora-chunk-size N  --lora-use-virtual-experts
        """,
    ),
    **ignored(
        "--pin mha_prefill=KERNEL chooses how prompts read the cache",
        """
        --disable-chunked-prefix-cache  --prefill-kv-cache-dequant-dtype X
        """,
    ),
    **ignored("the platform's plugin has the sampler", "--sampling-backend X"),
    **ignored("draws and their sums are float64", "--use-fp64-gumbel"),
    **ends(
        "attention reads as the model's config says: leave it out",
        "--disable|enable-sliding-window",
    ),
    **ends(
        "platforms have flags of their own: ds-runtime serve --help-all", "--additional-config {}|X"
    ),
}
