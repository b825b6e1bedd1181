"""Which requests run, what a step holds, and how steps are captured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ds_runtime.cli.known.notation import ends, ignored
from ds_runtime.config.spelling import ALWAYS, DEFAULT, GIVEN, Spelling

_ORDER = Spelling(
    "--policy decides the order: fifo, or priority, which takes the important first",
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
    "is --policy priority here, where the highest number comes first: turn the numbers round",
    refused=True,
    takes="one",
)
_ADMITTED = "a request starts when there are pages for its prompt, and may be preempted"

SCHEDULING: Mapping[str, str | Spelling] = {
    "--max-num-seqs": "max_running_requests",
    "--max-num-batched-tokens": "max_step_tokens",
    "--max-prefill-tokens": Spelling(
        "counts the tokens of decode steps, too, and is --max-step-tokens here",
        {"max_step_tokens": GIVEN},
        takes="one",
    ),
    "--no-enable-chunked-prefill": Spelling(
        "is --chunked-prefill-size -1 here, unless another is said",
        {"chunked_prefill_size": "-1"},
        weak=True,
    ),
    "--disable-chunked-prefill": Spelling(
        "is --chunked-prefill-size -1 here, unless another is said",
        {"chunked_prefill_size": "-1"},
        weak=True,
    ),
    "--enable-chunked-prefill": Spelling(
        "is so unless --chunked-prefill-size is -1", {"chunked_prefill_size": DEFAULT}, weak=True
    ),
    "--schedule-policy": _ORDER,
    "--scheduling-policy": replace(_ORDER, values={**_ORDER.values, "priority": _LOWEST_FIRST}),
    "--enable-priority-scheduling": Spelling("is --policy priority here", {"policy": "priority"}),
    "--max-num-active-seqs": "max_running_requests",
    "--max-num-queued-reqs": Spelling(
        "counts running requests, too, and is --max-queued-requests here",
        {"max_queued_requests": GIVEN},
        takes="one",
    ),
    **ends("is --max-queued-requests here, in requests", "--max-num-queued-tokens N"),
    "--no-async-scheduling": Spelling(
        "is --disable-overlap-schedule here", {"disable_overlap_schedule": "True"}
    ),
    "--async-scheduling": Spelling(
        "is so here unless --disable-overlap-schedule follows",
        {"disable_overlap_schedule": "False"},
    ),
    **ignored(ALWAYS, "--enable-mixed-chunk"),
    **ignored(
        "--chunked-prefill-size and --max-step-tokens bound what a step takes of prompts",
        """
        --max-num-partial-prefills N  --max-long-partial-prefills N  --prefill-max-requests N
        --long-prefill-token-threshold N  --long-prefill-token-threshold-adaptive
        """,
    ),
    **ends("is --max-step-tokens here", "--max-num-scheduled-tokens N"),
    **ends("a prompt that is too long is refused: shorten it", "--allow-auto-truncate"),
    **ends(
        "the highest number comes first: turn the numbers round",
        """
        --schedule-low-priority-values-first
        """,
    ),
    **ends(
        "a request without a priority has 0: let requests say theirs",
        """
        --default-priority-value 0|N
        """,
    ),
    **ends(
        "without --policy priority, requests may say one: leave it out",
        """
        --abort-on-priority-when-disabled
        """,
    ),
    **ignored(
        "a request yields when the KV cache is full: the last in the order first",
        """
        --disable-priority-preemption  --priority-scheduling-preemption-threshold N
        --retraction-policy X
        """,
    ),
    **ignored(
        _ADMITTED,
        """
        --schedule-conservativeness N  --min-free-slots-delay N  --watermark N
        --scheduler-reserve-full-isl  --no-scheduler-reserve-full-isl
        """,
    ),
    **ignored("--max-itl says how long a step may take", "--performance-mode X"),
    **ignored(
        "a step takes prompts and decodes together: --max-itl bounds the prompts",
        """
        --prefill-decode-interval N  --prefill-decode-interval-min-bs N
        --enable-prefill-delayer  --prefill-delayer-max-delay-passes N
        --prefill-delayer-token-usage-low-watermark N  --prefill-delayer-queue-min-ratio N
        --prefill-delayer-forward-passes-buckets N...  --prefill-delayer-max-delay-ms N
        --prefill-delayer-wait-seconds-buckets N...  --prefill-schedule-interval N
        """,
    ),
    **ignored(
        "every step is scheduled",
        """
        --num-continuous-decode-steps N  --scheduler-recv-interval N
        """,
    ),
}
CAPTURE: Mapping[str, str | Spelling] = {
    "--enforce-eager": Spelling("is --disable-graph here", {"disable_graph": "True"}),
    **ignored(
        "steps are captured as they are: --disable-graph turns that off",
        """
        --compilation-config X  --optimization-level X
        """,
    ),
    **ignored(
        "--max-graph-size bounds what is captured",
        "--max-seq-len-to-capture N  --context-bucket N",
    ),
    **ignored("torch's own variables decide: TORCH_LOGS", "--enable-torch-compile-debug-mode"),
}
SPECULATION: Mapping[str, str | Spelling] = {
    "--speculative-algo": "speculative_algorithm",
    "--speculative-draft": "speculative_draft_model_path",
    "--speculative-draft-model": "speculative_draft_model_path",
    "--spec-method": "speculative_algorithm",
    "--spec-model": "speculative_draft_model_path",
    "--spec-tokens": "speculative_num_steps",
    **ends(
        "is --speculative-algorithm NEXTN --speculative-num-steps N here",
        """
        --speculative-config X
        """,
    ),
    **ends(
        "is for hf download: --speculative-draft-model-path takes the folder that it prints",
        "--speculative-draft-model-revision X",
    ),
    **ignored(
        "drafts are checked by kernels of decode steps",
        """
        --speculative-attention-mode X
        """,
    ),
    **ends(
        "the model's own draws judge drafts, so that drafts change no token: leave it out",
        """
        --speculative-accept-threshold-single 1|1.0|X  --speculative-accept-threshold-acc 1|1.0|X
        """,
    ),
    **ignored(
        "the model's own draws judge drafts, so that drafts change no token",
        "--speculative-use-rejection-sampling --speculative-use-block-verification",
    ),
    **ends(
        "only the checkpoint's own MTP layer drafts: leave it out",
        """
        --uno-lora-path X  --enable-multi-layer-eagle  --speculative-token-map X
        --speculative-draft-window-size N  --speculative-draft-sink-size N
        --speculative-ngram-external-corpus-path X  --spec-trace-dir X
        """,
    ),
    **ignored(
        "only the checkpoint's own MTP layer drafts",
        """
        --speculative-dflash-block-size N  --speculative-domino-candidate-pool-size N
        --speculative-dspark-block-size N  --speculative-dspark-sps-table-path X
        --speculative-dspark-confidence-sts-path X
        --speculative-dspark-align-verify-tokens-to-graph-tier
        --speculative-ngram-min-bfs-breadth N  --speculative-ngram-max-bfs-breadth N
        --speculative-ngram-match-type X  --speculative-ngram-max-trie-depth N
        --speculative-ngram-capacity N  --speculative-ngram-external-sam-budget N
        --speculative-ngram-external-corpus-max-tokens N
        """,
    ),
    **ignored(
        "the draft layer is loaded and computed as the model is",
        """
        --speculative-draft-load-format X  --speculative-draft-attention-backend X
        --speculative-moe-runner-backend X
        --speculative-dsa-topk-backend X  --[no-]speculative-enable-w4a4-mxfp4-megamoe
        """,
    ),
    **ends(
        "the draft layer's cache has the dtype of the model's: --kv-cache-dtype",
        "--speculative-draft-kv-cache-dtype auto|X",
    ),
    **ignored(
        "--speculative-adaptive measures what it decides by",
        """
        --speculative-adaptive-config X
        """,
    ),
}
