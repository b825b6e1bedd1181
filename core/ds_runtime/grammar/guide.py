"""One choice on its way through a grammar: which tokens may come next."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ds_runtime.errors import FieldPath, RequestError

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

# Of processor time. With a vocabulary of 129,000, usual rules take 1 ms at first, then 0.1 ms.
MASK_SECONDS = 0.02  # for one mask
REQUEST_SECONDS, TOKEN_SECONDS = 1.0, 0.002  # for all of a choice; and more for each token
HEAVY = 0.001  # from here on nobody but its owner waits for a mask
_NO_TOKEN = 0xFFFF_FFFF  # beyond every vocabulary


@dataclass(frozen=True, slots=True)
class Start:
    """A compiled rule at its beginning, with its first mask. Whoever follows it copies it."""

    matcher: LLMatcher
    mask: bytes


@dataclass(frozen=True, slots=True)
class Followed:
    """How far a guide went: `end` is the index of the token that nothing can follow, or None.

    `fault`: why nothing can, where the rule is not kept to its end.
    """

    end: int | None = None
    fault: tuple[str | FieldPath, ...] = ()


class Guide:
    """`masks`: the tokens that may come next, one bit each, as a row of MaskLogits' masks, and
    those that may come after each draft, empty where it cannot come.

    `is_done`: nothing but the end can come. It belongs to a request, survives preemption, and is
    told every token that the request keeps. `allowed`: words with every bit of the model's
    tokens; `not_eos`: those without EOS. `cost`: seconds that the last mask took.
    """

    def __init__(
        self,
        start: Start,
        allowed: npt.NDArray[np.uint32],
        not_eos: npt.NDArray[np.uint32],
        param: str,
    ) -> None:
        self._matcher = start.matcher.deep_copy()
        self._allowed, self._not_eos = allowed, not_eos
        self.param = param
        self.is_done = False
        self.masks = [start.mask]
        self.cost = self._spent = 0.0
        self._taken = 0
        self._failed: LLMatcher | None = None

    @property
    def mask(self) -> bytes:
        """The tokens that may come next."""
        return self.masks[0]

    def follow(
        self, tokens: Sequence[int], drafts: Sequence[int] = (), parents: Sequence[int] = ()
    ) -> Followed:
        """Continue after `tokens`, as far as possible, and make the masks of what comes then.

        parents: after which draft each comes, counted from 1, or 0; none: after the one before.
        """
        for index, token in enumerate(tokens):
            try:
                self.take(token)
                if drafts and index == len(tokens) - 1 and not self.is_done:
                    self._look_ahead(drafts, parents)
            except RequestError as e:
                return Followed(index, e.said)
            if self.is_done:
                return Followed(index)
        return Followed()

    def take(self, token: int) -> None:
        """Continue after `token`. RequestError when the rule is too complex to continue with."""
        matcher = self._matcher
        self._taken += 1
        if not self._consume(matcher, token):
            raise self._fault(f"token {token} does not fit")
        if matcher.is_stopped():
            self.is_done = True
        else:
            mask = self._mask(matcher)
            self.masks = [mask]
            self.is_done = not (np.frombuffer(mask, np.uint32) & self._not_eos).any()
        if matcher.is_error():
            raise self._fault("it is too complex")

    def _look_ahead(self, drafts: Sequence[int], parents: Sequence[int]) -> None:
        found, heads = self.masks, [self._matcher, *[None] * len(drafts)]
        for number, token in enumerate(drafts):
            parent = parents[number] if parents else number
            mask, head = found[parent], heads[parent]
            found.append(b"")
            if head is None or not mask or not mask[token // 8] >> token % 8 & 1:
                continue
            ahead = head.deep_copy()
            if self._consume(ahead, token) and not ahead.is_stopped():
                mask = self._mask(ahead)
                if not ahead.is_error():
                    found[-1], heads[number + 1] = mask, ahead

    def _consume(self, matcher: LLMatcher, token: int) -> bool:
        """Where a mask is heavy, going on is, too; the library then lets other threads run only if
        it is given several matchers.
        """
        if self.cost < HEAVY:
            return matcher.consume_token(token)
        if self._failed is None:
            self._failed = matcher.deep_copy()
            self._failed.consume_token(_NO_TOKEN)
        pairs = [(matcher, token), (self._failed, token)]
        return _executor().consume_token_par(pairs)[0]

    def _mask(self, matcher: LLMatcher) -> bytes:
        """What `matcher` allows. RequestError where the time is up."""
        begin = time.thread_time()
        mask = words(matcher, self._allowed)
        self.cost = time.thread_time() - begin
        self._spent += self.cost
        room = REQUEST_SECONDS + TOKEN_SECONDS * self._taken
        if self.cost > MASK_SECONDS or self._spent > room:
            raise self._fault(too_slow(self.cost, self._spent))
        return mask

    def _fault(self, what: str) -> RequestError:
        said = " ".join(self._matcher.get_error().replace("<non-verbose/>", "").split())
        more = f" ({said[:200]})" if said else ""
        return RequestError.of(self.param, f" cannot be followed any further: {what}{more}")


def words(matcher: LLMatcher, allowed: npt.NDArray[np.uint32]) -> bytes:
    """The mask of what comes next, of the model's tokens alone: the library knows all those of the
    tokenizer.
    """
    mask = np.frombuffer(matcher.compute_bitmask(), np.uint32)[: allowed.size]
    return (mask & allowed).tobytes()


def too_slow(mask: float, spent: float) -> str:
    """What to say of masks beyond their time."""
    if mask > MASK_SECONDS:
        return (
            f"telling which tokens may come next took {mask * 1000:.0f} ms, the limit is "
            f"{MASK_SECONDS * 1000:.0f} ms; make it less ambiguous"
        )
    return (
        f"telling which tokens may come next took {spent:.1f} s in all, the limit is "
        f"{REQUEST_SECONDS:g} s and {TOKEN_SECONDS * 1000:g} ms for each token; make it less "
        "ambiguous"
    )


_local = threading.local()


def _executor() -> LLExecutor:
    """The library's own thread for this thread's heavy matchers."""
    from llguidance import LLExecutor

    if not hasattr(_local, "executor"):
        _local.executor = LLExecutor(1)
    found: LLExecutor = _local.executor
    return found
