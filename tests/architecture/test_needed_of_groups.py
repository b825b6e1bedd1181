"""Which methods of a communicator engines need, as the contract says it."""

from __future__ import annotations

import re
from pathlib import Path

import ds_runtime
from ds_runtime.platform.contract import Communicator

CORE = Path(ds_runtime.__file__).parent
METHODS = {n for n, f in vars(Communicator).items() if callable(f) and not n.startswith("_")}
NOT_CALLERS = {"group.py", "through.py", "contract.py"}  # make, hand on and say what there is


def parts():
    """(needed, of the kit, may be left out), as the docstring names them."""
    text = " ".join(Communicator.__doc__.split())
    needed, rest = text.split("Needed: ")[1].split(". The kit and the benchmarks alone call ")
    kit, rest = rest.split(": no engine needs them. A communicator may leave out the others: ")
    optional = re.findall(r"\* (\w+): without it", rest)
    words = [set(re.findall(r"\w+", one)) - {"and"} for one in (needed, kit)]
    return [*words, set(optional)]


def called(name):
    """Whether core calls it of a group."""
    of_groups = r"(?:comm|everyone|_?group|_across|_inside|_tp)"
    files = [p for p in CORE.rglob("*.py") if p.name not in NOT_CALLERS]
    return any(re.search(rf"\b{of_groups}\.{name}\(", p.read_text("utf-8")) for p in files)


def looked_for(name):
    """Whether core asks for it before it calls it."""
    return any(
        re.search(rf'hasattr\([\w.]+, "{name}"\)', p.read_text("utf-8")) for p in CORE.rglob("*.py")
    )


def test_every_method_is_needed_or_of_the_kit_or_may_be_left_out():
    needed, kit, optional = parts()
    assert needed | kit | optional == METHODS
    assert len(needed) + len(kit) + len(optional) == len(METHODS)


def test_core_calls_what_it_says_and_looks_for_what_may_be_left_out():
    _, kit, optional = parts()
    assert {name for name in METHODS if looked_for(name)} == optional
    assert {name for name in METHODS if called(name)} == METHODS - kit
