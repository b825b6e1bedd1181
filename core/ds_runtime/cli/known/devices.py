"""Ranks, experts, replicas, machines, and engines that share the work."""

from __future__ import annotations

from collections.abc import Mapping

from ds_runtime.cli.known.notation import ends, ignored
from ds_runtime.config.spelling import DEFAULT, GIVEN, Spelling

_EVERY_PART = Spelling(
    "is --ep 0 here, as many parts as --tp, unless --ep says how many", {"ep": "0"}, weak=True
)
_GROUPS = Spelling(
    "is --dp, with --enable-dp-attention, here",
    {"dp": GIVEN, "enable_dp_attention": "True"},
    takes="one",
    values={
        "1": Spelling(sets={"dp": "1", "enable_dp_attention": "False"}, takes="one", weak=True)
    },
    weak=True,
)
_EXPERTS = "copies of all experts are not built yet: --ep divides them by number"
_STAGES = "stages of layers are not built yet: --tp divides every layer"
_SUMS = "what ds-runtime tune comm has measured decides how ranks add up"
_APART = "prefill and decode in engines of their own are not built yet"
_DRAFTS_APART = "drafts in engines of their own are not built yet: leave it out"
_ELASTIC = "the number of ranks is fixed at the start: leave it out"
_HOST = "replicas run on one machine: start a server on each, and a router in front"

RANKS: Mapping[str, str | Spelling] = {
    "--tp-size": "tp",
    "--tensor-parallel-size": "tp",
    "--dp-size": "dp",
    "--data-parallel-size": "dp",
    "--attn-dp-size": _GROUPS,
    "--attention-data-parallel-size": _GROUPS,
    "--device": "platform",
    "--master-addr": "dist_init_addr",
    "--distributed-timeout-seconds": "dist_timeout",
    "--enable-custom-all-reduce": Spelling(
        "is so here unless --disable-custom-all-reduce follows",
        {"disable_custom_all_reduce": "False"},
    ),
    **ends("is --dist-timeout here, for all ranks", "--cpu-distributed-timeout-seconds N"),
    **ends(_STAGES, "--pp-size 1|N --pipeline-parallel-size 1|N"),
    **ignored(
        "stages of layers are not built yet",
        "--pp-max-micro-batch-size N --pp-async-batch-depth N --enable-dynamic-chunking",
    ),
    **ends("is part of --dist-init-addr HOST:PORT here", "--master-port N"),
    **ignored("not needed: a --node-rank above 0 speaks no HTTP", "--headless"),
    **ignored("dense layers are divided among all ranks of --tp", "--moe-dense-tp-size N"),
    **ignored(
        "the head is divided among the ranks by the vocabulary",
        """
        --enable-dp-lm-head  --[no-]enable-tp-lm-head-all-to-all
        """,
    ),
    **ignored(
        "ranks that divide one prompt are not built yet: every rank computes all of its tokens",
        """
        --enable-nsa-prefill-context-parallel  --nsa-prefill-cp-mode X
        --enable-prefill-cp  --cp-strategy X
        """,
    ),
    **ends(
        "ranks that divide one sequence are not built yet: leave it out",
        """
        --cp-size 1|N  --attn-cp-size 1|N  --attention-context-parallel-size 1|N
        --dcp-size 1|N  --decode-context-parallel-size 1|N  --prefill-context-parallel-size 1|N
        """,
    ),
    **ignored(
        "ranks that divide one sequence are not built yet",
        """
        --dcp-comm-backend X  --[no-]dcp-replicate-q-proj  --enable-cp-decode-attn-tp
        --dcp-q-replicate
        --dcp-kv-cache-interleave-size N  --cp-kv-cache-interleave-size N
        """,
    ),
    **ends(
        "cached pages are not divided among ranks: leave it out",
        "--enable-kv-cache-sharding --enable-dsa-cache-layer-split",
    ),
    **ignored(
        _SUMS,
        """
        --enable-torch-symm-mem  --enable-symm-mem  --enable-mscclpp
        --boundary-reduction X  --enable-fused-moe-sum-all-reduce
        """,
    ),
    **ends("sums of ranks are not quantised: leave it out", "--enable-quant-communications"),
    **ends("is ds-runtime conform --ranks N here, before the start", "--enable-p2p-check"),
    **ignored(
        "what ranks divide follows from --tp, --dp and --ep",
        """
        --enable-attn-tp-input-scattered  --disable-attn-tp-gather  --enable-layernorm-sp
        --enable-dense-mlp-attn-tp  --enable-shared-experts-attn-tp  --shared-experts-tp-size N
        --enable-dp-attention-local-control-broadcast  --enable|disable-hc-sp
        --enable|disable-batch-sharded-sampling
        """,
    ),
    **ignored("ranks agree on every step", "--dp-sync-interval N"),
    **ends(
        "ranks and replicas are processes of the server: leave it out",
        "--distributed-executor-backend mp|uni|X --data-parallel-backend mp|X",
    ),
    **ignored(
        "replicas are processes of the server",
        """
        --data-parallel-supervisor-port N
        --dp-supervisor-probe-interval-s N  --dp-supervisor-probe-timeout-s N
        --dp-supervisor-probe-failure-threshold N
        """,
    ),
    **ends(
        "--on-engine-death says what follows when an engine dies: leave it out",
        "--enable|disable-fault-tolerance --fault-tolerance-config {}|X",
    ),
    **ends("ranks are processes of the server: leave it out", "--use-ray"),
    **ends("a rank does not wait for a word from outside: leave it out", "--gated-launch-port N"),
    **ends(
        _HOST,
        """
        --data-parallel-size-local N  --data-parallel-address X  --data-parallel-rpc-port N
        --data-parallel-rank N  --data-parallel-start-rank N  --data-parallel-hybrid-lb
        --data-parallel-external-lb  --data-parallel-multi-port-external-lb
        """,
    ),
    **ignored(
        "a prompt goes to the replica with the fewest running choices", "--load-balance-method X"
    ),
}
EXPERTS: Mapping[str, str | Spelling] = {
    "--ep-size": "ep",
    "--expert-parallel-size": "ep",
    "--enable-ep-moe": _EVERY_PART,
    "--enable-expert-parallel": _EVERY_PART,
    "--disable-expert-parallel": Spelling(
        "is so unless --ep says otherwise", {"ep": DEFAULT}, weak=True
    ),
    "--enable-expert-distribution-metrics": Spelling(
        "is --expert-metrics here", {"expert_metrics": "True"}
    ),
    **ends(_EXPERTS, "--moe-dp-size 1|N --moe-data-parallel-size 1|N --dwdp-size 1|N"),
    **ignored(
        "copies of experts that many tokens choose are not built yet: every expert is held once",
        """
        --enable|disable-eplb  --eplb-config X  --num-redundant-experts N  --eplb-algorithm X
        --expert-placement-strategy X  --ep-num-redundant-experts N  --ep-dispatch-algorithm X
        --init-expert-location X  --eplb-rebalance-num-iterations N
        --eplb-rebalance-layers-per-chunk N  --eplb-min-rebalancing-utilization-threshold N
        --enable-waterfill
        """,
    ),
    **ends(
        "is --expert-metrics here, which counts tokens", "--expert-distribution-recorder-mode X"
    ),
    **ignored(
        "--expert-metrics counts tokens",
        "--expert-distribution-recorder-buffer-size N --expert-balancedness-report-mode X",
    ),
    **ignored(
        "rows of all ranks are gathered: no other way is built yet",
        """
        --all2all-backend X  --moe-a2a-backend X  --speculative-moe-a2a-backend X
        """,
    ),
    **ends(
        _ELASTIC,
        """
        --elastic-ep-backend none|X  --elastic-ep-join-mode X  --elastic-ep-join-rank-offset N
        --elastic-ep-initial-size N  --elastic-ep-scale-timeout N  --max-ep-size N
        --enable-elastic-expert-backup  --enable|disable-elastic-ep  --elastic-ep-max-dp-size N
        """,
    ),
    **ends(
        "every routed expert stays on the device: leave it out",
        """
        --enable-paged-experts  --paged-experts-num-resident N  --kt-weight-path X
        --kt-num-gpu-experts N
        """,
    ),
    **ignored(
        "every routed expert stays on the device",
        """
        --kt-method X  --kt-cpuinfer N  --kt-threadpool-count N
        --kt-max-deferred-experts-per-token N
        """,
    ),
}
APART: Mapping[str, str | Spelling] = {
    "--enable-dbo": Spelling(
        "is --enable-two-batch-overlap here", {"enable_two_batch_overlap": "True"}
    ),
    "--disable-dbo": Spelling(
        "is so unless --enable-two-batch-overlap follows", {"enable_two_batch_overlap": "False"}
    ),
    **ignored("--enable-two-batch-overlap makes two halves of a step", "--ubatch-size N"),
    **ignored(
        "steps without prompts run as one batch: halves would read weights twice",
        "--dbo-decode-token-threshold N",
    ),
    **ignored(
        "captured steps overlap the shared experts with the others", "--enable-single-batch-overlap"
    ),
    **ends(
        f"{_APART}: leave it out",
        """
        --disaggregation-mode null|X  --kv-transfer-config X  --enable-pd-role-switch
        --enable-pdmux  --enable|disable-scale-out  --tokens-only
        """,
    ),
    **ignored(
        _APART,
        """
        --disaggregation-transfer-backend X  --disaggregation-ib-device X
        --disaggregation-bootstrap-port N  --disaggregation-decode-allocation-policy X
        --disaggregation-decode-enable-offload-kvcache  --disaggregation-decode-extra-slots N
        --disaggregation-decode-enable-radix-cache  --disaggregation-decode-polling-interval N
        --disaggregation-decode-host-receive-threshold N
        --disaggregation-decode-retraction-backup X  --disaggregation-enable-kv-checksum
        --num-reserved-decode-tokens N  --optimistic-prefill-attempts N
        --pdmux-config-path X  --sm-group-num N  --mooncake-ib-device X
        """,
    ),
    **ends(
        _DRAFTS_APART,
        """
        --decoupled-spec-role null|X  --decoupled-spec-bind-endpoint X
        --decoupled-spec-connect-endpoints X  --decoupled-spec-rank N
        """,
    ),
    **ends("events of the cache are not sent: leave it out", "--kv-events-config X"),
}
