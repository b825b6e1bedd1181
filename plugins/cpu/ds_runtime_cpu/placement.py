"""Memory nodes and large pages: where threads may run, and what `doctor` says. Torch-free.

On a machine with several memory nodes every thread stays on one node. The packed weights are then
filled, hence placed, by the threads that read them at every step: kernels divide panels between
threads the same way each time (csrc/parallel.h). A thread is bound to the whole of its node, not to
one core, so that the system may still move it away from a busy core. One node: nothing is bound.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

_BOUND_BY_USER = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
_NODES = "sys/devices/system/node"
_LARGE = "sys/kernel/mm/transparent_hugepage"


def read(path: Path) -> str:
    """The text of a file without outer white space, or "" where it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def allowed_cpus() -> frozenset[int]:
    """The processors that this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)
    return frozenset(affinity(0) if affinity is not None else range(os.cpu_count() or 1))


def parse_cpus(text: str) -> frozenset[int]:
    """`0-3,8,10-11` as a set; what is no such list is empty."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if first.isdigit() and (last or first).isdigit():
            found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def nodes(allowed: frozenset[int], root: Path = Path("/")) -> Mapping[int, frozenset[int]]:
    """The allowed processors of every memory node that has some, by the node's number."""
    found = {}
    for folder in (root / _NODES).glob("node[0-9]*"):
        cpus = parse_cpus(read(folder / "cpulist")) & allowed
        number = folder.name.removeprefix("node")
        if cpus and number.isdigit():
            found[int(number)] = cpus
    return dict(sorted(found.items()))


def placement(
    rank: int, size: int, threads: int, on: Mapping[int, frozenset[int]]
) -> list[frozenset[int]]:
    """The processors of each of a rank's `threads`; empty where nothing is to be bound.

    on: processors by node. All ranks' threads, one after the other, fill the nodes in order, each
    node with its share of the processors.
    """
    if len(on) < 2:
        return []
    total = sum(map(len, on.values()))
    bound = []
    for i in range(rank * threads, (rank + 1) * threads):
        left = (2 * i + 1) * total // (2 * size * threads)  # processors before the thread's middle
        for cpus in on.values():
            if left < len(cpus):
                bound.append(cpus)
                break
            left -= len(cpus)
    assert len(bound) == threads
    return bound


def bound_by_user(environment: Mapping[str, str]) -> bool:
    """Whether the user has told OpenMP where threads run."""
    return any(name in environment for name in _BOUND_BY_USER)


def flat(bound: Sequence[frozenset[int]]) -> tuple[list[int], list[int]]:
    """(processors of all threads, end of each thread's) as the native library reads them."""
    cpus: list[int] = []
    ends = []
    for own in bound:
        cpus += sorted(own)
        ends.append(len(cpus))
    return cpus, ends


def say_nodes(on: Mapping[int, frozenset[int]]) -> str:
    """The memory nodes, for people."""
    if not on:
        return "unknown to this system: threads are not bound"
    if len(on) == 1:
        return "1: threads are not bound"
    each = ", ".join(f"node {node} with {len(cpus)} processors" for node, cpus in on.items())
    return f"{len(on)} ({each}): every thread stays on one, with the weights that it reads"


def say_large_pages(root: Path = Path("/")) -> str:
    """Whether packed weights and caches use large pages, for people."""
    modes = read(root / _LARGE / "enabled")
    mode = modes.partition("[")[2].partition("]")[0]
    if mode in ("always", "madvise"):
        return f"packed weights and caches use large pages (transparent_hugepage: {mode})"
    if mode == "never":
        return f"off: decode is slower; echo madvise > /{_LARGE}/enabled"
    return "not offered by this system"
