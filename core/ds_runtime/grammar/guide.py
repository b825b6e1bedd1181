"""One choice on its way through a grammar: which tokens may come next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ds_runtime.errors import RequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher


class Guide:
    """`mask`: the tokens that may come next, one bit each, as a row of MaskLogits' masks.

    `is_done`: nothing but the end can come. It belongs to a request, survives preemption, and is
    told every token that the request keeps. `not_eos`: words with every bit but those of EOS.
    """

    def __init__(self, matcher: LLMatcher, not_eos: npt.NDArray[np.uint32], param: str) -> None:
        self._matcher = matcher
        self._not_eos = not_eos
        self.param = param
        self.is_done = False
        self.mask = self._allowed(self._matcher)

    def take(self, token: int) -> None:
        """Go on behind `token`. RequestError when the rule is too complex to go on with."""
        matcher = self._matcher
        if not matcher.consume_token(token):
            raise self._fault(f"token {token} does not fit")
        if matcher.is_stopped():
            self.is_done = True
        else:
            self.mask = self._allowed(self._matcher)
            self.is_done = not (np.frombuffer(self.mask, np.uint32) & self._not_eos).any()
        if matcher.is_error():
            raise self._fault("it is too complex")

    def masks(self, drafts: Sequence[int], parents: Sequence[int] = ()) -> list[bytes]:
        """`mask`, and that behind each draft, empty where it cannot come. parents: behind which
        draft each comes, counted from 1, or 0; none: behind the one before.
        """
        found, heads = [self.mask], [None if self.is_done else self._matcher]
        for number, token in enumerate(drafts):
            parent = parents[number] if parents else number
            mask, head = found[parent], heads[parent]
            found.append(b"")
            heads.append(None)
            if head is None or not mask or not mask[token // 8] >> token % 8 & 1:
                continue
            ahead = head.deep_copy()
            if ahead.consume_token(token) and not (ahead.is_stopped() or ahead.is_error()):
                found[-1], heads[-1] = self._allowed(ahead), ahead
        while not found[-1]:  # the first never is
            found.pop()
        return found

    def _allowed(self, matcher: LLMatcher) -> bytes:
        # The library may add a word for an id of its own.
        return matcher.compute_bitmask()[: self._not_eos.nbytes]

    def _fault(self, what: str) -> RequestError:
        said = " ".join(self._matcher.get_error().replace("<non-verbose/>", "").split())
        more = f" ({said[:200]})" if said else ""
        return RequestError(
            f"{self.param} cannot be followed any further: {what}{more}", self.param
        )
