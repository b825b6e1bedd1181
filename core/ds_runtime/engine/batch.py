"""A step plan as index tensors. Pure: host arrays in numpy, then one conversion per tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ds_runtime.engine.step import StepPlan, Work
from ds_runtime.ops.batch import Batch, DecodePart, PrefillPart, PrefixChunk, Segments

Ints = npt.NDArray[np.int64]


def build_batch(
    plan: StepPlan,
    page_size: int,
    max_pages: int,
    last_tokens: Tensor,
    device: Any,
    prefix_chunk: int,
) -> Batch:
    """The tensors of one step, without step states.

    last_tokens: [max_running] int64 on `device`, the token sampled last per row; decode works
    read it there. max_pages: most pages of a sequence; tables are as wide as this step needs.
    prefix_chunk: most cached tokens that one PrefixChunk covers, over all its sequences.
    Logit rows are in the order of the works, `num_logit_rows` each.
    """
    works = plan.works
    num_decode = next((i for i, w in enumerate(works) if w.tokens is not None), len(works))
    decodes, prefills = works[:num_decode], works[num_decode:]
    table = _page_table(works, page_size, max_pages)
    starts = np.array([w.start for w in works], np.int64)
    lengths = np.array([w.length for w in works], np.int64)
    assert (lengths[:num_decode] == 1).all()
    cu = np.zeros(len(works) + 1, np.int64)
    np.cumsum(lengths, out=cu[1:])
    owner = np.repeat(np.arange(len(works)), lengths)  # [tokens]: index of the work
    positions = np.arange(cu[-1]) - (cu[:-1] - starts)[owner]
    slots = table[owner, positions // page_size] * np.int64(page_size) + positions % page_size
    batch = Batch(
        input_ids=_input_ids(decodes, prefills, last_tokens, device),
        positions=_tensor(positions, device),
        slots=_tensor(slots, device),
        logit_rows=_tensor(_logit_rows(works, cu), device),
    )
    if decodes:
        kv_lens = starts[:num_decode] + 1
        batch.decode = DecodePart(
            page_table=_tensor(table[:num_decode], device),
            kv_lens=_tensor(kv_lens.astype(np.int32), device),
            host_kv_lens=tuple(kv_lens.tolist()),
        )
    if prefills:
        batch.prefill = PrefillPart(
            q_segs=_segments(lengths[num_decode:].tolist(), device),
            page_table=_tensor(table[num_decode:], device),
            prefix=tuple(_prefix_chunks(starts[num_decode:].tolist(), prefix_chunk, device)),
        )
    return batch


def _tensor(array: npt.NDArray[Any], device: Any) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)


def _segments(lens: Sequence[int], device: Any) -> Segments:
    cu = np.zeros(len(lens) + 1, np.int32)
    np.cumsum(lens, out=cu[1:])
    return Segments(tuple(lens), _tensor(cu, device))


def _page_table(works: Sequence[Work], page_size: int, max_pages: int) -> npt.NDArray[np.int32]:
    """[works, width] int32; a row is filled up with the sequence's own first page."""
    needed = [-(-(w.start + w.length) // page_size) for w in works]
    width = max(needed, default=1)
    assert width <= max_pages, f"a sequence has {width} pages, the limit is {max_pages}"
    pad = [[w.pages[0]] * (width - n) for w, n in zip(works, needed, strict=True)]
    rows = (w.pages[:n] + p for w, n, p in zip(works, needed, pad, strict=True))
    flat = np.fromiter(chain.from_iterable(rows), np.int32, len(works) * width)
    return flat.reshape(len(works), width)


def _input_ids(
    decodes: Sequence[Work], prefills: Sequence[Work], last_tokens: Tensor, device: Any
) -> Tensor:
    """[tokens] int64: gathered on the device for decodes, known to the host for the rest."""
    parts = []
    if decodes:
        taken = _tensor(np.array([w.row for w in decodes], np.int64), device)
        parts.append(last_tokens[taken])
    if prefills:
        known = chain.from_iterable(w.tokens for w in prefills if w.tokens is not None)
        count = sum(w.length for w in prefills)
        parts.append(_tensor(np.fromiter(known, np.int64, count), device))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _prefix_chunks(lens: Sequence[int], limit: int, device: Any) -> Iterator[PrefixChunk]:
    """Cut cached lengths into pieces of at most `limit` tokens, sequence after sequence."""
    done = 0  # tokens of all prefixes, end to end
    ends = np.cumsum(lens)
    begins = ends - lens
    total = int(ends[-1]) if len(lens) else 0
    while done < total:
        low = np.clip(done, begins, ends)
        high = np.clip(min(done + limit, total), begins, ends)
        yield PrefixChunk(
            starts=_tensor(low - begins, device), segs=_segments((high - low).tolist(), device)
        )
        done += limit


def num_logit_rows(work: Work) -> int:
    """Rows of logits of one work: of its last token if it samples, of all for prompt_logprobs.

    Row j of the latter predicts the prompt token at start + 1 + j; if it samples too, its last
    row is the one to sample from.
    """
    return work.length if work.prompt_logprobs is not None else int(work.sample)


def _logit_rows(works: Sequence[Work], cu: Ints) -> Ints:
    """[rows] int64: the last `num_logit_rows` batch rows of each work."""
    counts = np.array([num_logit_rows(w) for w in works], np.int64)
    ends = np.cumsum(counts)
    return np.arange(counts.sum()) + np.repeat(cu[1:] - ends, counts)
