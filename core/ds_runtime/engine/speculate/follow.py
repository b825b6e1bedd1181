"""The draft layer's first run, over the tokens of a step: what was drawn follows each of them.

What it leaves at the last token that each sequence keeps is where drafts begin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from ds_runtime.engine.device.parts import Parts, Results
from ds_runtime.engine.step.plan import Work
from ds_runtime.engine.step.transfer import Upload
from ds_runtime.ops.batch import Batch, RowOrder
from ds_runtime.parallel.exchange import Pending
from ds_runtime.parallel.row_order import Pick


@dataclass(frozen=True, slots=True)
class Own:
    """What of a step op by op is of this rank's works, by numbers in its upload.

    ids: [T] the token after each of the rank's rows, where the host knows it. rows: [own draws]
    the row of each. firsts: [own works] that of each sampling work's first draw. drawn, works: of
    the draws and of the sampling works of the step. tail: the order of a row of each of the latter.
    """

    ids: int
    rows: int
    firsts: int
    drawn: Pick
    works: Pick
    tail: Pending

    @staticmethod
    def of(works: Sequence[Work], parts: Parts, upload: Upload) -> Own:
        """Adds to the step's upload."""
        known, rows, firsts = list[int](), list[int](), list[int]()
        for work in parts.exchange.own(works):
            if work.draws:
                firsts.append(len(known) + work.length - work.draws)
                rows += range(firsts[-1], len(known) + work.length)
            known += [0] if work.tokens is None else work.tokens[1:]
            known += [0] * (work.length - 1) if work.tokens is None else [work.next_token or 0]

        def added(values: list[int]) -> int:
            return upload.add(np.array(values, np.int64))

        ids, at, first = added(known), added(rows), added(firsts)
        samplers = [work for work in works if work.draws]
        picks = parts.exchange.picks(samplers, [work.draws for work in samplers], upload)
        return Own(ids, at, first, *picks, parts.exchange.each(samplers, 1, upload))


def follow(
    parts: Parts,
    batch: Batch,
    hidden: Tensor,
    ids: Tensor,
    last: Tensor,
    tail: RowOrder | None,
    drafts: bool = True,
    results: Results | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Write the step's tokens to the draft layer's caches. Returns its hidden states in the rows
    `last` [own sequences, hidden], and if drafts are due, the logits there [sequences, vocab].

    hidden: [T, hidden] of the model; ids: [T] the tokens behind. tail: the order of the
    rows `last`. results: where those of a captured step go.
    """
    assert parts.draft is not None
    found = parts.draft.forward(batch, hidden, ids, parts.caches, last, tail)
    if results is not None:
        found = results.tail[: found.shape[0]].copy_(found)
    if not drafts:
        return found, None
    wanted = parts.exchange.collect(found, tail)
    out = None if results is None else results.tail_logits[: wanted.shape[0]]
    return found, parts.draft.logits(wanted, out)
