"""Names under which users of NVIDIA GPUs know settings, kernels and libraries."""

from __future__ import annotations

from collections.abc import Mapping

from ds_runtime.api import Spelling, nothing, refused

FLAGS: Mapping[str, str | Spelling] = {
    "--disable-cuda-graph": "disable_graph",
    "--cuda-graph-bs": "graph_sizes",
    "--cuda-graph-max-bs": "max_graph_size",
    "--cuda-graph-sizes": "graph_sizes",
    "--max-cudagraph-capture-size": "max_graph_size",
    "--disable-piecewise-cuda-graph": "disable_prefill_graph",
    "--piecewise-cuda-graph-max-tokens": "max_prefill_graph_size",
    "--piecewise-cuda-graph-tokens": "prefill_graph_sizes",
    "--enable-flashinfer-mla": Spelling(
        "is --attention-backend flashinfer here", {"attention_backend": "flashinfer"}
    ),
    "--enable-flashmla": Spelling(
        "is --attention-backend flashmla here", {"attention_backend": "flash_mla"}
    ),
    "--deepep-mode": nothing("DeepEP is not built in yet", "one"),
    "--deepep-config": nothing("DeepEP is not built in yet", "one"),
    "--nccl-init-addr": "dist_init_addr",
    "--enable-nccl-nvls": nothing("NCCL's own settings decide"),
}

_ELSEWHERE = "ds-runtime has flags, no variables: ds-runtime serve --help"
ENVIRONMENT: Mapping[str, str] = {
    "SGLANG_": _ELSEWHERE,
    "SGL_": _ELSEWHERE,
    "SGL_ENABLE_JIT_DEEPGEMM": "DeepGEMM is used where it is the fastest; --pin decides otherwise",
    "VLLM_": _ELSEWHERE,
    "VLLM_USE_DEEP_GEMM": "DeepGEMM is used where it is the fastest; --pin decides otherwise",
}

_SPARSE: Mapping[str, str | Spelling] = {
    "flashmla_sparse": "flash_mla",
    "flashmla_kv": "flash_mla",
    "flashmla_auto": "flash_mla",
    "trtllm": "flashinfer",
    "fa3": "sgl_kernel",
}
BACKENDS: Mapping[str, Mapping[str, str | Spelling]] = {
    "attention_backend": {
        "fa3": "sgl_kernel",
        "flashmla": "flash_mla",
        "trtllm_mla": "flashinfer",
        "cutlass_mla": "flashinfer_cutlass",
    },
    "nsa_prefill_backend": _SPARSE,
    "nsa_decode_backend": _SPARSE,
    "nsa_topk_backend": {
        "sgl-kernel": refused("its choice of tokens is not built in: leave it out"),
    },
    "moe_runner_backend": {
        "flashinfer_trtllm": "flashinfer",
        "flashinfer_cutlass": "flashinfer",
        "flashinfer_cutedsl": "flashinfer",
        "flashinfer_mxfp4": "flashinfer",
        "cutlass_w4afp8": refused(
            "CUTLASS's kernel is not built in: triton has one for W4A8 with FP8 activations"
        ),
    },
}
