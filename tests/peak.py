"""What torch allocates on the CPU."""

from __future__ import annotations

from torch.profiler import ProfilerActivity, profile


def peak(run):
    """Bytes that `run` takes at its widest, above what there was."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most
