"""How often a checkpoint's draft layer says next what its model says, position by position."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ds_runtime.assembly.assemble import assemble
from ds_runtime.config import EngineConfig
from ds_runtime.engine.device.runner import Runner
from ds_runtime.engine.process.entry import enter
from ds_runtime.engine.step.plan import RowInit, StepPlan, Work
from ds_runtime.model.draft import DraftModel
from ds_runtime.ops.batch import Batch, RowOrder
from ds_runtime.ops.contracts.caches import Caches
from ds_runtime.parallel.world import World
from ds_runtime.sampling_params import SamplingParams

_ROWS = 256  # of logits at once
_SETTINGS: Mapping[str, Any] = {  # one text at a time, on one rank, with drafts as stored
    "tp": 1,
    "enable_dp_attention": False,
    "max_running_requests": 1,
    "disable_graph": True,
    "speculative_algorithm": "NEXTN",
    "speculative_num_steps": 1,
    "speculative_eagle_topk": None,
    "speculative_num_draft_tokens": None,
    "speculative_adaptive": False,
    "speculative_draft_quantize": "none",
}


class DraftCheck:
    """An engine that reads texts, and what its model and its draft layer say at every position."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        config = EngineConfig(**{**settings, **_SETTINGS})
        assembly = assemble(config, {*settings, *_SETTINGS})
        enter(assembly.platform, threads=config.threads)
        self._runner = Runner(assembly, World.alone())
        parts = self._runner.parts
        assert parts.draft is not None
        self._heard = _Heard(parts.draft)
        parts.draft = cast(DraftModel, self._heard)

    def close(self) -> None:
        """Free what the engine holds."""
        self._runner.close()

    @torch.inference_mode()
    def pairs(self, ids: Sequence[int], first: int) -> list[tuple[int, int]]:
        """(draft, model's most likely token) for positions first + 1 … len(ids) - 1 of a text.

        The model's is taken where the token before it is known; the draft from one position
        earlier, with that token's embedding. `first` ≥ 1.
        """
        said, drafts = list[int](), list[int]()
        for plan in self._plans(list(ids)):
            self._runner.collect(self._runner.launch(plan))
            said += _best(self._runner.model.logits, self._heard.hidden)
            drafts += _best(self._heard.draft.logits, self._heard.drafted)
        return [(drafts[t - 1], said[t]) for t in range(first, len(ids) - 1)]

    def _plans(self, ids: list[int]) -> list[StepPlan]:
        config = self._runner.config
        size, most, plans = config.page_size, config.max_step_tokens, list[StepPlan]()
        params = SamplingParams(temperature=0.0, max_tokens=1)
        for start in range(0, len(ids), most):
            end = min(start + most, len(ids))
            work = Work(
                rid="",
                row=0,
                start=start,
                length=end - start,
                pages=list(range(-(-end // size))),
                tokens=ids[start:end],
                sample=end == len(ids),
                next_token=ids[end] if end < len(ids) else None,
            )
            plans.append(StepPlan(step=len(plans), works=[work]))
        plans[0].init = [RowInit(row=0, params=params, seed=0, choice=0, prompt=ids)]
        return plans


class _Heard:
    """A draft layer that computes the rows of all tokens, and keeps them with its input."""

    hidden: Tensor
    drafted: Tensor

    def __init__(self, draft: DraftModel) -> None:
        self.draft = draft

    def forward(
        self,
        batch: Batch,
        hidden: Tensor,
        ids: Tensor,
        caches: Caches,
        rows: Tensor | None,
        tail: RowOrder | None = None,
    ) -> Tensor:
        """As of the draft layer."""
        self.hidden = hidden
        self.drafted = self.draft.forward(batch, hidden, ids, caches, None, tail)
        return self.drafted if rows is None else self.drafted[rows]


def _best(logits: Callable[[Tensor], Tensor], hidden: Tensor) -> list[int]:
    """The most likely token of each row."""
    parts = (hidden[i : i + _ROWS] for i in range(0, len(hidden), _ROWS))
    return [token for part in parts for token in logits(part).argmax(-1).tolist()]
