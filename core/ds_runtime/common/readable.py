"""Which descriptors have something to read, whatever their numbers: `select` takes none from 1024
on, and a server with many connections has larger ones. Torch-free.
"""

from __future__ import annotations

import select
from collections.abc import Iterable


def readable(descriptors: Iterable[int], seconds: float | None) -> list[int]:
    """Those that can be read or have ended, as soon as one has; none once the seconds are over.

    None waits for ever.
    """
    poll = select.poll()
    for one in descriptors:
        poll.register(one, select.POLLIN)
    return [one for one, _ in poll.poll(None if seconds is None else seconds * 1000)]
