"""What the engine counts, as Prometheus names: fields of Stats, with name, kind and help."""

from __future__ import annotations

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

STATS: tuple[tuple[str, str, type[Metric], str], ...] = (
    ("running", "num_requests_running", GaugeMetricFamily, "choices that the engine runs"),
    ("waiting", "num_requests_waiting", GaugeMetricFamily, "choices that wait in the engine"),
    ("pages_total", "kv_pages", GaugeMetricFamily, "KV pages"),
    ("pages_free", "kv_pages_free", GaugeMetricFamily, "KV pages that hold nothing"),
    (
        "pages_cached",
        "kv_pages_cached",
        GaugeMetricFamily,
        "KV pages that only the prefix cache holds",
    ),
    (
        "snapshots_total",
        "state_snapshots",
        GaugeMetricFamily,
        "snapshots of states that there may be; 0 where requests keep pages alone",
    ),
    (
        "snapshots_kept",
        "state_snapshots_kept",
        GaugeMetricFamily,
        "snapshots that later prompts can go on from; answers under way have others",
    ),
    (
        "snapshot_hits",
        "state_snapshot_hits",
        CounterMetricFamily,
        "prompts that went on from a snapshot",
    ),
    (
        "snapshots_evicted",
        "state_snapshots_evicted",
        CounterMetricFamily,
        "snapshots that made room for others; with more of them prompts may find theirs",
    ),
    (
        "pages_held",
        "kv_pages_held",
        GaugeMetricFamily,
        "KV pages that are kept for other engines, which read them",
    ),
    (
        "pages_coming",
        "kv_pages_coming",
        GaugeMetricFamily,
        "KV pages that are being read from other engines",
    ),
    (
        "pages_given",
        "kv_pages_given",
        CounterMetricFamily,
        "KV pages that other engines have read here",
    ),
    (
        "pages_pulled",
        "kv_pages_pulled",
        CounterMetricFamily,
        "KV pages that were read from other engines",
    ),
    ("prompt_tokens", "prompt_tokens", CounterMetricFamily, "prompt tokens, cached ones included"),
    ("generated_tokens", "generation_tokens", CounterMetricFamily, "generated tokens"),
    (
        "prompt_tokens",
        "prefix_cache_queries",
        CounterMetricFamily,
        "prompt tokens that were looked for in the prefix cache",
    ),
    (
        "cached_tokens",
        "prefix_cache_hits",
        CounterMetricFamily,
        "prompt tokens taken from the prefix cache",
    ),
    (
        "preemptions",
        "num_preemptions",
        CounterMetricFamily,
        "requests that gave their pages back to go on later",
    ),
    (
        "broken",
        "corrupted_requests",
        CounterMetricFamily,
        "choices that ended because the model's logits were NaN or infinite",
    ),
    (
        "verified",
        "spec_decode_num_drafts",
        CounterMetricFamily,
        "drafts of one request that were verified",
    ),
    (
        "draft_tokens",
        "spec_decode_num_draft_tokens",
        CounterMetricFamily,
        "drafted tokens that were verified",
    ),
    (
        "accepted_tokens",
        "spec_decode_num_accepted_tokens",
        CounterMetricFamily,
        "drafted tokens that were right",
    ),
    (
        "prefix_waits",
        "prefix_waits",
        CounterMetricFamily,
        "choices that waited while another one computed the beginning of their prompt",
    ),
    (
        "mask_seconds",
        "grammar_mask_seconds",
        CounterMetricFamily,
        "processor time that masks of structured output took",
    ),
    (
        "late_masks",
        "grammar_late_masks",
        CounterMetricFamily,
        "tokens whose next mask a step did not wait for",
    ),
    (
        "rules_waiting",
        "grammar_rules_waiting",
        GaugeMetricFamily,
        "rules for the output that wait to be compiled",
    ),
    (
        "prefill_steps",
        "prefill_steps",
        CounterMetricFamily,
        "engine steps that carried tokens of prompts",
    ),
    (
        "prefill_tokens",
        "prefill_chunk_tokens",
        CounterMetricFamily,
        "tokens of prompts in these steps; over the steps: the mean chunk",
    ),
    (
        "prefill_steps_cut",
        "prefill_steps_cut",
        CounterMetricFamily,
        "of these steps those that carried less of prompts, for --max-itl",
    ),
    (
        "prefill_seconds",
        "prefill_step_seconds",
        CounterMetricFamily,
        "time of these steps since their cost is known",
    ),
    (
        "prefill_seconds_expected",
        "prefill_step_expected_seconds",
        CounterMetricFamily,
        "time that these steps were expected to take; chunks are sized by it",
    ),
    (
        "wire_bytes",
        "received_bytes_per_rank",
        CounterMetricFamily,
        "what each rank received from the others, by arithmetic; 0 of one rank",
    ),
    ("steps", "engine_steps", CounterMetricFamily, "engine steps"),
    ("step_seconds", "engine_step_seconds", CounterMetricFamily, "time in engine steps"),
)
