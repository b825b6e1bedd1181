"""Logits → tokens: penalties, biases, masks, the draw, and log-probabilities.

Every running request owns a row of state on the device. A draw depends on nothing but the row's
logits and (seed, choice, position): not on other rows, on steps or on preemption.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ds_runtime.engine.messages import TokenLogprob
from ds_runtime.engine.step import RowInit
from ds_runtime.ops.table import Ops
from ds_runtime.sampling_params import SamplingParams

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _mix(x: int) -> int:
    """splitmix64's finaliser: a bijection of 64 bits in which every bit depends on every other."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def stream_key(seed: int, choice: int) -> int:
    """The 64-bit key of one choice's random numbers."""
    return _mix((_mix((seed + _GOLDEN) & _MASK) + (choice + 1) * _GOLDEN) & _MASK)


def uniform(key: int, position: int) -> float:
    """The number in [0, 1) of stream `key` at `position`, with 53 random bits."""
    return float(_mix((key + (position + 1) * _GOLDEN) & _MASK) >> 11) * 2.0**-53


@dataclass(slots=True)
class Row:
    """Host-side state of one row."""

    params: SamplingParams
    key: int
    prompt: list[int]
    stop_ids: Tensor | None  # device ids that min_tokens forbids for now
    bias: tuple[Tensor, Tensor] | None  # device (ids, values)
    penalised: bool
    extras: bool  # anything that changes logits


@dataclass(frozen=True, slots=True)
class Draw:
    """What one row of logits is drawn for."""

    row: int
    position: int  # of the token to draw, in the sequence
    logprobs: int | None = None


@dataclass(slots=True)
class LogprobGroup:
    """Log-probabilities of some of a step's rows, still on the device."""

    owners: list[int]  # indices into the caller's list
    ids: Tensor
    chosen: Tensor
    values: Tensor
    top_ids: Tensor

    def fetch(self) -> list[tuple[int, TokenLogprob]]:
        """(owner, entry) per row, on the host."""
        ids, chosen = self.ids.tolist(), self.chosen.tolist()
        values, top_ids = self.values.tolist(), self.top_ids.tolist()
        return [
            (owner, TokenLogprob(ids[i], chosen[i], list(zip(top_ids[i], values[i], strict=True))))
            for i, owner in enumerate(self.owners)
        ]


@dataclass(slots=True)
class Drawn:
    """A step's tokens [draws] int64 on the device, and the log-probabilities asked for."""

    tokens: Tensor
    logprobs: list[LogprobGroup] = field(default_factory=list)


class Sampler:
    """State of `max_running` rows, and the draw of one step."""

    def __init__(self, ops: Ops, max_running: int, vocab: int, device: Any) -> None:
        self.ops = ops
        self.vocab = vocab
        self.device = device
        self.rows: list[Row | None] = [None] * max_running
        self._temperature = torch.zeros(max_running, dtype=torch.float32, device=device)
        self._top_k = torch.zeros(max_running, dtype=torch.int32, device=device)
        self._top_p = torch.ones(max_running, dtype=torch.float32, device=device)
        self._min_p = torch.zeros(max_running, dtype=torch.float32, device=device)
        self._greedy = (
            self._temperature.clone(),
            self._top_k.clone(),
            self._top_p.clone(),
            self._min_p.clone(),
            torch.zeros(max_running, dtype=torch.float64, device=device),
        )
        # Rows: repetition, frequency, presence.
        self._penalties = torch.zeros(3, max_running, dtype=torch.float32, device=device)
        self._counts: Tensor | None = None  # [max_running, vocab] output counts, if ever needed
        self._seen: Tensor | None = None  # [max_running, vocab] in prompt or output

    def start(self, init: RowInit) -> None:
        """A request takes a row; whatever the row held is forgotten."""
        p = init.params
        bias = None
        if p.logit_bias:
            ids = torch.tensor(list(p.logit_bias), dtype=torch.int64, device=self.device)
            values = torch.tensor(list(p.logit_bias.values()), device=self.device)
            bias = (ids, values.float())
        stop_ids = None
        forbidden = [i for i in init.stop_ids if i < self.vocab]
        if p.min_tokens > 0 and forbidden:
            stop_ids = torch.tensor(forbidden, dtype=torch.int64, device=self.device)
        self.rows[init.row] = Row(
            params=p,
            key=stream_key(init.seed, init.choice),
            prompt=init.prompt,
            stop_ids=stop_ids,
            bias=bias,
            penalised=p.penalised,
            extras=p.penalised or bias is not None or stop_ids is not None,
        )
        if p.temperature > 0.0:
            self._temperature[init.row] = p.temperature
            self._top_k[init.row] = min(p.top_k, self.vocab)
            self._top_p[init.row] = p.top_p
            self._min_p[init.row] = p.min_p
        else:
            self._temperature[init.row] = 0.0
        if p.penalised:
            penalties = (p.repetition_penalty, p.frequency_penalty, p.presence_penalty)
            self._penalties[:, init.row] = torch.tensor(penalties, device=self.device)
            self._start_counts(init)

    def _start_counts(self, init: RowInit) -> None:
        if self._counts is None or self._seen is None:
            shape = (len(self.rows), self.vocab)
            self._counts = torch.zeros(shape, dtype=torch.float32, device=self.device)
            self._seen = torch.zeros(shape, dtype=torch.bool, device=self.device)
        output = torch.tensor(init.output, dtype=torch.int64, device=self.device)
        prompt = torch.tensor(init.prompt, dtype=torch.int64, device=self.device)
        counts, seen = self._counts[init.row], self._seen[init.row]
        counts.zero_().index_add_(0, output, torch.ones_like(output, dtype=torch.float32))
        seen.zero_()
        seen[prompt] = True
        seen[output] = True

    def draw(self, logits: Tensor, draws: Sequence[Draw]) -> Drawn:
        """One token per row of logits [draws, vocab] float32.

        Does not wait for the device. Order: repetition, frequency and presence penalty, bias,
        then the min_tokens mask; `logprobs` are those of the raw logits.
        """
        rows = [self.row(d.row) for d in draws]
        index: Tensor | None = None
        if any(r.params.temperature > 0.0 for r in rows) or any(r.penalised for r in rows):
            index = torch.tensor([d.row for d in draws], dtype=torch.int64, device=self.device)
        changed = logits
        if any(r.extras for r in rows):
            changed = self._change(logits, draws, rows)
        tokens = self.ops.sample(changed, *self._settings(draws, rows, index))
        if index is not None:
            self._count(index, tokens, rows)
        groups = self._groups([d.logprobs for d in draws], logits, tokens)
        return Drawn(tokens, groups)

    def row(self, row: int) -> Row:
        """The state of a row that was started."""
        state = self.rows[row]
        assert state is not None, f"row {row} is used before it was started"
        return state

    def _settings(
        self, draws: Sequence[Draw], rows: list[Row], index: Tensor | None
    ) -> tuple[Tensor, ...]:
        if index is None or not any(r.params.temperature > 0.0 for r in rows):
            return tuple(t[: len(draws)] for t in self._greedy)
        numbers = [
            uniform(r.key, d.position) if r.params.temperature > 0.0 else 0.0
            for r, d in zip(rows, draws, strict=True)
        ]
        return (
            self._temperature[index],
            self._top_k[index],
            self._top_p[index],
            self._min_p[index],
            torch.tensor(numbers, dtype=torch.float64, device=self.device),
        )

    def _change(self, raw: Tensor, draws: Sequence[Draw], rows: list[Row]) -> Tensor:
        """A copy of the logits with penalties, biases and masks applied."""
        logits = raw.clone()
        penalised = [i for i, r in enumerate(rows) if r.penalised]
        if penalised:
            self._penalise(logits, penalised, [draws[i].row for i in penalised])
        for i, (draw, row) in enumerate(zip(draws, rows, strict=True)):
            if row.bias is not None:
                logits[i].index_add_(0, *row.bias)
            if row.stop_ids is not None:
                if draw.position - len(row.prompt) < row.params.min_tokens:
                    logits[i].index_fill_(0, row.stop_ids, float("-inf"))
                else:
                    row.stop_ids = None
        return logits

    def _penalise(self, logits: Tensor, where: list[int], rows: list[int]) -> None:
        """Change logits[where] in place; repetition divides positive ones, multiplies others."""
        assert self._counts is not None and self._seen is not None
        at = torch.tensor(where, dtype=torch.int64, device=self.device)
        owners = torch.tensor(rows, dtype=torch.int64, device=self.device)
        repetition, frequency, presence = self._penalties[:, owners].unsqueeze(-1)  # each [n, 1]
        values, counts = logits[at], self._counts[owners]  # [n, vocab]
        scaled = torch.where(values > 0, values / repetition, values * repetition)
        values = torch.where(self._seen[owners], scaled, values)
        logits[at] = values - frequency * counts - presence * (counts > 0)

    def _count(self, index: Tensor, tokens: Tensor, rows: list[Row]) -> None:
        if self._counts is None or self._seen is None or not any(r.penalised for r in rows):
            return
        ones = torch.ones_like(tokens, dtype=torch.float32)
        self._counts.index_put_((index, tokens), ones, accumulate=True)
        self._seen[index, tokens] = True

    def _groups(
        self, wanted: Sequence[int | None], logits: Tensor, ids: Tensor
    ) -> list[LogprobGroup]:
        """Log-probabilities per distinct number of alternatives: one op call each."""
        groups = []
        for n in sorted({n for n in wanted if n is not None}):
            owners = [i for i, w in enumerate(wanted) if w == n]
            some, some_ids = logits, ids
            if len(owners) != len(wanted):
                index = torch.tensor(owners, dtype=torch.int64, device=self.device)
                some, some_ids = logits[index], ids[index]
            found = self.ops.logprobs(some, some_ids, min(n, self.vocab))
            groups.append(LogprobGroup(owners, some_ids, *found))
        return groups

    def score(self, logits: Tensor, wanted: Sequence[tuple[int, int]]) -> list[LogprobGroup]:
        """Log-probabilities of one given token per row; wanted: (token id, alternatives)."""
        ids = torch.tensor([t for t, _ in wanted], dtype=torch.int64, device=self.device)
        return self._groups([n for _, n in wanted], logits, ids)

    def clear(self) -> None:
        """Forget every row."""
        self.rows = [None] * len(self.rows)
        self._temperature.zero_()
        self._counts = self._seen = None
