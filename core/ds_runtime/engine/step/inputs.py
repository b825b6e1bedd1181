"""A step plan as index tensors: host arrays in numpy, then one transfer for all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from struct import pack_into
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ds_runtime.engine.speculate.tree import Trees, seen_by
from ds_runtime.engine.step.plan import Work
from ds_runtime.engine.step.transfer import Upload
from ds_runtime.ops.batch import Batch, DecodePart, PrefillPart, PrefixChunk, Segments

Ints = npt.NDArray[np.int64]


def build_batch(
    works: Sequence[Work],
    page_size: int,
    max_pages: int,
    last_tokens: Tensor,
    upload: Upload,
    prefix_chunk: int,
    width: int = 1,
    trees: Trees | None = None,
) -> Batch:
    """The tensors of one step's works, or of a rank's own ones, without step states. Sends
    `upload`, with what it already holds.

    last_tokens: [max_running · width] int64 on the device, per row the token sampled last and the
    drafts behind it; decode works read them there. max_pages: most pages of a sequence; tables are
    as wide as this step needs. prefix_chunk: most cached tokens that one PrefixChunk covers, over
    all its sequences. Logit rows are in the order of the works, `num_logit_rows` each. trees: how
    the drafts of each row hang together; None: as chains.
    """
    num_decode = next((i for i, w in enumerate(works) if w.tokens is not None), len(works))
    decodes, prefills = works[:num_decode], works[num_decode:]
    if prefills or any(w.length > 1 for w in works):
        rows = _mixed_rows(works, num_decode, page_size, width)
    else:
        rows = _decode_rows(works, page_size, width)
    ids, positions, slots, logit_rows = (upload.add(array) for array in rows)
    adapts = any(w.adapter >= 0 for w in works)
    if adapts:
        adapters = upload.add(_adapters(works, [w.length for w in works]))
    if decodes:
        kv_lens = [w.start + w.length for w in decodes]
        several = any(w.length > 1 for w in decodes)
        table = upload.add(page_table(decodes, page_size, max_pages))
        decode_lens = upload.add(np.array(kv_lens, np.int32))
        lengths = np.array([w.length for w in decodes], np.int64)
        counts = upload.add(np.repeat(lengths, lengths)) if trees and several else 0
    if prefills:
        pages = page_table(prefills, page_size, max_pages)
        prefill_table = upload.add(pages)
        q_segs = _segments([w.length for w in prefills], upload)
        prefix = [
            _Chunk.of(prefills, pages, span, adapts, upload)
            for span in _prefix_chunks([w.start for w in prefills], prefix_chunk)
        ]
    upload.send()
    batch = Batch(
        input_ids=_with_last_tokens(upload[ids], sum(w.length for w in decodes), last_tokens),
        positions=upload[positions],
        slots=upload[slots],
        logit_rows=upload[logit_rows],
        adapters=upload[adapters] if adapts else None,
    )
    if decodes:
        batch.decode = DecodePart(
            page_table=upload[table],
            kv_lens=upload[decode_lens],
            host_kv_lens=tuple(kv_lens),
            q_lens=tuple(w.length for w in decodes) if several else (),
        )
        if trees is not None and several:
            _hang(batch, trees, upload[ids][: batch.num_decode], upload[counts])
    if prefills:
        batch.prefill = PrefillPart(
            q_segs=q_segs.sent(upload),
            page_table=upload[prefill_table],
            prefix=tuple(chunk.sent(upload) for chunk in prefix),
        )
    return batch


def _hang(batch: Batch, trees: Trees, places: Tensor, counts: Tensor) -> None:
    """Give the decode rows, nodes of trees, their positions, and what they see. places: [rows] in
    `trees`; counts: [rows] nodes of each one's sequence.
    """
    assert batch.decode is not None
    first = batch.positions[: places.shape[0]] - places % trees.width
    batch.positions = torch.cat((first + trees.depths[places], batch.positions[places.shape[0] :]))
    batch.decode = replace(batch.decode, tree=seen_by(trees.lines[places], counts))


class _Rows(NamedTuple):
    """Per token: its place in last_tokens or its id, its position and slot; and the logit rows."""

    ids: Ints
    positions: Ints
    slots: Ints
    logit_rows: Ints


def _decode_rows(works: Sequence[Work], page_size: int, width: int) -> _Rows:
    """One token each: most steps, and a handful of numbers, for which numpy's calls are slow."""
    slots = [w.pages[w.start // page_size] * page_size + w.start % page_size for w in works]
    return _Rows(
        np.array([w.row * width for w in works], np.int64),
        np.array([w.start for w in works], np.int64),
        np.array(slots, np.int64),
        np.array([i for i, w in enumerate(works) if num_logit_rows(w)], np.int64),
    )


def _mixed_rows(works: Sequence[Work], num_decode: int, page_size: int, width: int) -> _Rows:
    """Any number of tokens each."""
    pages, logit_rows, total = list[int](), list[int](), 0
    starts, places = list[int](), list[int]()  # per work: what to add to a row, and to a position
    for work in works:
        low, end = work.start // page_size, work.start + work.length
        places.append((len(pages) - low) * page_size)
        pages += work.pages[low : -(-end // page_size)]
        starts.append(work.start - total)
        total += work.length
        logit_rows += range(total - num_logit_rows(work), total)
    lengths = np.array([w.length for w in works], np.int64)
    positions = np.arange(total) + np.repeat(np.array(starts, np.int64), lengths)
    inside = positions + np.repeat(np.array(places, np.int64), lengths)  # these pages, end to end
    slots = np.add.outer(np.array(pages, np.int64) * page_size, np.arange(page_size)).ravel()
    ids = _input_ids(works, num_decode, width)
    return _Rows(ids, positions, slots[inside], np.array(logit_rows, np.int64))


def _adapters(works: Sequence[Work], counts: Sequence[int]) -> npt.NDArray[np.int32]:
    """[rows] int32: the adapter of every row, `counts` rows of each work."""
    return np.repeat(np.array([w.adapter for w in works], np.int32), counts)


class _Lens(NamedTuple):
    """Segments before their transfer: lengths, and the number of their sums in the upload."""

    lens: tuple[int, ...]
    cu: int

    def sent(self, upload: Upload) -> Segments:
        return Segments(self.lens, upload[self.cu])


def _segments(lens: Sequence[int], upload: Upload) -> _Lens:
    return _Lens(tuple(lens), upload.add(np.array([0, *accumulate(lens)], np.int32)))


def page_table(works: Sequence[Work], page_size: int, max_pages: int) -> npt.NDArray[np.int32]:
    """[works, width] int32, as wide as the longest needs; a row is filled up with the sequence's
    own first page.
    """
    needed = [-(-(w.start + w.length) // page_size) for w in works]
    width = max(needed, default=1)
    assert width <= max_pages, f"a sequence has {width} pages, the limit is {max_pages}"
    flat: list[int] = []
    for work, used in zip(works, needed, strict=True):
        flat += work.pages[:used]
        flat += work.pages[:1] * (width - used)
    return np.array(flat, np.int32).reshape(len(works), width)


def _input_ids(works: Sequence[Work], num_decode: int, width: int) -> Ints:
    """[tokens]: places in last_tokens for decode works, then the token ids of the others."""
    assert all(w.length <= width for w in works[:num_decode])
    found, at = np.empty(sum(w.length for w in works), np.int64), 0
    for work in works:
        ids = range(work.row * width, work.row * width + work.length)
        pack_into(f"{work.length}q", found.data, at, *(ids if work.tokens is None else work.tokens))
        at += work.length * found.itemsize  # numpy itself reads ints half as fast
    return found


def _with_last_tokens(ids: Tensor, num_decode: int, last_tokens: Tensor) -> Tensor:
    """[tokens] int64: the first, of decode works, are places that give way to what lies there."""
    if num_decode == ids.shape[0]:
        return last_tokens.index_select(0, ids)
    if num_decode:
        return torch.cat((last_tokens.index_select(0, ids[:num_decode]), ids[num_decode:]))
    return ids


class _CachedSpan(NamedTuple):
    """Cached tokens [low, high) of the sequences from `first` on, which follow each other."""

    first: int
    low: Ints
    high: Ints


def _prefix_chunks(lens: Sequence[int], limit: int) -> Iterator[_CachedSpan]:
    """Pieces of the cached lengths, at most `limit` tokens each, sequence after sequence; of each
    piece the sequences that have tokens in it."""
    ends = np.cumsum(np.array(lens, np.int64))
    begins = ends - lens
    for done in range(0, int(ends[-1]), limit):
        low = np.clip(done, begins, ends)
        high = np.clip(done + limit, begins, ends)
        inside = np.flatnonzero(high > low)
        own = slice(inside[0], inside[-1] + 1)
        yield _CachedSpan(int(own.start), (low - begins)[own], (high - begins)[own])


class _Chunk(NamedTuple):
    """A PrefixChunk before its transfer; starts, table and adapters by their numbers."""

    starts: int
    segs: _Lens
    table: int
    q_segs: _Lens
    sequence: int
    row: int
    adapters: int | None

    @classmethod
    def of(
        cls,
        works: Sequence[Work],
        pages: npt.NDArray[np.int32],
        span: _CachedSpan,
        adapts: bool,
        upload: Upload,
    ) -> _Chunk:
        """works: all that are not decoded; pages: the page table of all."""
        own = slice(span.first, span.first + len(span.low))
        lens = (span.high - span.low).tolist()
        return cls(
            upload.add(span.low),
            _segments(lens, upload),
            upload.add(pages[own]),
            _segments([w.length for w in works[own]], upload),
            span.first,
            sum(w.length for w in works[: span.first]),
            upload.add(_adapters(works[own], lens)) if adapts else None,
        )

    def sent(self, upload: Upload) -> PrefixChunk:
        return PrefixChunk(
            upload[self.starts],
            self.segs.sent(upload),
            upload[self.table],
            self.q_segs.sent(upload),
            self.sequence,
            self.row,
            None if self.adapters is None else upload[self.adapters],
        )


def num_logit_rows(work: Work) -> int:
    """Rows of logits of one work: where it draws, and of all tokens for prompt_logprobs.

    Row j of the latter predicts the prompt token at start + 1 + j; if it samples too, its last
    row is the one to sample from.
    """
    return work.length if work.prompt_logprobs is not None else work.draws
