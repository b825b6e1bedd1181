"""How long ranks are waited for that may be dead: all of it here, since it adds up.

| what happens | until all ranks have ended |
|---|---|
| a rank fails, or is killed | `NEIGHBOURS`, then `WORD` between machines, then `ENDING` |
| a rank is stopped by a signal | `STOPPED`, then as above |
| a machine is cut off | `SILENCE`, `SIGN`, `WORD`, then `ENDING` |
| rank 0 of `LLM` waits in native code | `STUCK`, then `ENDING` |

Each is at most `WHOLE`. Where a rank does not fit, none is dead: rank 0 says so at once, and
waits up to `REFUSING` for machines that start later. Torch-free; seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

WHOLE = 10.0
SIGN = 1.0  # between two signs of life
SILENCE = 4.0  # without one, after which there is nobody
WORD = 1.5  # for the reason of an end to come from another machine
NEIGHBOURS = 0.3  # for a dying rank's neighbours to leave their reasons
THEIRS = 1.0  # to see that what failed here comes of another rank's death
ENDING = 2.0  # for those that are ended
PARTING = 2.0  # for a communicator to close whose other ranks are gone
STOPPED = 3.0  # for which a rank may be stopped by a signal
STUCK = 4.0  # for a call to notice a death by itself, as most communicators do
REFUSED = 4.0  # for which an address may refuse a rank
LATE = 5.0  # for those that come after a rank has died at the start to be told why
REFUSING = 30.0  # for those that come after a rank did not fit to be told why
LINGER = 1.0  # for last words to be sent


@dataclass(frozen=True, slots=True)
class LinkLimits:
    """How long ends of one link wait, in seconds: each as the constant of its name. All ends of a
    link have the same.
    """

    sign: float = SIGN
    silence: float = SILENCE
    word: float = WORD
    refused: float = REFUSED
    late: float = LATE
    refusing: float = REFUSING
    linger: float = LINGER


LINK_LIMITS = LinkLimits()
