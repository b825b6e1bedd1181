"""Logits → tokens: penalties, biases, masks, the draw, and log-probabilities.

Every running request owns a row of state. A draw depends on nothing but the row's
logits and (seed, choice, position): not on other rows, on steps or on preemption.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ds_runtime.engine.messages import TokenLogprob
from ds_runtime.engine.step.masked_draw import MaskedDraw, packed, placed
from ds_runtime.engine.step.plan import RowInit
from ds_runtime.engine.step.streams import stream_key, uniforms
from ds_runtime.engine.step.transfer import Upload, put
from ds_runtime.ops.table import Ops
from ds_runtime.sampling_params import SamplingParams


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
    settings: tuple[float, ...]  # of Sample, but for the random number


class Draw(msgspec.Struct, frozen=True, gc=False):
    """What one row of logits is drawn for. ahead: of how many drafts the token is drawn behind,
    those of the draws right before it.
    """

    row: int
    position: int  # of the token to draw, in the sequence
    logprobs: int | None = None
    mask: bytes | None = None  # of the tokens that may be drawn
    ahead: int = 0


@dataclass(frozen=True, slots=True)
class Draws:
    """What a step draws. `rows` and `settings` are numbers of arrays in the step's upload.

    settings: temperature, top_k, top_p, min_p and uniform; None where every draw is greedy.
    masks: (masks, which) of MaskLogits on the device; None where every token may be drawn. masked:
    the captured draw that has been given masks and settings instead; places: number of the array
    with each draw's place in it, None if they lie in their order.
    """

    draws: Sequence[Draw]
    states: list[Row]
    rows: int
    settings: tuple[int, ...] | None
    masks: tuple[Tensor, Tensor] | None = None
    masked: MaskedDraw | None = None
    places: int | None = None


@dataclass(slots=True)
class LogprobGroup:
    """Log-probabilities of some of a step's rows."""

    owners: list[int]  # indices into the caller's list
    ids: Tensor
    chosen: Tensor
    values: Tensor
    top_ids: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What has to come to the host."""
        return self.ids, self.chosen, self.values, self.top_ids

    def fetch(self, host: Iterator[Tensor] | None = None) -> list[tuple[int, TokenLogprob]]:
        """(owner, entry) per row. host: `tensors` on the host, taken from there."""
        found = self.tensors if host is None else [next(host) for _ in self.tensors]
        ids, chosen, values, top_ids = (t.tolist() for t in found)
        return [
            (owner, TokenLogprob(ids[i], chosen[i], list(zip(top_ids[i], values[i], strict=True))))
            for i, owner in enumerate(self.owners)
        ]


@dataclass(frozen=True, slots=True)
class Nodes:
    """Draws after drafts that branch. peers: [draws] the draw of the same work that, in a chain,
    would be for the same position; lines: [draws] whose bit a says that node a is in front.
    """

    peers: Tensor
    lines: Tensor


class Sampler:
    """State of `max_running` rows, and the draw of one step. Nothing in it waits for the device.

    width: most draws of a row in a step.
    """

    def __init__(
        self, ops: Ops, max_running: int, vocab: int, device: torch.device, width: int = 1
    ) -> None:
        self.ops = ops
        self.vocab = vocab
        self.device = device
        self.rows: list[Row | None] = [None] * max_running
        zeros = torch.zeros(max_running * width, dtype=torch.float32, device=device)
        self._greedy = (
            zeros,
            zeros.to(torch.int32),
            torch.ones_like(zeros),
            zeros,
            zeros.to(torch.float64),
        )
        self._off: dict[int, tuple[Tensor, ...]] = {}  # the first rows of these, by their number
        self._counts: Tensor | None = None  # [max_running, vocab] output counts, if ever needed
        self._seen: Tensor | None = None  # [max_running, vocab] in the prompt

    def start(self, init: RowInit) -> None:
        """A request takes a row; whatever the row held is forgotten."""
        p = init.params
        bias = None
        if p.logit_bias:
            ids = put(list(p.logit_bias), np.int64, self.device)
            bias = (ids, put(list(p.logit_bias.values()), np.float32, self.device))
        stop_ids = None
        forbidden = [i for i in init.stop_ids if i < self.vocab]
        if p.min_tokens > 0 and forbidden:
            stop_ids = put(forbidden, np.int64, self.device)
        self.rows[init.row] = Row(
            params=p,
            key=stream_key(init.seed, init.choice),
            prompt=init.prompt,
            stop_ids=stop_ids,
            bias=bias,
            penalised=p.penalised,
            extras=p.penalised or bias is not None or stop_ids is not None,
            settings=(p.temperature, min(p.top_k, self.vocab), p.top_p, p.min_p, 0.0)
            if p.temperature > 0.0
            else _GREEDY,
        )
        if p.penalised:
            self._start_counts(init)

    def _start_counts(self, init: RowInit) -> None:
        if self._counts is None or self._seen is None:
            shape = (len(self.rows), self.vocab)
            self._counts = torch.zeros(shape, dtype=torch.float32, device=self.device)
            self._seen = torch.zeros(shape, dtype=torch.bool, device=self.device)
        output = put(init.output, np.int64, self.device)
        prompt = put(init.prompt, np.int64, self.device)
        counts, seen = self._counts[init.row], self._seen[init.row]
        counts.zero_().index_add_(0, output, torch.ones_like(output, dtype=torch.float32))
        seen.zero_().index_fill_(0, prompt, True)

    def row(self, row: int) -> Row:
        """The state of a row that was started."""
        state = self.rows[row]
        assert state is not None, f"row {row} is used before it was started"
        return state

    def prepare(
        self,
        draws: Sequence[Draw],
        upload: Upload,
        masked: MaskedDraw | None = None,
        places: npt.NDArray[np.int64] | None = None,
    ) -> Draws:
        """Add what the draws need to a step's upload. masked: of the captured step that gives their
        logits, used where there are masks and nothing else changes these; places: its row for each
        draw, where that is not the draw's number.
        """
        states = [self.row(d.row) for d in draws]
        rows = upload.add(np.array([d.row for d in draws], np.int64))
        alone = masked is not None and not any(s.extras for s in states)
        if alone and masked is not None and any(d.mask is not None for d in draws):
            inside = list(draws) if places is None else placed(draws, places, masked.size)
            masks = [None if d is None else d.mask for d in inside]
            masked.fill(self.settings(inside, masked.size), masks)
            number = None if places is None else upload.add(places)
            return Draws(draws, states, rows, None, masked=masked, places=number)
        sent = self._masks(draws)
        if not any(s.params.temperature > 0.0 for s in states):
            return Draws(draws, states, rows, None, sent)
        settings = tuple(upload.add(column) for column in self.settings(draws, len(draws)))
        return Draws(draws, states, rows, settings, sent)

    def plain(self, draws: Sequence[Draw]) -> bool:
        """Whether the logits and Sample's settings are all there is to these draws: nothing changes
        the logits, and nobody asks for log-probabilities.
        """
        return not any(d.mask or d.logprobs is not None or self.row(d.row).extras for d in draws)

    def settings(self, draws: Sequence[Draw | None], count: int) -> list[npt.NDArray[Any]]:
        """Sample's settings of these draws, filled up to `count` with greedy ones."""
        rows = [None if d is None else self.row(d.row) for d in draws]
        if all(row is None or row.settings is _GREEDY for row in rows):
            return _greedy_columns(count)
        values = np.tile(np.array(_GREEDY), (count, 1))
        values[: len(rows)] = [_GREEDY if row is None else row.settings for row in rows]
        keys = [0 if row is None else row.key for row in rows]
        positions = np.array([0 if d is None else d.position for d in draws])
        numbers = np.where(values[: len(rows), 0] > 0.0, uniforms(keys, positions), 0.0)
        values[: len(rows), -1] = numbers
        return _columns(values)

    def _masks(self, draws: Sequence[Draw]) -> tuple[Tensor, Tensor] | None:
        """Masks on their way to the device. Their size is a vocabulary's: most steps have none,
        and the fixed places of a captured step's inputs have no room for them.
        """
        masks = [d.mask for d in draws]
        if not any(mask is not None for mask in masks):
            return None
        sent = Upload(self.device)
        which, bits = (sent.add(array) for array in packed(masks, len(masks)))
        sent.send()
        return sent[bits], sent[which]

    def draw(
        self,
        logits: Tensor,
        draws: Draws,
        sent: Upload,
        drafts: Tensor | None = None,
        nodes: Nodes | None = None,
    ) -> Tensor:
        """One token per row of logits [draws, vocab] float32: [draws] int64. drafts: [draws] int64,
        the token in front of each, where some are drawn after drafts; nodes: if these branch.

        Order: repetition, frequency and presence penalty, bias, the min_tokens mask, then the
        grammars' masks.
        """
        if draws.masked is not None:
            if draws.places is not None:
                return draws.masked.draw(draws.masked.size)[sent[draws.places]]
            return draws.masked.draw(len(draws.draws))
        if any(s.extras for s in draws.states):
            logits = self._change(logits, draws, drafts, nodes)
        if draws.masks is not None:
            logits = self.ops.mask_logits(logits, *draws.masks)
        if draws.settings is None:
            settings = self._greedy_settings(len(draws.draws))
        else:
            settings = tuple(sent[number] for number in draws.settings)
            if nodes is not None:
                settings = (*settings[:-1], settings[-1][nodes.peers])
        return self.ops.sample(logits, *settings)

    def logprobs(
        self, logits: Tensor, draws: Draws, tokens: Tensor, order: Tensor | None = None
    ) -> list[LogprobGroup]:
        """Those that were asked for, of the raw logits. order: [draws] which row of logits and
        which token is each draw's; None: its own.
        """
        wanted = [d.logprobs for d in draws.draws]
        if order is not None and any(n is not None for n in wanted):
            logits, tokens = logits[order], tokens[order]
        return self._groups(wanted, logits, tokens)

    def _greedy_settings(self, rows: int) -> tuple[Tensor, ...]:
        """The settings of as many greedy draws."""
        found = self._off.get(rows)
        if found is None:
            found = self._off[rows] = tuple(t[:rows] for t in self._greedy)
        return found

    def _change(
        self, raw: Tensor, draws: Draws, drafts: Tensor | None, nodes: Nodes | None
    ) -> Tensor:
        """A copy of the logits with penalties, biases and masks applied."""
        logits = raw.clone()
        if any(s.penalised for s in draws.states):
            self._penalise(logits, draws, drafts, nodes)
        early = [
            draw.position - len(row.prompt) < row.params.min_tokens
            for draw, row in zip(draws.draws, draws.states, strict=True)
        ]
        floors = None
        if nodes is not None and any(row.stop_ids is not None for row in draws.states):
            # A node's draw is as early as the draw that is for its position.
            floors = put(np.where(early, -np.inf, np.inf), np.float32, self.device)[nodes.peers]
        for i, (draw, row) in enumerate(zip(draws.draws, draws.states, strict=True)):
            if row.bias is not None:
                logits[i].index_add_(0, *row.bias)
            if row.stop_ids is None:
                continue
            if not (early[i] or draw.ahead):  # what is drawn behind drafts may be drawn again
                row.stop_ids = None
            elif floors is not None:
                kept = torch.minimum(logits[i][row.stop_ids], floors[i])
                logits[i].index_copy_(0, row.stop_ids, kept)
            elif early[i]:
                logits[i].index_fill_(0, row.stop_ids, float("-inf"))
        return logits

    def _penalise(
        self, logits: Tensor, draws: Draws, drafts: Tensor | None, nodes: Nodes | None
    ) -> None:
        """Change rows of logits in place; repetition divides positive ones, multiplies others."""
        assert self._counts is not None and self._seen is not None
        where = [i for i, s in enumerate(draws.states) if s.penalised]
        params = [draws.states[i].params for i in where]
        values = [(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for p in params]
        # A token drawn behind drafts counts them as if they were output: (its row, their draw, its
        # place behind the root).
        pairs = [
            (k, i - back, draws.draws[i].ahead - back)
            for k, i in enumerate(where)
            for back in range(draws.draws[i].ahead)
        ]
        sent = Upload(self.device)
        numbers = (
            sent.add(np.array(where, np.int64)),
            sent.add(np.array([draws.draws[i].row for i in where], np.int64)),
            sent.add(np.array(values, np.float32)),
            sent.add(np.array(pairs, np.int64).reshape(-1, 3).T),
        )
        sent.send()
        at, owners, penalties, behind = (sent[n] for n in numbers)
        repetition, frequency, presence = penalties.T.unsqueeze(-1)  # each [n, 1]
        picked, counts = logits[at], self._counts[owners]  # [n, vocab]
        if pairs:
            assert drafts is not None
            if nodes is None:
                ones = torch.ones(len(pairs), dtype=torch.float32, device=self.device)
            else:  # of the nodes before it, only those above it
                ones = ((nodes.lines[at][behind[0]] >> behind[2]) & 1).to(torch.float32)
            counts.index_put_((behind[0], drafts[behind[1]]), ones, accumulate=True)
        scaled = torch.where(picked > 0, picked / repetition, picked * repetition)
        picked = torch.where(self._seen[owners] | (counts > 0), scaled, picked)
        logits[at] = picked - frequency * counts - presence * (counts > 0)

    def count(self, draws: Draws, tokens: Tensor, sent: Upload, kept: Tensor | None = None) -> None:
        """Tokens [draws] are output, if `kept` [any shape] is given those of these numbers, which
        may repeat; penalties count them.
        """
        if self._counts is None or not any(s.penalised for s in draws.states):
            return
        ones = torch.full_like(tokens, float(kept is None), dtype=torch.float32)
        if kept is not None:
            ones.index_fill_(0, kept.flatten(), 1.0)
        self._counts.index_put_((sent[draws.rows], tokens), ones, accumulate=True)

    def _groups(
        self, wanted: Sequence[int | None], logits: Tensor, ids: Tensor
    ) -> list[LogprobGroup]:
        """Log-probabilities per distinct number of alternatives: one op call each."""
        groups = []
        for n in sorted({n for n in wanted if n is not None}):
            owners = [i for i, w in enumerate(wanted) if w == n]
            some, some_ids = logits, ids
            if len(owners) != len(wanted):
                index = put(owners, np.int64, self.device)
                some, some_ids = logits[index], ids[index]
            found = self.ops.logprobs(some, some_ids, min(n, self.vocab))
            groups.append(LogprobGroup(owners, some_ids, *found))
        return groups

    def score(self, logits: Tensor, wanted: Sequence[tuple[int, int]]) -> list[LogprobGroup]:
        """Log-probabilities of one given token per row; wanted: (token id, alternatives)."""
        ids = put([t for t, _ in wanted], np.int64, self.device)
        return self._groups([n for _, n in wanted], logits, ids)

    def clear(self) -> None:
        """Forget every row."""
        self.rows = [None] * len(self.rows)
        self._counts = self._seen = None


_GREEDY = (0.0, 0, 1.0, 0.0, 0.0)
_SETTING_TYPES = (np.float32, np.int32, np.float32, np.float32, np.float64)


def _columns(values: npt.NDArray[np.float64]) -> list[npt.NDArray[Any]]:
    """[count, 5], each column as Sample takes it."""
    pairs = zip(values.T, _SETTING_TYPES, strict=True)
    return [np.ascontiguousarray(column, kind) for column, kind in pairs]


@lru_cache(maxsize=64)
def _greedy_columns(count: int) -> list[npt.NDArray[Any]]:
    """Nobody writes to them."""
    return _columns(np.tile(np.array(_GREEDY), (count, 1)))
