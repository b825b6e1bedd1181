"""What a launched step is to bring back: from its plan to the rows of logits, and to its result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ds_runtime.engine.messages import TokenLogprob
from ds_runtime.engine.step.plan import StepPlan, StepResult, WorkResult
from ds_runtime.engine.step.sampler import Draw, LogprobGroup, Sampler
from ds_runtime.engine.step.transfer import Download

SCORE_ROWS = 64  # prompt positions whose logits are held at a time: 33 MB at 129 280 tokens


@dataclass(slots=True)
class Wanted:
    """What a step's logit rows, which come work by work, are for."""

    rows: int = 0
    draws: list[Draw] = field(default_factory=list)
    draw_rows: list[int] = field(default_factory=list)
    samplers: list[tuple[int, int]] = field(default_factory=list)  # (work, draws), in order
    scores: list[tuple[int, int]] = field(default_factory=list)  # (token, alternatives)
    score_rows: list[int] = field(default_factory=list)
    score_works: list[int] = field(default_factory=list)  # index of the work, per score


def sort_rows(plan: StepPlan, prompt_of: Callable[[int], Sequence[int]]) -> Wanted:
    """Sort a step's logit rows into draws and prompt scores. prompt_of: the prompt in a row."""
    found = Wanted()
    for i, work in enumerate(plan.works):
        begin, count = found.rows, work.draws
        found.rows += count if work.prompt_logprobs is None else work.length
        if work.prompt_logprobs is not None:
            targets = prompt_of(work.row)[work.start + 1 : work.start + work.length + 1]
            found.scores += [(token, work.prompt_logprobs) for token in targets]
            found.score_rows += range(begin, begin + len(targets))
            found.score_works += [i] * len(targets)
        if count:
            first, masks = work.start + work.length - count + 1, work.masks
            for j in range(count):
                mask = masks[j] or None if j < len(masks) else None
                found.draws.append(Draw(work.row, first + j, work.logprobs, mask, j))
            found.draw_rows += range(found.rows - count, found.rows)
            found.samplers.append((i, count))
    return found


def finite_rows(logits: Tensor) -> Tensor:
    """[rows] bool for logits [rows, vocab] float32, as the model gave them: masks and biases come
    later, and may well forbid. It is asked on the device, with the draw, and travels with the
    tokens (`Handle.finite`), so that nobody waits for it.

    One reduction: NaN or an infinity among the terms of a sum leaves NaN or an infinity, on every
    device. A sum of numbers would overflow from a mean of 2e33 on, which no model means.
    """
    total = logits.sum(-1)
    return (total - total) == 0


@dataclass(slots=True)
class Handle:
    """A launched step: what its results are made of, on their way to the host."""

    plan: StepPlan
    wanted: Wanted = field(default_factory=Wanted)  # once the rows are sorted
    tokens: list[Tensor] = field(default_factory=list)  # of the draws, in one tensor
    finite: list[Tensor] = field(default_factory=list)  # whether their logits are, likewise
    accepted: list[Tensor] = field(default_factory=list)  # drafts that were right, per sampler
    drafts: list[Tensor] = field(default_factory=list)  # [samplers, drafts], where asked, parents
    logprobs: list[LogprobGroup] = field(default_factory=list)  # of the draws
    scores: list[list[LogprobGroup]] = field(default_factory=list)  # per SCORE_ROWS scored rows
    scored: list[Tensor] = field(default_factory=list)  # whether the logits of these are finite
    arriving: Download | None = None

    def sort(self, sampler: Sampler) -> Wanted:
        """What the step's logit rows are for: every way to run one begins with it, or has it done
        once the device is at work."""
        self.wanted = sort_rows(self.plan, lambda row: sampler.row(row).prompt)
        return self.wanted

    def download(self) -> None:
        """Let the results start for the host."""
        groups = [*self.logprobs, *(group for some in self.scores for group in some)]
        first = (*self.tokens, *self.finite, *self.scored, *self.accepted, *self.drafts)
        self.arriving = Download([*first, *(t for group in groups for t in group.tensors)])

    def result(self) -> StepResult:
        """Wait for the results to arrive; steps launched later are not waited for."""
        works = [WorkResult(rid=w.rid) for w in self.plan.works]
        assert self.arriving is not None, "only rank 0 collects"
        host = iter(self.arriving.wait())
        wanted = self.wanted
        sent = (self.tokens, self.finite, self.scored)
        tokens, finite, scored = ([next(host).tolist() for _ in some] for some in sent)
        if tokens:
            self._take_draws(works, tokens[0], finite[0], host)
        for number, groups in enumerate(self.scores):
            entries = dict(pair for group in groups for pair in group.fetch(host))
            owners = wanted.score_works[number * SCORE_ROWS :]
            for row in range(len(entries)):
                self._take_score(works, owners[row], entries[row], scored[number][row])
        return StepResult(step=self.plan.step, works=works)

    def _take_score(
        self, works: list[WorkResult], number: int, entry: TokenLogprob, finite: bool
    ) -> None:
        """Of a prompt's token."""
        result = works[number]
        result.prompt_logprobs.append(entry)
        position = self.plan.works[number].start + len(result.prompt_logprobs)
        if not finite and (result.broken is None or position < result.broken):
            result.broken, result.tokens, result.logprobs = position, [], []

    def _take_draws(
        self, works: list[WorkResult], tokens: list[int], finite: list[bool], host: Iterator[Tensor]
    ) -> None:
        """Of each work the tokens behind right drafts, and the one behind the last of these, up to
        the first whose logits are not finite.
        """
        samplers = self.wanted.samplers
        rights = next(host).tolist() if self.accepted else [0] * len(samplers)
        drafts, parents = ([next(host).tolist() for _ in self.drafts] + [(), ()])[:2]
        owners, begin, whole = dict[int, WorkResult](), 0, all(finite)
        for (i, count), right in zip(samplers, rights, strict=True):
            end = begin + right + 1
            if not whole and False in finite[begin:end]:
                end = finite.index(False, begin)
                works[i].broken = self.wanted.draws[end].position
            works[i].tokens = tokens[begin:end]
            if self.logprobs:
                owners.update(dict.fromkeys(range(begin, end), works[i]))
            begin += count
        for number, (i, _) in enumerate(samplers if drafts else ()):
            if self.plan.works[i].tell_drafts:
                works[i].drafts = drafts[number]
                works[i].draft_parents = parents[number] if parents else []
        entries = [pair for group in self.logprobs for pair in group.fetch(host)]
        for draw, entry in sorted(entries, key=lambda pair: pair[0]):
            if draw in owners:  # else it is behind a wrong draft
                owners[draw].logprobs.append(entry)
