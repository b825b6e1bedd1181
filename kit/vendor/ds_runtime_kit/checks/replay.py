"""A graph backend without a device: it records torch ops as they run, and runs them again."""

from __future__ import annotations

from collections.abc import Callable

from ds_runtime.platform.recording import Recording


class ReplayBackend:
    """See GraphBackend. `replays` counts, per capture, how often it was replayed."""

    def __init__(self) -> None:
        self.replays: list[int] = []

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Record `run`; raises CaptureError where a device could not."""
        recording = Recording()
        recording.begin()
        try:
            run()
        finally:
            recording.end()
        number = len(self.replays)
        self.replays.append(0)

        def replay() -> None:
            self.replays[number] += 1
            recording.replay()

        return replay
