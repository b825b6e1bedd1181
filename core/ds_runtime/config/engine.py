"""Every setting of the engine, its default and its help. Frozen; torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ds_runtime.common.speculation import DEFAULT_STEPS, DRAFT_QUANTIZE
from ds_runtime.common.speculation import check as check_speculation
from ds_runtime.config import values
from ds_runtime.config.cache_size import check_size
from ds_runtime.config.fields import check_fields, setting
from ds_runtime.config.ranks import check as check_ranks
from ds_runtime.config.tiers import check_tiers
from ds_runtime.errors import ConfigError


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine. Sizes in tokens unless said; memory in bytes."""

    model: str = setting(
        "demo", "checkpoint folder, hub id, or 'demo' for the embedded model", group="model"
    )
    load_format: str = setting(
        "auto",
        "auto reads the checkpoint's files; dummy makes random weights on the device from "
        "config.json alone, in its formats, to measure speed: answers mean nothing",
        choices=("auto", "dummy"),
        also={"safetensors": "auto"},
    )
    chat_template: str | None = setting(
        None, "jinja file used instead of the checkpoint's template"
    )
    context_length: int | None = setting(
        None, "longest prompt + output (default: the model's)", least=2
    )
    dtype: str = setting("auto", "compute dtype", choices=values.DTYPES, also=values.WORDS)
    quantize: str = setting(
        "none",
        "round bfloat16 or FP8 weights when they are loaded: int8 per output channel, or int4 in "
        "groups of 128 with an int8 head",
        choices=values.QUANTIZE,
    )
    allow_nan_weights: bool = setting(
        False, "load tensors that hold NaN: what is computed from them is NaN as well"
    )
    lora: tuple[str, ...] = setting(
        (), "NAME=DIR: a PEFT adapter that requests may name as their model", repeatable=True
    )
    max_loras: int | None = setting(
        None, "adapters that fit at once (default: as many as --lora; 0: none)", least=0, most=1024
    )
    max_lora_rank: int | None = setting(
        None, "largest rank of an adapter (default: the largest of --lora's, else 16)", least=1
    )
    lora_target_modules: tuple[str, ...] | None = setting(
        None,
        "modules that adapters may change, by PEFT's names, or 'all' (comma separated; default: "
        "those of --lora's adapters, else all but the routed experts)",
    )
    platform: str = setting(
        "auto", "platform to run on, or 'auto' for the best that works here", group="devices"
    )
    plugins: tuple[str, ...] | None = setting(None, "load only these plugins (comma separated)")
    plugin_allowlist: str | None = setting(
        None, "file of the third-party plugins that may be loaded (ds-runtime plugins --lock FILE)"
    )
    allow_platform_downgrade: bool = setting(
        False, "start on another device if the plugin of a device of this machine is broken"
    )
    tp: int = setting(1, "tensor-parallel ranks, one process each", least=1)
    dp: int | None = setting(
        None,
        "replicas of the engine with --tp ranks each, behind one server (default: 1). With "
        "--enable-dp-attention: groups of the --tp ranks (default: --tp)",
        least=1,
    )
    enable_dp_attention: bool = setting(
        False,
        "divide attention by sequences among --dp groups of the --tp ranks, and by heads inside a "
        "group. One group holds a sequence's KV cache. Every group has all weights of attention",
    )
    ep: int = setting(
        1,
        "parts of the routed experts by number, each on --tp / --ep ranks; 0: as many as --tp",
        least=0,
    )
    disable_custom_all_reduce: bool = setting(
        False,
        "sum over ranks and gather logits by the platform's library alone, whatever tune comm has "
        "measured",
    )
    enable_two_batch_overlap: bool = setting(
        False,
        "run steps with many tokens of prompts as two halves: while sums of one travel between "
        "ranks that divide heads, the other one computes",
    )
    dbo_prefill_token_threshold: int | None = setting(
        None,
        "tokens of prompts with which such a step is divided (default: half of --max-step-tokens)",
        least=2,
    )
    tbo_token_distribution_threshold: float | None = setting(
        None,
        "share of a step's tokens that both halves have if they end between sequences; else one is "
        "divided, at a multiple of 64 (0: none ever is) (default: 0.48)",
        least=0,
        most=0.5,
    )
    expert_metrics: bool = setting(
        False,
        "count in /metrics how many tokens choose each routed expert of each layer, on the device "
        "of rank 0",
    )
    nnodes: int = setting(1, "machines that the ranks of --tp are on, as many on each", least=1)
    node_rank: int = setting(
        0, "number of this machine among --nnodes; only number 0 speaks HTTP", least=0
    )
    dist_init_addr: str | None = setting(
        None,
        "HOST:PORT of machine 0, where ranks of several machines meet; the next port is used, too",
        empty=True,  # `check_ranks` says more
    )
    dist_token_file: str | None = setting(
        None,
        "file of a secret that all machines share and prove to each other. It encrypts what rank 0 "
        "sends (needed if --dist-init-addr is no loopback address)",
    )
    dist_timeout: int = setting(600, "seconds that ranks wait for each other", least=1)
    threads: int | None = setting(None, "CPU threads per rank (default: cores / ranks)", least=1)
    cpu_isa: str = setting(
        "auto", "instruction set of the CPU's kernels, or 'auto' for the best here"
    )
    kv_cache_dtype: str = setting(
        "auto",
        "dtype of the KV cache: the compute dtype (auto), or fp8 (e4m3; where attention is sparse, "
        "latents with a scale per 128 and bfloat16 keys)",
        choices=values.KV_DTYPES,
        also=values.WORDS,
        group="memory",
    )
    index_cache_dtype: str = setting(
        "auto",
        "dtype of the index keys of sparse attention: fp8 with a scale per key, unless the compute "
        "dtype is float32 (auto), or a compute dtype",
        choices=values.KV_DTYPES,
    )
    trained_rounding: bool = setting(
        False,
        "round DeepSeek-V4's cache entries as in its training: latents to FP8 in groups of 64, "
        "index queries and keys to FP4. off: as transformers computes it",
    )
    kv_memory: int | None = setting(
        None,
        "memory for the KV cache, e.g. 2GB (default: what weights and steps leave of a device. "
        "Weights and cache take nine tenths of it at most. On a CPU: the smaller of 8 full "
        "contexts and 25 % of free memory)",
        size=True,
        least=1,
    )
    mem_fraction_static: float | None = setting(
        None,
        "share of the memory that is free before loading, for weights and KV cache together",
        **values.SHARE,
    )
    memory_utilization: float | None = setting(
        None,
        "share of the device's memory for everything that the engine holds: weights, KV cache and "
        "the memory of steps",
        **values.SHARE,
    )
    memory_for_speed: str = setting(
        "auto",
        "second copies of weights, in forms that decode steps read faster: all of them, none "
        "(off), or those that leave enough KV cache (auto)",
        choices=values.FORMS,
    )
    page_size: int = setting(16, "tokens per KV page", least=1)
    state_snapshots: int | None = setting(
        None, "states kept for later prompts (auto: 15 % of caches)", also={"auto": None}, least=0
    )
    disable_radix_cache: bool = setting(False, "compute every prompt from its start, reusing no KV")
    enable_hierarchical_cache: bool = setting(
        False, "keep cached pages in host memory, too, so that prompts find them for longer"
    )
    hicache_ratio: float = setting(
        2.0,
        "host memory for cached pages, in sizes of the device's KV cache",
        above=0,
        most=1_000_000,
    )
    hicache_size: int = setting(
        0, "host memory for cached pages in GB (10^9 bytes) per rank, instead of a ratio", least=0
    )
    hicache_write_policy: str = setting(
        "write_through",
        "when to copy a cached page to host memory: once proved (write_through), once a second "
        "prompt read it (write_through_selective), or as it leaves the device (write_back)",
        choices=("write_through", "write_through_selective", "write_back"),
    )
    disk_cache: str | None = setting(
        None, "folder in which cached pages outlive the process, too; servers may share it"
    )
    disk_cache_size: int = setting(
        20 * 10**9, "bytes of all files in it, of every server that shares it", size=True, least=1
    )
    max_running_requests: int = setting(
        64,
        "most requests that run at once (default: 64; on a device of its own memory 512, or as "
        "many as find room for 2,048 tokens each)",
        group="scheduling",
        least=1,
    )
    max_queued_requests: int = setting(4096, "waiting requests before new ones get 503", least=1)
    max_step_tokens: int = setting(2048, "most tokens that one step computes", least=1)
    chunked_prefill_size: int = setting(
        512, "most prompt tokens of one request in one step", also={"-1": 1 << 30}, least=1
    )
    max_itl: float | None = setting(
        None,
        "longest time in ms between tokens that prompts in a step may cause, 0 for any. It limits "
        "their chunks (default: 50 in serve; elsewhere, and with --deterministic, 0)",
        least=0,
        most=1_000_000,
    )
    prefix_chunk: int = setting(
        4096, "cached tokens that one prefill expansion handles at a time", least=1
    )
    policy: str = setting(
        "fifo",
        "order of waiting requests; priority takes the highest number first",
        choices=("fifo", "priority"),
    )
    disable_overlap_schedule: bool = setting(
        False,
        "schedule a step only after the tokens of the last step are known, even if device and host "
        "could work at the same time",
    )
    disable_graph: bool = setting(
        False, "run all steps op by op, even if the device can replay captured steps"
    )
    graph_sizes: tuple[int, ...] | None = setting(
        None,
        "decode steps to capture, by number of requests. A step is padded to the next size "
        "(default: 1, 2, 4, 8, then wider apart up to --max-running-requests; on a CPU each up to "
        "32, lazily)",
        least=1,
        off="disable_graph",
    )
    max_graph_size: int | None = setting(
        None, "largest decode step to capture automatically, by requests (default: all)", least=1
    )
    disable_prefill_graph: bool = setting(
        False,
        "run steps with prompts op by op, even if the device can replay the parts between their "
        "attentions",
    )
    prefill_graph_sizes: tuple[int, ...] | None = setting(
        None,
        "steps with prompts to capture at start, by number of tokens. A step is padded to the next "
        "size (default: ever wider apart up to a chunk and a token per request, at most "
        "--max-prefill-graph-size; with one rank some while idle)",
        least=1,
        off="disable_prefill_graph",
    )
    max_prefill_graph_size: int = setting(
        1024, "largest step with prompts to capture automatically, by number of tokens", least=1
    )
    speculative_algorithm: str | None = setting(
        None,
        "draft tokens with the checkpoint's MTP layer and verify them in one forward; NEXTN and "
        "EAGLE mean the same",
        choices=(None, "NEXTN", "EAGLE"),
        also={"mtp": "NEXTN", "deepseek_mtp": "NEXTN"},
        group="speculation",
    )
    speculative_num_steps: int | None = setting(
        None, f"runs of the draft layer per step (default: {DEFAULT_STEPS})"
    )
    speculative_eagle_topk: int | None = setting(
        None, "continuations drafted per token: 1 is a chain, more a tree (default: 1)"
    )
    speculative_num_draft_tokens: int | None = setting(
        None,
        "tokens verified per sequence and step, the last one drawn included (default: all drafted)",
    )
    speculative_adaptive: bool = setting(
        False,
        "choose the number of drafts, down to none, from measured step times and from the share of "
        "drafts that were right",
    )
    speculative_draft_model_path: str | None = setting(
        None, "folder or hub id with the draft layer, if the checkpoint itself has none"
    )
    speculative_draft_quantize: str = setting(
        "auto",
        "round 16-bit weights that only drafts use, eh_proj and a copy of the head, to FP8. No "
        "answer changes. auto: if the device multiplies FP8. w4afp8: as auto, and the draft "
        "layer's routed experts to int4",
        choices=DRAFT_QUANTIZE,
    )
    attention_backend: str | None = setting(
        None, "provider whose kernels attention uses (default: the best)", group="kernels"
    )
    disable_mla: bool = setting(
        False,
        "keep the keys and values of all heads in the KV cache, instead of latents. This is for "
        "comparison: it takes many times the memory",
    )
    enable_torch_compile: bool = setting(
        False,
        "compile norms, activations, rotation and the choice of experts of small steps with "
        "torch.compile, before the port opens. On a CPU steps then run op by op",
    )
    torch_compile_max_bs: int = setting(
        32, "rows of the largest step that --enable-torch-compile is for", least=1
    )
    nsa_prefill_backend: str = setting(
        "auto", "provider whose kernel sparse attention of prompts uses, or 'auto' for the best"
    )
    nsa_decode_backend: str = setting(
        "auto", "provider whose kernel sparse attention of decode steps uses, or 'auto'"
    )
    nsa_topk_backend: str = setting(
        "auto", "provider whose kernel chooses the tokens of sparse attention, or 'auto'"
    )
    moe_runner_backend: str | None = setting(
        None, "provider whose kernels the routed experts use (default: the best)"
    )
    pin: tuple[str, ...] = setting((), "OP[@SITE-GLOB]=KERNEL: use this kernel", repeatable=True)
    fusion: tuple[str, ...] = setting(
        (),
        "NAME=on or NAME=off (comma separated): whether to fuse qkv_a, index_keys, shared_experts, "
        "or an op that is made of others (default: on, unless a plugin asks for off)",
    )
    deterministic: bool = setting(False, "bind only kernels that give the same bits every run")
    batch_invariant: bool = setting(
        False,
        "return the same bits for a request whatever else runs: only batch-invariant kernels are "
        "bound, prompts attend as in decode steps, and ranks add up in order",
    )
    strict_ops: bool = setting(
        False, "stop if a heavy op would fall to the reference, or weights would be converted"
    )
    plan: str | None = setting(None, "refuse to start unless the binding equals this plan file")

    def __post_init__(self) -> None:
        check_fields(self)
        if self.max_itl and self.deterministic:
            raise ConfigError(
                f"--max-itl {self.max_itl:g} with --deterministic: chunks that are sized by time "
                "differ from run to run, and so may bits: leave one of them out"
            )
        if self.max_running_requests > values.MOST_REQUESTS:
            raise ConfigError(
                f"--max-running-requests {self.max_running_requests}: must be at most "
                f"{values.MOST_REQUESTS}; more may wait (--max-queued-requests)"
            )
        for given in self.fusion:
            name, _, state = given.partition("=")
            if not name or state not in ("on", "off"):
                raise ConfigError(f"--fusion {given}: write NAME=on or NAME=off")
            if self.fusions[name] != (state == "on"):
                raise ConfigError(f"--fusion {name}: is both on and off: leave one of them out")
        check_size(self)
        check_tiers(self)
        check_speculation(self)
        check_ranks(self)

    @property
    def fusions(self) -> dict[str, bool]:
        """Fusions that are named, and whether they are to be."""
        return {name: state == "on" for name, _, state in (f.partition("=") for f in self.fusion)}

    @property
    def attn_dp(self) -> int:
        """Groups of ranks that divide the sequences: each has KV pages of its own."""
        return (self.dp or self.tp) if self.enable_dp_attention else 1

    @property
    def expert_parts(self) -> int:
        """Parts of the routed experts by number."""
        return self.ep or self.tp

    @property
    def groups(self) -> int:
        """Of those that divide the sequences, as many as can have one."""
        return min(self.attn_dp, self.max_running_requests)

    @property
    def replicas(self) -> int:
        """Engines that one server runs."""
        return 1 if self.enable_dp_attention else self.dp or 1


def with_changes(config: EngineConfig, values: Mapping[str, Any]) -> EngineConfig:
    """A copy with other values, checked again."""
    return replace(config, **values)
