"""The prompts among a step's works: their PrefillPart, and what is cached before them in chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ds_runtime.engine.step.plan import Work
from ds_runtime.engine.step.transfer import Table, Upload
from ds_runtime.ops.batch import PrefillPart, PrefixChunk, Segments
from ds_runtime.parallel.row_order import adapters_of

Ints = npt.NDArray[np.int64]


class Prompts(NamedTuple):
    """A PrefillPart before its transfer."""

    segs: _Lens
    table: int
    chunks: list[_Chunk]

    @staticmethod
    def of(
        works: Sequence[Work], pages: Table, prefix_chunk: int, adapts: bool, upload: Upload
    ) -> Prompts:
        """Of works that are not decoded, whose page table is `pages`; adds to their upload."""
        begins = [0, *accumulate(w.length for w in works)]
        chunks = [
            _Chunk.of(works, pages, span, begins[span.first], adapts, upload)
            for span in _prefix_chunks([w.start for w in works], prefix_chunk)
        ]
        return Prompts(_segments([w.length for w in works], upload), upload.add(pages), chunks)

    def sent(self, upload: Upload) -> PrefillPart:
        prefix = tuple(chunk.sent(upload) for chunk in self.chunks)
        return PrefillPart(self.segs.sent(upload), upload[self.table], prefix)


class _Lens(NamedTuple):
    """Segments before their transfer: lengths, and the number of their sums in the upload."""

    lens: tuple[int, ...]
    cu: int

    def sent(self, upload: Upload) -> Segments:
        return Segments(self.lens, upload[self.cu])


def _segments(lens: Sequence[int], upload: Upload) -> _Lens:
    return _Lens(tuple(lens), upload.add(np.array([0, *accumulate(lens)], np.int32)))


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
        low = np.minimum(np.maximum(begins, done), ends)  # np.clip is slow for few numbers
        high = np.minimum(np.maximum(begins, done + limit), ends)
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
        pages: Table,
        span: _CachedSpan,
        row: int,
        adapts: bool,
        upload: Upload,
    ) -> _Chunk:
        """works: all that are not decoded; pages: the page table of all; row: as PrefixChunk's."""
        own = slice(span.first, span.first + len(span.low))
        lens = (span.high - span.low).tolist()
        return cls(
            upload.add(span.low),
            _segments(lens, upload),
            upload.add(pages[own]),
            _segments([w.length for w in works[own]], upload),
            span.first,
            row,
            upload.add(adapters_of(works[own], lens)) if adapts else None,
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
