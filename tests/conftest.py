"""What holds for every test of a run.

Triton's kernels run in its interpreter where no accelerator is: that must be chosen before Triton
is first imported, in this process and in those of the tests. Of several workers each takes its
share of the cores; with all cores in each, threads wait for those that another worker holds up.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, settings

from ds_runtime.measured import found

pytest_plugins = ("matrix", "report", "draw")

# `--hypothesis-profile=deep` tries ten times as many examples; see `examples`.
settings.register_profile("ci", max_examples=100, deadline=None, derandomize=True, print_blob=True)
# `tools/mutate.py` asks whether a test turns red, and needs no smallest example of it.
settings.register_profile(
    "faults", settings.get_profile("ci"), phases=(Phase.explicit, Phase.generate)
)
# Each run of it tries others, also where hypothesis takes a machine for CI.
settings.register_profile(
    "deep", max_examples=1000, deadline=None, derandomize=False, print_blob=True
)

# Without a profile no test fails because the machine is busy.
settings.register_profile("dev", deadline=None)
settings.load_profile("dev")


def pytest_configure(config: pytest.Config) -> None:
    if not torch.accelerator.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
        torch.set_num_threads(max(1, torch.get_num_threads() // workers))


def pytest_collection_finish() -> None:
    """What thousands of collected tests hold is not looked through at every garbage collection."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def no_costs_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Plans of this process do not hang on what `tune` has measured on this machine. A test that
    gives HOME another value has that one's costs."""
    home, folder = Path.home(), found.folder
    empty = tmp_path_factory.mktemp("costs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(found, "folder", lambda: empty if Path.home() == home else folder())
        yield


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tests of many small ops: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
