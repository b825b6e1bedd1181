"""Flags that people know from other engines, but for those that name a vendor. Torch-free.

Read by the commands that start an engine, and by the page that lists them.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace

from ds_runtime.cli.config_file import given
from ds_runtime.common.address import is_loopback
from ds_runtime.config.spelling import GIVEN, Spelling, nothing, refused
from ds_runtime.errors import ConfigError

_BALANCE = "copies of experts that many tokens choose are not built yet: every expert is held once"
_EVERY_PART = Spelling(
    "is --ep 0 here, as many parts as --tp, unless --ep says how many", {"ep": "0"}, weak=True
)
_STAGES = "stages of layers are not built yet: --tp divides every layer"
_APART = "prefill and decode in engines of their own are not built yet: leave it out"
_CONTEXTS = "ranks that divide one prompt are not built yet: every rank computes all of its tokens"
_STORED = "the checkpoint's own config says how its weights are stored"
_SUMS = "what ds-runtime tune comm has measured decides how ranks add up"
_ALWAYS = "is always so here"
_OWN_FILES = "is read from the checkpoint's folder: put it there"
_TEXT = "models here read and write text alone"
_GRAMMARS = "one serves all kinds of grammars"
_SEQUENCE = "ranks that divide one sequence are not built yet: leave it out"
_HOST = "replicas run on one machine: start a server on each, and a router in front"
_HALVES = "two halves of a step at the same time are not built yet"
_GATHERED = "rows of all ranks are gathered: no other way is built yet"
_MATMULS = "is --pin linear=KERNEL here, or --pin linear@SITE=KERNEL"
_DRAWS = "the model's own draws judge drafts, so that drafts change no token: leave it out"
_LINES = "--log-level is for all lines"
_USAGE = "a request asks for it: stream_options.include_usage"
_PARTS = "--chunked-prefill-size and --max-step-tokens bound what a step takes of prompts"
_EXPERTS = "copies of all experts are not built yet: --ep divides them by number"
_GROUPS = Spelling(
    "is --dp N --enable-dp-attention here",
    {"dp": GIVEN, "enable_dp_attention": "True"},
    takes="one",
    values={
        "1": Spelling(sets={"dp": "1", "enable_dp_attention": "False"}, takes="one", weak=True)
    },
    weak=True,
)
_ORDER = Spelling(
    "requests come in order of their arrival; --policy priority takes the important first",
    takes="one",
    values={
        "fcfs": Spelling(
            "is --policy fifo here, unless another is said",
            {"policy": "fifo"},
            takes="one",
            weak=True,
        ),
        "priority": Spelling("is --policy priority here", {"policy": "priority"}, takes="one"),
    },
)
_LOWEST_FIRST = Spelling(
    "is --policy priority here, where the highest number comes first, and not the lowest",
    {"policy": "priority"},
    takes="one",
)


def _one(says: str) -> Spelling:
    """A number of parts that is one."""
    return Spelling(says, refused=True, takes="one", values={"1": Spelling(takes="one")})


def _exact() -> Spelling:
    """A threshold for drafts, which is 1 where they change no token."""
    said = Spelling(_DRAWS, takes="one")
    accepted = Spelling(takes="one")
    return replace(said, refused=True, values={"1": accepted, "1.0": accepted})


def _best(says: str) -> Spelling:
    """A provider for an op that has no flag of its own: `auto` is the best, as always."""
    return Spelling(says, refused=True, takes="one", values={"auto": Spelling(takes="one")})


KNOWN: Mapping[str, str | Spelling] = {
    # the model
    "--model-path": "model",
    "--max-model-len": "context_length",
    "--trust-remote-code": nothing("not needed: no remote code is run"),
    "--code-revision": nothing("not needed: no remote code is run", "one"),
    "--tokenizer-mode": nothing("not needed: the model's own encoding is known", "one"),
    "--quantization": nothing(f"not needed: {_STORED}; --quantize rounds while loading", "one"),
    "--lora-paths": Spelling("is --lora here", {"lora": GIVEN}, takes="many"),
    "--lora-modules": Spelling("is --lora here", {"lora": GIVEN}, takes="many"),
    "--enable-lora": nothing("not needed: --lora or --max-loras says so"),
    "--max-loras-per-batch": "max_loras",
    "--skip-tokenizer-init": refused("text comes in and goes out: leave it out"),
    "--tokenizer": refused(_OWN_FILES, "one"),
    "--tokenizer-path": refused(_OWN_FILES, "one"),
    "--revision": refused("is for hf download: --model takes the folder that it prints", "one"),
    "--tokenizer-revision": refused(_OWN_FILES, "one"),
    "--download-dir": refused("is the variable HF_HUB_CACHE here", "one"),
    "--hf-overrides": refused("is a change of the checkpoint's config.json here", "one"),
    "--json-model-override-args": refused("is a change of the checkpoint's config.json", "one"),
    "--generation-config": nothing(
        "defaults come from the checkpoint's generation_config.json, and requests may differ", "one"
    ),
    "--override-generation-config": refused("is a change of generation_config.json here", "one"),
    "--preferred-sampling-params": refused("is a change of generation_config.json here", "one"),
    "--model-impl": nothing("the model's code is the runtime's own", "one"),
    "--quantization-param-path": nothing(f"not needed: {_STORED}", "one"),
    "--calculate-kv-scales": nothing(
        "not needed: rows of an FP8 cache need no scales of the model"
    ),
    "--max-cpu-loras": nothing("--max-loras says how many adapters are held", "one"),
    "--max-loaded-loras": nothing("--max-loras says how many adapters are held", "one"),
    "--limit-mm-per-prompt": nothing(_TEXT, "one"),
    "--language-model-only": nothing(_TEXT),
    "--enable-multimodal": refused(f"{_TEXT}: leave it out"),
    "--is-embedding": refused(f"{_TEXT}: leave it out"),
    "--enable-custom-logit-processor": refused("requests bring no code: leave it out"),
    "--logits-processors": refused("requests bring no code: leave it out", "many"),
    # devices
    "--tp-size": "tp",
    "--tensor-parallel-size": "tp",
    "--dp-size": "dp",
    "--data-parallel-size": "dp",
    "--attn-dp-size": _GROUPS,
    "--attention-data-parallel-size": _GROUPS,
    "--moe-dp-size": _one(_EXPERTS),
    "--moe-data-parallel-size": _one(_EXPERTS),
    "--device": "platform",
    "--pp-size": _one(_STAGES),
    "--pipeline-parallel-size": _one(_STAGES),
    "--master-addr": "dist_init_addr",
    "--master-port": refused("is part of --dist-init-addr HOST:PORT here", "one"),
    "--headless": nothing("not needed: a --node-rank above 0 speaks no HTTP"),
    "--ep-size": "ep",
    "--expert-parallel-size": "ep",
    "--enable-ep-moe": _EVERY_PART,
    "--enable-expert-parallel": _EVERY_PART,
    "--enable-eplb": nothing(_BALANCE),
    "--enable-expert-distribution-metrics": Spelling(
        "is --expert-metrics here", {"expert_metrics": "true"}
    ),
    "--eplb-config": nothing(_BALANCE, "one"),
    "--num-redundant-experts": nothing(_BALANCE, "one"),
    "--expert-placement-strategy": nothing(_BALANCE, "one"),
    "--eplb-algorithm": nothing(_BALANCE, "one"),
    "--ep-num-redundant-experts": nothing(_BALANCE, "one"),
    "--ep-dispatch-algorithm": nothing(_BALANCE, "one"),
    "--init-expert-location": nothing(_BALANCE, "one"),
    "--eplb-rebalance-num-iterations": nothing(_BALANCE, "one"),
    "--expert-distribution-recorder-mode": nothing("--expert-metrics counts tokens", "one"),
    "--all2all-backend": nothing(_GATHERED, "one"),
    "--moe-a2a-backend": nothing(_GATHERED, "one"),
    "--speculative-moe-a2a-backend": nothing(_GATHERED, "one"),
    "--moe-dense-tp-size": nothing("is the number of --tp here", "one"),
    "--enable-dp-lm-head": nothing("the head is divided among the ranks by the vocabulary"),
    "--enable-nsa-prefill-context-parallel": nothing(_CONTEXTS),
    "--nsa-prefill-cp-mode": nothing(_CONTEXTS, "one"),
    "--enable-prefill-cp": nothing(_CONTEXTS),
    "--cp-strategy": nothing(_CONTEXTS, "one"),
    "--enable-torch-symm-mem": nothing(_SUMS),
    "--enable-symm-mem": nothing(_SUMS),
    "--enable-mscclpp": nothing(_SUMS),
    "--cp-size": _one(_SEQUENCE),
    "--attn-cp-size": _one(_SEQUENCE),
    "--attention-context-parallel-size": _one(_SEQUENCE),
    "--dcp-size": _one(_SEQUENCE),
    "--decode-context-parallel-size": _one(_SEQUENCE),
    "--prefill-context-parallel-size": _one(_SEQUENCE),
    "--distributed-executor-backend": nothing("ranks are processes of the server", "one"),
    "--data-parallel-backend": nothing("replicas are processes of the server", "one"),
    "--data-parallel-size-local": refused(_HOST, "one"),
    "--data-parallel-address": refused(_HOST, "one"),
    "--data-parallel-rpc-port": refused(_HOST, "one"),
    "--data-parallel-rank": refused(_HOST, "one"),
    "--data-parallel-start-rank": refused(_HOST, "one"),
    "--data-parallel-hybrid-lb": refused(_HOST),
    "--data-parallel-external-lb": refused(_HOST),
    "--enable-dbo": nothing(_HALVES),
    "--dbo-decode-token-threshold": nothing(_HALVES, "one"),
    "--dbo-prefill-token-threshold": nothing(_HALVES, "one"),
    "--enable-two-batch-overlap": nothing(_HALVES),
    "--enable-single-batch-overlap": nothing(_HALVES),
    "--tbo-token-distribution-threshold": nothing(_HALVES, "one"),
    "--disaggregation-mode": Spelling(
        _APART, refused=True, takes="one", values={"null": Spelling(takes="one")}
    ),
    "--disaggregation-transfer-backend": nothing(_APART, "one"),
    "--disaggregation-ib-device": nothing(_APART, "one"),
    "--disaggregation-bootstrap-port": nothing(_APART, "one"),
    "--kv-transfer-config": refused(_APART, "one"),
    "--kv-events-config": refused("events of the cache are not sent: leave it out", "one"),
    # KV beyond the device
    "--hicache-storage-backend": Spelling(
        "is --disk-cache DIR here",
        refused=True,
        takes="one",
        values={"none": Spelling(takes="one")},
    ),
    "--hicache-storage-prefetch-policy": nothing("a request waits for all its pages", "one"),
    "--hicache-io-backend": nothing("the platform copies as it can best", "one"),
    "--hicache-mem-layout": nothing("host memory has one layout here, by layers", "one"),
    "--radix-eviction-policy": Spelling(
        "pages used least recently leave first, and no other order is built yet: leave it out",
        refused=True,
        takes="one",
        values={"lru": Spelling(takes="one")},
    ),
    "--kv-offloading-size": refused(
        "is --enable-hierarchical-cache with --hicache-size N here, in GB of each rank", "one"
    ),
    "--kv-offloading-backend": nothing("host memory is the engine's own", "one"),
    # memory
    "--gpu-memory-utilization": Spelling(
        "includes what steps need besides weights and KV cache; here it is --memory-utilization",
        {"memory_utilization": GIVEN},
        takes="one",
    ),
    "--block-size": "page_size",
    "--enable-prefix-caching": nothing(_ALWAYS),
    "--no-enable-prefix-caching": Spelling(
        "is --disable-radix-cache here", {"disable_radix_cache": "True"}
    ),
    "--kv-cache-memory-bytes": "kv_memory",
    "--num-gpu-blocks-override": refused("--kv-memory sizes the KV cache", "one"),
    "--enable-sleep-mode": refused("weights stay on the device: leave it out"),
    "--enable-memory-saver": refused("weights stay on the device: leave it out"),
    "--max-total-tokens": refused("--kv-memory sizes the KV cache", "one"),
    "--swap-space": nothing("not needed: a request that is preempted is computed again", "one"),
    "--cpu-offload-gb": refused("weights stay on the device: leave it out", "one"),
    # scheduling
    "--max-num-seqs": "max_running_requests",
    "--max-num-batched-tokens": "max_step_tokens",
    "--max-prefill-tokens": Spelling(
        "counts the tokens of decode steps, too, and is --max-step-tokens here",
        {"max_step_tokens": GIVEN},
        takes="one",
    ),
    "--enable-chunked-prefill": nothing(_ALWAYS),
    "--no-enable-chunked-prefill": Spelling(
        "is --chunked-prefill-size -1 here", {"chunked_prefill_size": "-1"}
    ),
    "--max-num-partial-prefills": nothing(_PARTS, "one"),
    "--max-long-partial-prefills": nothing(_PARTS, "one"),
    "--long-prefill-token-threshold": nothing(_PARTS, "one"),
    "--enable-mixed-chunk": nothing(_ALWAYS),
    "--schedule-policy": _ORDER,
    "--scheduling-policy": replace(_ORDER, values={**_ORDER.values, "priority": _LOWEST_FIRST}),
    "--enable-priority-scheduling": Spelling("is --policy priority here", {"policy": "priority"}),
    "--async-scheduling": nothing("is so unless --disable-overlap-schedule is given"),
    "--no-async-scheduling": Spelling(
        "is --disable-overlap-schedule here", {"disable_overlap_schedule": "True"}
    ),
    "--compilation-config": nothing(
        "steps are captured as they are: --disable-graph turns that off", "one"
    ),
    "--max-seq-len-to-capture": nothing("--max-graph-size bounds what is captured", "one"),
    "--load-balance-method": nothing(
        "a prompt goes to the replica with the fewest running choices", "one"
    ),
    "--allow-auto-truncate": refused("a prompt that is too long is refused: shorten it"),
    "--schedule-conservativeness": nothing(
        "a request starts when there are pages for its prompt, and may be preempted", "one"
    ),
    "--num-continuous-decode-steps": nothing("every step is scheduled", "one"),
    "--enforce-eager": Spelling("is --disable-graph here", {"disable_graph": "True"}),
    # speculation
    "--speculative-algo": "speculative_algorithm",
    "--speculative-config": refused(
        "is --speculative-algorithm NEXTN --speculative-num-steps N here", "one"
    ),
    "--speculative-draft": "speculative_draft_model_path",
    "--speculative-draft-model": "speculative_draft_model_path",
    "--speculative-draft-model-revision": refused(
        "is for hf download: --speculative-draft-model-path takes the folder that it prints", "one"
    ),
    "--speculative-attention-mode": nothing("drafts are checked by kernels of decode steps", "one"),
    "--speculative-accept-threshold-single": _exact(),
    "--speculative-accept-threshold-acc": _exact(),
    "--speculative-use-rejection-sampling": nothing(_DRAWS),
    # kernels
    "--disable-shared-experts-fusion": Spelling(
        "is --fusion shared_experts=off here", {"fusion": "shared_experts=off"}
    ),
    "--enforce-shared-experts-fusion": Spelling(
        "is --fusion shared_experts=on here", {"fusion": "shared_experts=on"}
    ),
    "--enable-deterministic-inference": "batch_invariant",
    "--attention-config": refused("is --attention-backend PROVIDER here", "one"),
    "--dsa-prefill-backend": "nsa_prefill_backend",
    "--dsa-decode-backend": "nsa_decode_backend",
    "--dsa-topk-backend": "nsa_topk_backend",
    "--fp8-gemm-backend": _best(_MATMULS),
    "--fp4-gemm-backend": _best(_MATMULS),
    "--bf16-gemm-backend": _best(_MATMULS),
    "--linear-backend": _best(_MATMULS),
    "--moe-backend": "moe_runner_backend",
    "--prefill-attention-backend": refused("is --pin mha_prefill=KERNEL here", "one"),
    "--decode-attention-backend": refused("is --pin mla_decode=KERNEL here", "one"),
    "--lora-backend": nothing("--pin lora_delta=KERNEL chooses it", "one"),
    "--sampling-backend": nothing("the platform's plugin has the sampler", "one"),
    "--grammar-backend": nothing(_GRAMMARS, "one"),
    # server
    "--enable-auto-tool-choice": nothing(
        "not needed: tools are parsed where a request brings them"
    ),
    "--enable-reasoning": nothing("not needed: thinking is parsed where the model thinks"),
    "--guided-decoding-backend": nothing(_GRAMMARS, "one"),
    "--structured-outputs-config": nothing(_GRAMMARS, "one"),
    "--chat-template-content-format": nothing("the template says what it takes", "one"),
    "--api-server-count": nothing("one process speaks HTTP for all replicas", "one"),
    "--tokenizer-worker-num": nothing("one process reads and writes text", "one"),
    "--allowed-origins": refused("is --cors-origins A,B here", "one"),
    "--otlp-traces-endpoint": "otlp_endpoint",
    "--enable-prompt-tokens-details": nothing("not needed: usage always says it"),
    "--enable-force-include-usage": nothing(_USAGE),
    "--stream-response-default-include-usage": nothing(_USAGE),
    "--enable-metrics": nothing("not needed: /metrics is always there"),
    "--enable-cache-report": nothing("not needed: usage always says it"),
    "--disable-log-requests": Spelling("is --no-access-log here", {"access_log": "False"}),
    "--no-enable-log-requests": Spelling("is --no-access-log here", {"access_log": "False"}),
    "--disable-uvicorn-access-log": Spelling("is --no-access-log here", {"access_log": "False"}),
    "--disable-log-stats": nothing("/metrics is always there"),
    "--enable-log-requests": nothing("a line per request is logged, without its text"),
    "--log-requests": nothing("a line per request is logged, without its text"),
    "--log-requests-level": nothing("a line per request is logged, without its text", "one"),
    "--uvicorn-log-level": nothing(_LINES, "one"),
    "--log-level-http": nothing(_LINES, "one"),
    "--decode-log-interval": nothing("/metrics and the dashboard have what steps do", "one"),
    "--sampling-defaults": Spelling(
        "is a change of generation_config.json here",
        refused=True,
        takes="one",
        values={"model": Spelling(takes="one")},
    ),
    "--detokenizer-worker-num": nothing("one process reads and writes text", "one"),
    "--stream-interval": nothing("every step's tokens are sent at once", "one"),
    "--random-seed": nothing("requests bring their own seed", "one"),
    "--seed": nothing("requests bring their own seed", "one"),
    "--skip-server-warmup": nothing("steps are captured and tried before the port opens"),
}


BATCH: Mapping[str, str | Spelling] = {
    "--profile": nothing("a server's /start_profile writes traces"),
    "--run-name": nothing("a record has its command", "one"),
    "--result-filename": nothing("--json prints the record", "one"),
}
SERVING: Mapping[str, str | Spelling] = {
    "--backend": nothing("every server is asked in OpenAI's words: --endpoint", "one"),
    "--warmup-requests": refused("is --num-warmups here", "one"),
    "--dataset": refused("is --dataset-name here", "one"),
}


def settle(namespace: Namespace) -> list[str]:
    """What flags mean together; the sentences for the start. Raises ConfigError."""
    values, said = given(namespace), getattr(namespace, "config", None)
    notes = [*(said.values.get("notes", ()) if said else ()), *getattr(namespace, "notes", ())]
    at = values.get("dist_init_addr")
    if at is not None and values.get("nnodes", 1) == 1:
        notes.append(f"--dist-init-addr {at}: not needed: ranks of one machine find each other")
    elif at is not None and "dist_token_file" not in values and is_loopback(at.rpartition(":")[0]):
        notes.append(
            f"--dist-init-addr {at}: without --dist-token-file, whoever is on this machine may join"
        )
    tp, dp = values.get("tp", 1), values.get("dp", 1)
    weak = {**(said.weak if said else {}), **getattr(namespace, "weak", {})}
    groups, divided = weak.get("dp", dp), values.get("enable_dp_attention")
    if groups != 1 and "dp" in weak and not divided:
        raise ConfigError(f"--attn-dp-size {groups}: not with --no-enable-dp-attention")
    if groups != dp and (groups != 1 or divided):  # else they are replicas of one group each
        raise ConfigError(
            f"--attn-dp-size {groups}: --dp {dp} says another number of groups: replicas that "
            "divide attention by sequences are not built: give --attn-dp-size alone"
        )
    if min(dp, tp) < 1 or not hasattr(namespace, "run"):
        return notes
    if divided:
        if tp > 1 and "dp" not in values:
            notes.append(f"--enable-dp-attention: is --dp {tp} where --dp is left out")
        elif tp > 1 and dp == 1:
            flag = "--attn-dp-size" if "dp" in weak else "--dp"
            notes.append(f"{flag} 1: one group of ranks divides attention by heads alone")
    elif (
        dp > 1
        and "enable_dp_attention" not in values
        and any("--enable-expert-parallel" in note for note in notes)
    ):
        namespace.tp, namespace.dp, namespace.enable_dp_attention = tp * dp, dp, True
        notes.append(
            f"--data-parallel-size {dp} --enable-expert-parallel: is --tp {tp * dp} --dp {dp} "
            "--enable-dp-attention here"
        )
    return notes
