"""One request inside the engine: all that changes about it is here, and its results on their way.

Results of requests that a grammar guides are taken once the guides have caught up.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter

from msgspec.structs import replace

from ds_runtime.engine.messages import Failed, Submit, TokenLogprob, Tokens
from ds_runtime.engine.schedule.adapters import Held
from ds_runtime.engine.step.plan import RowInit, Work, WorkResult
from ds_runtime.errors import FieldPath
from ds_runtime.grammar.followers import Followers, Following
from ds_runtime.grammar.guide import Followed, Guide
from ds_runtime.kv.holder import Holder
from ds_runtime.kv.prefix import Node, Realm
from ds_runtime.kv.tiers.disk import Fetch
from ds_runtime.sampling_params import SamplingParams


class State(Enum):
    """Waiting owns nothing; running owns a row and pages; finished has left the scheduler."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


_RUNNING, _FINISHED = State.RUNNING, State.FINISHED  # an Enum's own names are slow to look up
_OPENING = 4  # tokens at a prompt's end among which one that opens reasoning stands


@dataclass(eq=False, slots=True)
class Request:
    """One choice. Lengths and counts are in tokens.

    `order` sorts requests by right of way, smaller first. `group`: whose pages it has while it
    runs, where groups of ranks divide attention by sequences. `max_len` bounds prompt + output.
    `num_computed` counts the tokens whose KV is computed or being computed by a launched step;
    `num_pending` the sampled tokens that no result has brought back yet. The first `num_shared` of
    `pages` belong to the prefix cache, under a reference on `node`; the others to this request.
    `snapshot`: a block that is its own, with what it had besides pages at token `snapshot_at`;
    `branches`: where others leave its prompt, so that one is due there. If `max_shared` is set, by
    the prompt's end or `think_id` in the output, only this many tokens may enter the prefix cache.
    `on_device`: the last token of the sequence was sampled in this row. `guide`: the grammar that
    the output follows; which token may come next is known once the last one is. `admitted`: when
    its first step was planned, by `time.monotonic`. `adapter`: None for the model itself.
    `salt`: only requests with the same one share pages of the prefix cache. `limit` bounds the
    tokens that the engine can hold. `num_drafts` drafts lie after the last token in this row.
    `drafts`: these, where a guide needs to know them, with `draft_parents` where they branch.
    `is_verifying`: how many of them were right is not known, and so not where the sequence ends.
    `is_following`: its guide is on its way after the last tokens. `behind`: who computes the first
    `behind_pages` pages of this prompt, while this request waits to read them. `num_loaded`: pages
    that came from below the device when it began to run; `cached_by_tier`: see `Tokens`. `fetch`:
    what was asked of the disk for it.
    """

    rid: str
    prompt: list[int]
    params: SamplingParams
    seed: int
    choice: int
    order: tuple[int, int]
    stop_ids: frozenset[int]
    max_len: int
    limit: int
    guide: Guide | None = None
    think_id: int | None = None
    adapter: Held | None = None
    salt: str = ""
    max_shared: int | None = None

    output: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=lambda: [None])
    state: State = State.WAITING
    row: int = -1
    group: int = 0
    pages: list[int] = field(default_factory=list)
    num_shared: int = 0
    node: Node | None = None
    snapshot: int = -1
    snapshot_at: int = 0
    branches: set[int] = field(default_factory=set)
    num_computed: int = 0
    num_pending: int = 0
    num_in_flight: int = 0
    on_device: bool = False
    num_drafts: int = 0
    drafts: list[int] = field(default_factory=list)
    draft_parents: list[int] = field(default_factory=list)
    is_verifying: bool = False
    is_following: bool = False
    behind: Holder | None = None
    behind_pages: int = 0
    beginnings: list[int] = field(default_factory=list)
    cached_tokens: int | None = None
    num_loaded: int = 0
    cached_by_tier: dict[str, int] | None = None
    fetch: Fetch | None = None
    admitted: float = 0.0

    @staticmethod
    def create(
        submit: Submit,
        order: tuple[int, int],
        eos: tuple[int, ...],
        limit: int,
        guide: Guide | None = None,
        adapter: Held | None = None,
    ) -> Request:
        """From its message. `limit`: the longest sequence that the engine can hold."""
        params = submit.params
        stop_ids = frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else eos)
        max_len = limit
        if params.max_tokens is not None:
            max_len = min(limit, len(submit.prompt) + params.max_tokens)
        request = Request(
            rid=submit.rid,
            prompt=submit.prompt,
            params=params,
            seed=submit.seed,
            choice=submit.choice,
            order=order,
            stop_ids=stop_ids,
            max_len=max_len,
            limit=limit,
            guide=guide,
            think_id=submit.think_id,
            adapter=adapter,
            salt=submit.salt,
        )
        if submit.think_id in submit.prompt[-_OPENING:]:
            request.max_shared = len(submit.prompt)
        return request

    def append(self, token: int) -> None:
        """A sampled token."""
        if token == self.think_id and self.max_shared is None:
            self.max_shared = self.prompt_len + len(self.output)
        self.output.append(token)

    def take(
        self, tokens: Iterable[int], followed: Followed | None
    ) -> tuple[Tokens, tuple[str | FieldPath, ...]]:
        """Append sampled tokens up to the one that the request ends with or after. Returns what is
        told of them, and what is wrong with the rule for them, if the last one showed that.
        followed: what its guide says of them.
        """
        message = Tokens(rid=self.rid, tokens=[], cached_tokens=self.cached_tokens or 0)
        message.cached_by_tier = self.cached_by_tier
        if not self.output:
            message.prefill_seconds = time.monotonic() - self.admitted
        for index, token in enumerate(tokens):
            self.append(token)
            message.tokens.append(token)
            if token in self.stop_ids and len(self.output) > self.params.min_tokens:
                message.finish, message.stop_token = "stop", token
            elif followed is not None and index == followed.end:
                if followed.fault:
                    return message, followed.fault
                message.finish = "stop"
            elif len(self.prompt) + len(self.output) >= self.max_len:
                message.finish = "length"
            if message.finish:
                break
        return message, ()

    @property
    def realm(self) -> Realm:
        """What tells its pages from those of the same tokens that it may not read."""
        return Realm(0 if self.adapter is None else self.adapter.key, self.salt)

    def broken(self, position: int) -> Failed:
        """That the logits for the token at `position` are not finite."""
        number = position - self.prompt_len
        which = f"{number + 1} of the answer" if number >= 0 else f"{position + 1} of the prompt"
        said = (
            f"the model's logits for token {which} are not finite (NaN or infinity): the choice "
            "ends here, and nothing that was computed for it stays in the prefix cache"
        )
        return Failed(self.rid, "broken", said)

    @property
    def is_behind(self) -> bool:
        """Whether another one still computes what this request is to read."""
        other = self.behind
        return other is not None and other.is_running and other.num_shared < self.behind_pages

    @property
    def is_fetching(self) -> bool:
        """Whether it waits for the disk."""
        return self.fetch is not None and not self.fetch.done

    def beginning(self, index: int, page_size: int) -> int:
        """A hash of the prompt's tokens up to the end of full page `index`, and of its realm."""
        known = self.beginnings
        while len(known) <= index:
            start = len(known) * page_size
            page = tuple(self.prompt[start : start + page_size])
            known.append(hash((known[-1] if known else hash(self.realm), page)))
        return known[index]

    @property
    def prompt_len(self) -> int:
        return len(self.prompt)

    @property
    def total_len(self) -> int:
        """Prompt and output, with the tokens that are sampled but not back yet."""
        return len(self.prompt) + len(self.output) + self.num_pending

    @property
    def is_running(self) -> bool:
        return self.state is _RUNNING

    @property
    def is_finished(self) -> bool:
        return self.state is _FINISHED

    @property
    def can_prefill(self) -> bool:
        """Whether tokens known to the host are left to compute."""
        return self.is_running and not self.on_device

    @property
    def can_decode(self) -> bool:
        """Whether one more token is wanted after the last sampled one, as far as is known."""
        if not (self.on_device and self.is_running) or self.total_len >= self.max_len:
            return False
        return not self.awaits_token

    @property
    def awaits_token(self) -> bool:
        """Whether nothing can follow until the sampled token is known."""
        return self.num_pending > 0 and (self.guide is not None or self.is_verifying)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether prompt log-probabilities were asked for and are not complete."""
        asked = self.params.prompt_logprobs is not None
        return asked and len(self.prompt_logprobs) < len(self.prompt)

    def tokens(self, start: int, stop: int) -> list[int]:
        """Tokens [start, stop) of prompt + output."""
        size = len(self.prompt)
        if stop <= size:
            return self.prompt[start:stop]
        if start >= size:
            return self.output[start - size : stop - size]
        return self.prompt[start:] + self.output[: stop - size]

    def row_init(self) -> RowInit:
        """What ranks need to know when it takes its row."""
        return RowInit(
            row=self.row,
            params=self.params if self.guide is None else replace(self.params, rules=None),
            seed=self.seed,
            choice=self.choice,
            prompt=self.prompt,
            output=self.output.copy(),
            stop_ids=sorted(self.stop_ids),
        )


right_of_way = attrgetter("order")


def remove(ordered: list[Request], request: Request) -> None:
    """Take it out of a list in right of way."""
    index = bisect_left(ordered, request.order, key=right_of_way)
    assert ordered[index] is request
    del ordered[index]


@dataclass(eq=False, slots=True)
class Guided:
    """One request's result, and its guide on its way."""

    request: Request
    work: Work
    outcome: WorkResult
    following: Following

    @staticmethod
    def of(request: Request, work: Work, outcome: WorkResult) -> Guided:
        """A result that has just come."""
        assert request.guide is not None
        ahead = (outcome.tokens, outcome.drafts, outcome.draft_parents)
        return Guided(request, work, outcome, Following(request.guide, *ahead))


class Underway:
    """Results that are not taken yet. Those of guides that are late keep nobody else waiting."""

    def __init__(self) -> None:
        self._followers = Followers()
        self._guided: list[Guided] = []

    def begin(self, fresh: Sequence[Guided]) -> int:
        """Let guides follow, and wait for the quick ones; how many are late."""
        for one in fresh:
            one.request.is_following = True
        following = [one.following for one in fresh]
        self._followers.begin(following)
        self._followers.wait(following)
        self._guided += fresh
        return sum(one.found is None for one in following)

    def ready(self, seconds: float) -> list[Guided]:
        """Those that are there, out of here; `seconds` to wait for the first."""
        if not self._guided:
            return []
        if seconds:
            self._followers.wait_any([one.following for one in self._guided], seconds)
        # Looked at once: a thread may be done at any time.
        there = [one for one in self._guided if one.following.found is not None]
        gone = set(map(id, there))
        self._guided = [one for one in self._guided if id(one) not in gone]
        for one in there:
            one.request.is_following = False
        return there

    def close(self) -> None:
        """Let the threads of guides leave."""
        self._followers.close()
