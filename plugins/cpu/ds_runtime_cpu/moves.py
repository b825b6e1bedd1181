"""CacheMove in torch, without a look at what moves: a recording of it serves every step."""

from __future__ import annotations

import torch
from torch import Tensor


def cache_move(cache: Tensor, sources: Tensor, targets: Tensor) -> None:
    """CacheMove. What does not move does what the first that moves does, once more."""
    if not sources.numel():
        return
    entries = cache.view(torch.uint8).flatten(0, 1)  # bit for bit, whatever the dtype
    old, new = sources.flatten(), targets.flatten()
    moves = old >= 0
    first = moves.to(torch.uint8).argmax().unsqueeze(0)
    lead = old.index_select(0, first)
    old = torch.where(moves, old, lead).clamp(min=0)
    stays = torch.where(lead >= 0, new.index_select(0, first), 0)  # nothing moves: 0 to 0
    entries.index_copy_(0, torch.where(moves, new, stays), entries.index_select(0, old))
