"""Names under which users of NVIDIA GPUs know settings, kernels and libraries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ds_runtime.api import Spelling, nothing, refused

_NO_GRAPH = Spelling(
    "is --disable-graph here, of steps with prompts, too", {"disable_graph": "True"}
)
_SUMS = "what ds-runtime tune comm has measured decides how ranks add up"


def _graphs(disabled: Spelling) -> Spelling:
    """How a kind of steps is captured; there is one way, and none."""
    return Spelling(
        "steps are captured in one way here",
        takes="one",
        values={"disabled": replace(disabled, takes="one")},
    )


FLAGS: Mapping[str, str | Spelling] = {
    "--disable-cuda-graph": "disable_graph",
    "--cuda-graph-bs": "graph_sizes",
    "--cuda-graph-max-bs": "max_graph_size",
    "--cuda-graph-sizes": "graph_sizes",
    "--cuda-graph-bs-decode": "graph_sizes",
    "--cuda-graph-max-bs-decode": "max_graph_size",
    "--cuda-graph-bs-prefill": "prefill_graph_sizes",
    "--cuda-graph-max-bs-prefill": "max_prefill_graph_size",
    "--cudagraph-capture-sizes": "graph_sizes",
    "--disable-decode-cuda-graph": _NO_GRAPH,
    "--disable-prefill-cuda-graph": "disable_prefill_graph",
    "--cuda-graph-backend-decode": _graphs(_NO_GRAPH),
    "--cuda-graph-backend-prefill": _graphs(
        Spelling("is --disable-prefill-graph here", {"disable_prefill_graph": "True"})
    ),
    "--disable-cuda-graph-padding": nothing("rows of a step are padded to a captured size"),
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
    "--cuda-graph-config": refused("is --disable-graph, --graph-sizes and others here", "one"),
    **dict.fromkeys(
        ("--cuda-graph-max-seq-len-prefill", "--cuda-graph-prefill-max-context"),
        nothing("--max-prefill-graph-size bounds what is captured", "one"),
    ),
    "--enable-cudagraph-gc": nothing("the engine's garbage collection has no options"),
    "--enable-profile-cuda-graph": nothing("a server's /start_profile writes traces"),
    **dict.fromkeys(
        (
            "--enable-layerwise-nvtx-marker",
            "--enable-layerwise-nvtx-tracing",
            "--disable-layerwise-nvtx-tracing",
        ),
        nothing("a server's /start_profile writes traces"),
    ),
    "--cudagraph-metrics": refused("/metrics has what docs/metrics.md lists: leave it out"),
    **dict.fromkeys(
        ("--enable-cumem-allocator", "--disable-cumem-allocator"),
        nothing("memory is allocated in one way here"),
    ),
    "--enable-nccl-comm-suspend": refused(
        "an engine without requests keeps its memory: leave it out"
    ),
    "--disable-nccl-comm-suspend": nothing("an engine without requests keeps its memory"),
    **dict.fromkeys(
        ("--disable-nccl-for-dp-synchronization", "--enable-nccl-for-dp-synchronization"),
        nothing("ranks agree on a step in one way here"),
    ),
    "--debug-cuda-graph": Spelling("is --disable-graph here", {"disable_graph": "True"}),
    **dict.fromkeys(
        (
            "--deepep-mode",
            "--deepep-v2-mode",
            "--deepep-config",
            "--deepep-dispatcher-output-dtype",
            "--flashinfer-a2a-dispatch-type",
        ),
        nothing("rows of all ranks are gathered: no other way is built yet", "one"),
    ),
    "--disable-flashinfer-cutlass-moe-fp4-allgather": nothing(
        "rows of all ranks are gathered as they are"
    ),
    "--flashinfer-mxfp4-moe-precision": replace(
        refused("is --pin experts=KERNEL here", "one"),
        values={"default": Spelling(takes="one")},
    ),
    "--flashinfer-mla-disable-ragged": nothing("--pin mha_prefill=KERNEL chooses the kernel"),
    "--disable-flashinfer-autotune": nothing("nothing is tuned while serving"),
    "--enable-flashinfer-autotune": nothing("nothing is tuned while serving"),
    "--flashinfer-autotune-skip-ops": nothing("nothing is tuned while serving", "many"),
    "--enable-nvidia-megakernel": nothing("a step is a captured graph of kernels"),
    "--nccl-init-addr": "dist_init_addr",
    "--enable-nccl-nvls": nothing("NCCL's own settings decide"),
    "--enable-flashinfer-allreduce-fusion": nothing(_SUMS),
    "--enforce-disable-flashinfer-allreduce-fusion": nothing(_SUMS),
    "--flashinfer-allreduce-fusion-backend": nothing(_SUMS, "one"),
    "--pre-warm-nccl": nothing("steps are captured and tried before the port opens"),
    **dict.fromkeys(
        ("--base-gpu-id", "--gpu-id-step", "--device-ids"),
        refused("is the variable CUDA_VISIBLE_DEVICES here", "one"),
    ),
    "--nccl-port": nothing("ranks of one machine find each other", "one"),
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
    "flashinfer_sparse_mla": "flashinfer",
    "triton_sparse_mla": "triton",
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
        "flashinfer_trtllm_routed": "flashinfer",
        "flashinfer_cutlass": "flashinfer",
        "flashinfer_cutedsl": "flashinfer",
        "flashinfer_mxfp4": "flashinfer",
        "cutlass_w4afp8": refused(
            "CUTLASS's kernel is not built in: triton has one for W4A8 with FP8 activations"
        ),
    },
}
