"""Behind its attention, the last layer computes the rows whose logits are wanted, and no others."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from model_harness import Harness, decide

from ds_runtime_kit.models.tiny import SHAPES, write_tiny

WANTED = ([39], [0, 12, 39], [10, 11, 12, 13, 14])


@pytest.mark.parametrize("shape", SHAPES)
def test_the_rest_is_left_out_and_changes_nothing(tmp_path, shape, monkeypatch):
    write_tiny(tmp_path, shape, seed=5)
    harness = Harness(decide(tmp_path))
    model, seen = harness.model, list[int]()
    last = model.blocks[-1].mlp
    summed = last.later

    def later(x, batch):
        seen.append(x.shape[0])
        return summed(x, batch)

    monkeypatch.setattr(last, "later", later)
    prompts = [list(range(3, 30)), list(range(40, 53))]
    works = [(s, len(s.tokens)) for s in harness.sequences(prompts, seed=1)]
    batch = replace(harness._batch([], works, 4096), states=harness.states)
    with torch.inference_mode():
        whole = model.forward(batch, harness.caches)
        every = replace(batch, logit_rows=torch.tensor([39]))
        assert torch.equal(model.forward(every, harness.caches, every=True), whole)
        assert seen == [40, 40]
        for rows in WANTED:
            few = replace(batch, logit_rows=torch.tensor(rows))
            found = model.forward(few, harness.caches)
            torch.testing.assert_close(found, whole[rows], rtol=1e-4, atol=1e-5)
        assert seen[2:] == [len(rows) for rows in WANTED]
        none = replace(batch, logit_rows=torch.tensor([], dtype=torch.int64))
        assert model.forward(none, harness.caches).shape == (0, whole.shape[1])
        assert len(seen) == 2 + len(WANTED)
        most = replace(batch, logit_rows=torch.arange(21))
        assert torch.equal(model.forward(most, harness.caches), whole[:21])
        assert seen[-1] == 40
