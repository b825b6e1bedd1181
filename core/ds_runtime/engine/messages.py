"""The messages between the front end (HTTP, tokenisation) and the engine. msgpack, tagged.

Front end → engine: Submit, SubmitGroup, Abort, Flush, Profile, Adapt, HoldPages, PullPages, Stop.
Engine → front end: Ready, Tokens, Failed, Stats, Flushed, Profiled, Adapted, PagesHeld,
PagesPulled, Dead. One request id is one choice: a prompt with n choices is one SubmitGroup, which
the engine takes as n Submits with `choice` 0…n−1.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ds_runtime.errors import DsRuntimeError, FieldPath, LogitsError, QueueFullError, RequestError
from ds_runtime.kv.transfer.asked import HoldPages, PagesHeld, PagesPulled, PullPages
from ds_runtime.sampling_params import SamplingParams


class Asked(msgspec.Struct, kw_only=True):
    """What all choices of a prompt have in common.

    `think_id`: the token that opens reasoning, where reasoning is to stay out of the prefix cache.
    `adapter`: the name of a low-rank adapter; "" is the model itself. `client`: who asks, for what
    is shared by turns; "" is this process. `salt`: what the prefix cache knows under another one is
    as if it were not there.
    """

    prompt: list[int]
    params: SamplingParams
    seed: int
    priority: int = 0
    think_id: int | None = None
    adapter: str = ""
    client: str = ""
    salt: str = ""


class Submit(Asked, tag=True, kw_only=True):
    """One choice to generate."""

    rid: str
    choice: int = 0


class SubmitGroup(Asked, tag=True, kw_only=True):
    """All choices of one prompt, which is sent once. `rids`: one id per choice, in order."""

    rids: list[str]

    def choices(self) -> list[Submit]:
        """One Submit per choice; they share the prompt's list.

        Prompt log-probabilities are the same for all, so only choice 0 computes them; the engine
        sends them before or with the first tokens of the others.
        """
        shared = {name: getattr(self, name) for name in Asked.__struct_fields__}
        first, *others = self.rids
        found = [Submit(rid=first, **shared)]
        if self.params.prompt_logprobs is not None:
            shared["params"] = msgspec.structs.replace(self.params, prompt_logprobs=None)
        return found + [Submit(rid=rid, choice=n, **shared) for n, rid in enumerate(others, 1)]


class Abort(msgspec.Struct, tag=True):
    """Forget these requests at once and free their pages. Unknown ids are ignored."""

    rids: list[str]


class Flush(msgspec.Struct, tag=True):
    """Empty the prefix cache."""

    token: str = ""


class Profile(msgspec.Struct, tag=True):
    """Start to profile and keep the trace for `folder`, or with None stop and write it."""

    folder: str | None = None
    token: str = ""


class Adapt(msgspec.Struct, tag=True):
    """Load the adapter in `folder` under a name, or with None unload it."""

    name: str
    folder: str | None = None
    token: str = ""


class Stop(msgspec.Struct, tag=True):
    """Leave the loop and exit."""


class TokenLogprob(msgspec.Struct, array_like=True):
    """One position. token: its id. logprob: its log-probability. top: (id, log-probability) of the
    best.
    """

    token: int
    logprob: float
    top: list[tuple[int, float]] = []


class Tokens(msgspec.Struct, tag=True, kw_only=True):
    """New tokens of one request, in order.

    * rid: the request's id. tokens: their ids.
    * logprobs: one entry per token. prompt_logprobs: once, with the first tokens: one entry per
      position of the prompt, the first is None.
    * finish: "stop" or "length" on the last message, else None.
    * stop_token: if finish is "stop": the last of `tokens` is this end or stop id.
    * cached_tokens: tokens of the prompt that the prefix cache had.
    * cached_by_tier: where these were: "device", "host" or "storage" (a disk). None without a host
      tier.
    * prefill_seconds: comes with the first tokens: from the plan of the request's first step to
      now.
    """

    rid: str
    tokens: list[int]
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish: str | None = None
    stop_token: int | None = None
    cached_tokens: int = 0
    cached_by_tier: dict[str, int] | None = None
    prefill_seconds: float | None = None


class Failed(msgspec.Struct, tag=True):
    """A request that the engine will not run, or not to its end. kind: "queue_full", "invalid", or
    "broken" where the model's logits are not finite.
    """

    rid: str
    kind: str
    said: str | tuple[str | FieldPath, ...]
    param: str | None = None

    @property
    def message(self) -> str:
        """The sentence as text."""
        return "".join(map(str, self.said))

    @property
    def error(self) -> DsRuntimeError:
        """What to raise for it."""
        if self.kind == "queue_full":
            return QueueFullError(self.message)
        if self.kind == "broken":
            return LogitsError(self.message, self.rid)
        return RequestError(self.said, self.param)


class Stats(msgspec.Struct, tag=True, kw_only=True):
    """Counters since start and gauges now. The front end gets them at most a few times a second.

    * running, waiting: requests now.
    * pages_total, pages_free, pages_cached: KV pages. Cached ones are held by the prefix cache
      alone, so that they can be evicted.
    * pages_held, pages_coming: pages that leases of other engines keep, and those that are read
      from others. pages_given, pages_pulled: those that have gone each way so far. All other pages
      are in use.
    * snapshots_total, snapshots_kept: of states: how many there may be, and those that later
      prompts can continue from. snapshot_hits: how often one did. snapshots_evicted: those that
      made room.
    * host_pages_total, host_pages_kept, host_pages_evicted: pages of host memory: at most, now, and
      those that made room.
    * host_saved_bytes, host_loaded_bytes: of one rank. host_save_seconds, host_load_seconds: from
      when such copies were queued until a step found them ended.
    * disk_written_bytes, disk_read_bytes: of the disk tier. disk_stopped: 1 if it is full or
      broken, so that nothing is written.
    * prompt_tokens, generated_tokens: so far. cached_tokens: prompt tokens that were cached.
      cached_host_tokens, cached_disk_tokens: of these, those in host memory and on the disk.
    * preemptions: requests that lost their pages and continue later. prefix_waits: prompts that
      waited for a beginning that another one was computing.
    * broken: choices that ended because the model's logits were not finite.
    * steps, step_seconds: their number and time.
    * verified: how often a request's drafts were verified. draft_tokens: those that were.
      accepted_tokens: those that were right.
    * mask_seconds: processor time of masks of structured output. late_masks: how often a choice sat
      a step out because its mask was not there. rules_waiting: rules that wait to be compiled.
    * prefill_steps, prefill_tokens: steps with prompts, and the prompts' new tokens in them.
      prefill_absorbed: of these, rows that attended absorbed. prefill_steps_cut: steps that carried
      less for --max-itl.
    * prefill_seconds, prefill_seconds_expected: what such steps took and were expected to take,
      since their cost is known.
    * wire_bytes: what each rank has received from the others, by arithmetic.
    * sums, sum_bytes: all-reduces by kind, and what each rank received in them.
    * skew_steps: steps in which ranks were compared. skew_seconds: by how much the last rank came
      later to collectives than the first. rank_late: the same by rank.
    * expert_tokens: layer → how many tokens chose each routed expert, with --expert-metrics.
    * compilations: kernels that were compiled in rank 0's process, by "compiler kernel".
    """

    running: int = 0
    waiting: int = 0
    pages_total: int = 0
    pages_free: int = 0
    pages_cached: int = 0
    snapshots_total: int = 0
    snapshots_kept: int = 0
    snapshot_hits: int = 0
    snapshots_evicted: int = 0
    host_pages_total: int = 0
    host_pages_kept: int = 0
    host_pages_evicted: int = 0
    cached_host_tokens: int = 0
    cached_disk_tokens: int = 0
    disk_written_bytes: int = 0
    disk_read_bytes: int = 0
    disk_stopped: int = 0
    host_saved_bytes: int = 0
    host_loaded_bytes: int = 0
    host_save_seconds: float = 0.0
    host_load_seconds: float = 0.0
    pages_held: int = 0
    pages_coming: int = 0
    pages_given: int = 0
    pages_pulled: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    prefix_waits: int = 0
    broken: int = 0
    steps: int = 0
    verified: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    step_seconds: float = 0.0
    mask_seconds: float = 0.0
    late_masks: int = 0
    rules_waiting: int = 0
    prefill_steps: int = 0
    prefill_tokens: int = 0
    prefill_absorbed: int = 0
    prefill_steps_cut: int = 0
    prefill_seconds: float = 0.0
    prefill_seconds_expected: float = 0.0
    wire_bytes: float = 0.0
    sums: dict[str, int] = {}
    sum_bytes: dict[str, float] = {}
    skew_steps: int = 0
    skew_seconds: float = 0.0
    rank_late: dict[int, float] = {}
    expert_tokens: dict[int, list[int]] = {}
    compilations: dict[str, int] = {}


class Flushed(msgspec.Struct, tag=True):
    """Answer to Flush: pages freed."""

    token: str
    pages: int


class Profiled(msgspec.Struct, tag=True):
    """Answer to Profile: the file that was written, "" at the start; or why it was refused."""

    token: str
    path: str = ""
    refused: str = ""


class Adapted(msgspec.Struct, tag=True):
    """Answer to Adapt: done, or why it was refused. `adapters`: the names that are loaded now;
    `param`: the field that is to blame."""

    token: str
    adapters: list[str]
    refused: str = ""
    param: str | None = None


class Ready(msgspec.Struct, tag=True, kw_only=True):
    """The engine is loaded and has run a warm-up step. `banner` is what the operator sees.

    `settings` are the fields of EngineConfig as they were settled, `plan` is `Plan.to_dict()`.
    """

    banner: str
    context_length: int
    vocab_size: int
    kv_tokens: int
    page_size: int
    queue_limit: int
    adapters: list[str] = []
    settings: dict[str, Any] = {}
    plan: dict[str, Any] = {}


class Dead(msgspec.Struct, tag=True):
    """An engine process is going down; the reason, as a sentence."""

    reason: str


ToEngine = Submit | SubmitGroup | Abort | Flush | Profile | Adapt | HoldPages | PullPages | Stop
Answer = Flushed | Profiled | Adapted | PagesHeld | PagesPulled
FromEngine = Tokens | Failed | Stats | Answer | Ready | Dead

encoder = msgspec.msgpack.Encoder()
decode_to_engine = msgspec.msgpack.Decoder(ToEngine)
decode_from_engine = msgspec.msgpack.Decoder(list[FromEngine])  # what a step gave is one frame
