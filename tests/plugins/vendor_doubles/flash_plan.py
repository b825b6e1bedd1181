"""FlashMLA's plan as its kernel reads it (csrc/sm90/decode/dense/splitkv_mla.cuh, 9241ae3)."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor


def check_plan(tiles: Tensor, splits: Tensor, lens: Tensor) -> list[list[tuple[int, int]]]:
    """The blocks [begin, end) of every piece by sequence; each computed once, and summed."""
    rows = lens.shape[0]
    assert tiles.shape[1:] == (8,) and splits.shape == (rows + 1,)
    blocks = [-(-n // 64) for n in lens.tolist()]
    found: list[list[tuple[int, int]]] = [[] for _ in range(rows)]
    cut: list[set[bool]] = [set() for _ in range(rows)]
    for first, last, begin, end, piece, first_cut, last_cut, _ in tiles.tolist():
        if first >= rows:
            continue
        for row in range(first, last + 1):
            assert (piece if row == first else 0) == len(found[row]), "pieces out of order"
            found[row].append((begin if row == first else 0, end if row == last else blocks[row]))
            alone = first_cut if row == first else last_cut if row == last else 0
            cut[row].add(bool(alone))
    for row, pieces in enumerate(found):
        assert cut[row] == {len(pieces) > 1}, (
            "a sequence in pieces is not summed, or a whole one is"
        )
        some = [p for p in pieces if p[0] < p[1]] or pieces[:1]
        assert [some[0][0], *(e for _, e in some)] == [*(b for b, _ in some), blocks[row]]
        assert all(p == (0, 0) for p in pieces if p not in some), "a piece of nothing reads keys"
    assert [b - a for a, b in pairwise(splits.tolist())] == [len(p) for p in found]
    assert splits[0] == 0
    assert max(map(len, found)) > 1 or len(tiles) == 1, "what follows does not wait for results"
    return found
