"""Memory nodes, threads on them, and large pages: from copies of other machines' files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_runtime_cpu import machine, native, placement
from ds_runtime_cpu.placement import nodes, parse_cpus
from ds_runtime_cpu.platform import CpuPlatform

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and /sys")


def tree(root: Path, **files: str) -> Path:
    for node, cpus in files.items():
        folder = root / "sys/devices/system/node" / node
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus + "\n")
    return root


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0-3", {0, 1, 2, 3}), ("0,2-3,64", {0, 2, 3, 64}), ("", set()), ("1-x,7", {7})],
)
def test_lists_of_processors(text, cpus):
    assert parse_cpus(text) == cpus


def test_nodes_hold_only_processors_that_this_process_may_use(tmp_path):
    root = tree(tmp_path, node0="0-3,8-11", node1="4-7,12-15", node2="", node10="16-17")
    (root / "sys/devices/system/node/nodes_are_fun").mkdir()
    everywhere = nodes(frozenset(range(18)), root)
    assert list(everywhere) == [0, 1, 10]  # a node of memory alone runs no thread
    assert everywhere[1] == {4, 5, 6, 7, 12, 13, 14, 15}
    assert nodes(frozenset({2, 9}), root) == {0: {2, 9}}
    assert nodes(frozenset({0}), tmp_path / "nothing") == {}


def test_one_node_binds_nothing():
    assert placement.placement(0, 1, 8, {0: frozenset(range(8))}) == []
    assert placement.placement(0, 1, 8, {}) == []


TWO = {0: frozenset(range(4)), 1: frozenset(range(4, 8))}


@pytest.mark.parametrize(
    ("rank", "size", "threads", "where"),
    [
        (0, 1, 8, [0, 0, 0, 0, 1, 1, 1, 1]),
        (0, 1, 2, [0, 1]),  # few threads still have every node's bandwidth
        (0, 2, 4, [0, 0, 0, 0]),  # a rank per node
        (1, 2, 4, [1, 1, 1, 1]),
        (1, 4, 2, [0, 0]),
        (2, 4, 1, [1]),
        (0, 1, 1, [1]),  # the middle of one thread: any node will do
        (0, 1, 16, [0] * 8 + [1] * 8),  # more threads than processors
    ],
)
def test_threads_fill_the_nodes_in_order(rank, size, threads, where):
    assert placement.placement(rank, size, threads, TWO) == [TWO[node] for node in where]


@given(
    sizes=st.lists(st.integers(1, 40), min_size=2, max_size=8),
    ranks=st.integers(1, 5),
    threads=st.integers(1, 90),
)
def test_every_node_gets_its_share(sizes, ranks, threads):
    on, first = {}, 0
    for node, size in enumerate(sizes):
        on[node] = frozenset(range(first, first + size))
        first += size
    bound = [b for r in range(ranks) for b in placement.placement(r, ranks, threads, on)]
    assert len(bound) == ranks * threads
    assert bound == sorted(bound, key=min)
    for cpus in on.values():
        fair = ranks * threads * len(cpus) / first
        assert abs(bound.count(cpus) - fair) <= 1


def test_the_library_reads_one_list_and_its_ends():
    assert placement.flat([frozenset({3, 1}), frozenset(), frozenset({2})]) == (
        [1, 3, 2],
        [2, 2, 3],
    )


def test_a_user_who_binds_threads_is_left_alone():
    assert placement.bound_by_user({"OMP_PLACES": "cores"})
    assert not placement.bound_by_user({"OMP_NUM_THREADS": "2", "PATH": "/bin"})


def test_what_doctor_says_of_nodes():
    assert placement.say_nodes({}).startswith("unknown")
    assert placement.say_nodes({0: frozenset({0})}) == "1: threads are not bound"
    said = placement.say_nodes(TWO)
    assert said.startswith("2 (node 0 with 4 processors, node 1 with 4 processors): every thread")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("always [madvise] never", "use large pages (transparent_hugepage: madvise)"),
        ("[always] madvise never", "use large pages (transparent_hugepage: always)"),
        ("always madvise [never]", "off: decode is slower; echo madvise >"),
        ("", "not offered"),
    ],
)
def test_what_doctor_says_of_large_pages(tmp_path, text, says):
    folder = tmp_path / "sys/kernel/mm/transparent_hugepage"
    folder.mkdir(parents=True)
    (folder / "enabled").write_text(text)
    assert says in placement.say_large_pages(tmp_path)


# The native side, in processes of their own: bound threads stay bound.

BIND = """
import json, os, sys, threading
import torch
from ds_runtime_cpu import native, placement
from ds_runtime_cpu.platform import CpuPlatform
cpus = sorted(placement.allowed_cpus())
wanted = [frozenset(cpus[:1]), frozenset(cpus[-1:]), frozenset(cpus)]
placement.nodes = lambda allowed: {0: wanted[0], 1: wanted[1]} if len(cpus) > 1 else {}
placement.placement = lambda rank, size, threads, on: wanted
before = set(os.listdir("/proc/self/task"))
CpuPlatform().init_worker(0, 1, 3)
bound = sorted(os.sched_getaffinity(0))
found = []
def again(*settings):
    found.append(placement.allowed_cpus())
    return wanted
placement.placement = again
CpuPlatform().init_worker(0, 1, 3)
def mask(task):
    with open(f"/proc/self/task/{task}/status") as lines:
        return next(l.split()[1] for l in lines if l.startswith("Cpus_allowed_list"))
made = sorted(set(os.listdir("/proc/self/task")) - before, key=int)[-2:]  # after torch's own pool
here = mask(threading.get_native_id())
counts = []
def ask():
    counts.append(native.threads())
other = threading.Thread(target=ask)
other.start(); other.join()
ask()
print(json.dumps([cpus, here, [mask(t) for t in made], counts, bound, sorted(found[0])]))
"""


@linux
def test_threads_are_bound_and_their_number_holds_for_every_caller():
    assert native.why_not() is None
    env = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_", "KMP_"))}
    ran = subprocess.run([sys.executable, "-c", BIND], capture_output=True, text=True, env=env)
    assert ran.returncode == 0, ran.stderr
    cpus, here, others, counts, bound, again = json.loads(ran.stdout)
    assert parse_cpus(here) == {cpus[0]}
    assert [parse_cpus(o) for o in others] == [{cpus[-1]}, set(cpus)]
    assert counts == [3, 3], "--threads holds for a second thread of Python too"
    assert bound == cpus[:1] and again == cpus, "a second engine has all processors again"


def flags_at(address: int, smaps: str) -> str:
    """The marks of the mapping that holds this address."""
    inside = False
    for line in smaps.splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            low, high = (int(part, 16) for part in head.split("-"))
            inside = low <= address < high
        elif inside and head == "VmFlags:":
            return line
    return ""


def carries_the_wish(flags: str) -> bool:
    return (" hg" in flags) is not placement.say_large_pages().startswith("not offered")


@linux
def test_packed_weights_are_offered_large_pages():
    """The mapping under a packed weight carries the system's mark of the wish."""
    torch = pytest.importorskip("torch")
    buffer = torch.empty(16 << 20, dtype=torch.uint8)
    native.calls().large_pages(buffer.data_ptr(), buffer.nbytes)
    middle = buffer.data_ptr() + (8 << 20)
    flags = flags_at(middle, Path("/proc/self/smaps").read_text())
    assert carries_the_wish(flags), flags


CACHE = """
import torch
cache = torch.zeros(16 << 20, dtype=torch.uint8)
print(cache.data_ptr() + (8 << 20))
print(open("/proc/self/smaps").read())
"""


@linux
def test_caches_of_an_engine_are_offered_large_pages():
    """What the platform sets is what torch reads, in the version that is installed."""
    pytest.importorskip("torch")
    env = {**os.environ, **CpuPlatform().process_env()}
    ran = subprocess.run([sys.executable, "-c", CACHE], capture_output=True, text=True, env=env)
    assert ran.returncode == 0, ran.stderr
    middle, _, smaps = ran.stdout.partition("\n")
    flags = flags_at(int(middle), smaps)
    assert carries_the_wish(flags), flags


def test_nodes_of_this_machine_are_found():
    found = nodes(placement.allowed_cpus())
    assert not found or frozenset().union(*found.values()) == placement.allowed_cpus()
    assert machine.cores() >= 1
