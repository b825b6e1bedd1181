"""How often a busy front end takes what engines send: tokens that gather share one event.

Most of what a streamed token costs is per event. Where thousands of tokens a second keep the event
loop's thread busy for more than two fifths of the time, it takes turns. What comes between two of
them is one event per stream. A turn waits 20 ms at most, and none where the thread has time or is
busy with something else.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ds_runtime.engine.messages import Tokens

_BUSY, _FREE = 0.4, 0.2  # share of a core from which on turns become longer, or shorter
_STEP, _LONGEST = 0.005, 0.02  # seconds
_MANY = 2000.0  # messages a second from which on they are what a busy thread does
_WINDOW = 0.1  # seconds that are looked at


class Turns:
    """`pause`: seconds from one turn to the next. `taken`: messages with tokens so far. `busy`
    tells seconds of processor time, `now` of the clock."""

    def __init__(
        self,
        busy: Callable[[], float] = time.thread_time,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._busy, self._now = busy, now
        self.pause, self.taken = 0.0, 0
        self._since: tuple[float, float, int] | None = None

    def over(self) -> float:
        """A turn is over: seconds until the next may begin, 0 for at once."""
        at = self._now(), self._busy(), self.taken
        if self._since is None:
            self._since = at
        seconds = at[0] - self._since[0]
        if seconds >= _WINDOW:
            share = (at[1] - self._since[1]) / seconds
            if share < _FREE or (at[2] - self._since[2]) / seconds < _MANY:
                step = -_STEP
            else:
                step = _STEP if share > _BUSY else 0.0
            self.pause = min(_LONGEST, max(0.0, self.pause + step))
            self._since = at
        return self.pause


def joined(first: Tokens, then: Tokens) -> Tokens:
    """Two messages of one choice, one after the other, as one. The first must not be its last."""
    assert first.rid == then.rid and first.finish is None
    logprobs = None
    if first.logprobs is not None or then.logprobs is not None:
        logprobs = [*(first.logprobs or ()), *(then.logprobs or ())]
    told = first.prompt_logprobs
    prefill = first.prefill_seconds
    return Tokens(
        rid=first.rid,
        tokens=first.tokens + then.tokens,
        logprobs=logprobs,
        prompt_logprobs=then.prompt_logprobs if told is None else told,
        finish=then.finish,
        stop_token=then.stop_token,
        cached_tokens=max(first.cached_tokens, then.cached_tokens),
        cached_by_tier=first.cached_by_tier or then.cached_by_tier,
        prefill_seconds=then.prefill_seconds if prefill is None else prefill,
    )
