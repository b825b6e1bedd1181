"""`torchrun ds-runtime serve`: what its variables say, as flags. Torch-free.

torchrun starts a process for each rank, or one on each node; ds-runtime starts the ranks of a node
itself. So the first process of a node serves, and the others have nothing to do.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import MutableMapping

from ds_runtime.cli.config_file import given

VARIABLES = (
    "TORCHELASTIC_RUN_ID",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
_STORE = "TORCHELASTIC_USE_AGENT_STORE"


def started_by(environ: MutableMapping[str, str]) -> bool:
    """Whether torchrun started this process."""
    return all(name in environ for name in VARIABLES)


def is_spare(environ: MutableMapping[str, str]) -> bool:
    """Whether this process is not the first that torchrun started on its node."""
    return started_by(environ) and environ["LOCAL_RANK"] != "0"


def settle(namespace: Namespace, environ: MutableMapping[str, str]) -> list[str]:
    """Set what the user did not; returns the sentence for the start. Ranks of ours meet at the port
    after torchrun's, which it holds itself, and make a store of their own.
    """
    if not started_by(environ):
        return []
    environ.pop(_STORE, None)
    found: dict[str, int | str] = {"tp": int(environ["WORLD_SIZE"])}
    if (nodes := int(environ["GROUP_WORLD_SIZE"])) > 1:
        port = int(environ["MASTER_PORT"]) + 1
        found |= {"nnodes": nodes, "node_rank": int(environ["GROUP_RANK"])}
        found |= {"dist_init_addr": f"{environ['MASTER_ADDR']}:{port}"}
    asked = given(namespace)
    said = {name: value for name, value in found.items() if name not in asked}
    for name, value in said.items():
        setattr(namespace, name, value)
    flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in said.items())
    return [f"torchrun: is {flags} here"] if flags else []
