"""Drafts of which several follow one token: what a rank does otherwise then.

Trees are the one kind. All that knows them lies in `engine/trees`, which is named here alone, and
imported where drafts are to branch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ds_runtime.common.speculation import Speculation
from ds_runtime.engine.capture.recorder import Recorder
from ds_runtime.engine.device.parts import Parts, Results
from ds_runtime.engine.speculate.acceptance import Branch, Branched
from ds_runtime.engine.speculate.chain import Drafts
from ds_runtime.engine.speculate.follow import Own
from ds_runtime.engine.step.inputs import Frame
from ds_runtime.engine.step.plan import Work
from ds_runtime.engine.step.transfer import Upload
from ds_runtime.ops.batch import Batch
from ds_runtime.ops.contract import load_attr
from ds_runtime.parallel.row_order import Pick

_TREES = "ds_runtime.engine.trees.branches:TreeBranching"


class AsChains(NamedTuple):
    """A step as if the kept branches had been its drafts. `batch` is its batch, and `own` is what
    of it is this rank's, by numbers in `sent`. takes: [T] the rows that it takes of the step.
    came: [T] the rows whose hidden states come to lie there.
    """

    batch: Batch
    own: Own
    sent: Upload
    takes: Tensor
    came: Tensor


class Behind(Protocol):
    """What follows a captured verification: kept branches move, and the draft layer runs."""

    def capture(self, recorder: Recorder, verified: Batch, what: str) -> None:
        """Run it over dummies alone, behind a captured verification of such, then record it."""

    def run(
        self,
        works: Sequence[Work],
        branch: Branch,
        rows: Tensor,
        which: tuple[Pick, Pick],
        ids: Tensor,
        accepted: Tensor,
    ) -> None:
        """works: this rank's; rows: [draws] the row of each draw; which: of the draws and of
        the works. ids: [rows] what follows each; accepted: [size].
        """


class Branching(Protocol):
    """Of one kind."""

    def branched(self, rows: int, width: int, device: torch.device) -> Branched:
        """What all rows have. width: tokens of each in `last_tokens`."""

    def drafts(self, parts: Parts, size: int = 0) -> Drafts:
        """What drafts, op by op or for captured steps of `size`."""

    def behind(self, parts: Parts, results: Results, verified: Frame) -> Behind:
        """What follows captured verifications of a frame."""

    def move(self, parts: Parts, batch: Batch, branch: Branch, rows: Tensor, own: Pick) -> None:
        """Bring this rank's kept branches to the front of the caches. batch: the step that verified
        them; rows: [draws] the row of each draw; own: of the sampling works.
        """

    def as_chains(
        self,
        parts: Parts,
        works: Sequence[Work],
        branch: Branch,
        rows: Tensor,
        own: Own,
        total: int,
    ) -> AsChains:
        """A step of `total` rows, for the draft layer. rows: [draws] the row of each draw."""


def branching(shape: Speculation | None) -> Branching | None:
    """None where each token has one draft after it, or none."""
    if shape is None or shape.topk == 1:
        return None
    made: Branching = load_attr(_TREES)()
    return made
