"""Files of costs: whatever is wrong with one is said in a sentence that names it and the field."""

from __future__ import annotations

import json
import math
import re
import resource
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_runtime.errors import ConfigError
from ds_runtime.measured.costs import Costs, KernelCost, Point
from ds_runtime.measured.costs import _packed as _raw
from ds_runtime.ops.declare import OpWork


def costs(points, collectives=None):
    kernels = {"a.b:apply": KernelCost("linear", "bfloat16", tuple(points))}
    said = ("AMD EPYC", "x", "2026-01-02T03:04:05Z", {"torch": "2"})
    return Costs(*said, 1e9, {"bfloat16": 1e12}, 1e-6, 2e-6, 3e-6, kernels, collectives or {})


BROKEN = {
    "no json": lambda raw: "{",
    "another format": lambda raw: raw | {"format": 99},
    "a list": lambda raw: [raw],
    "no kernels": lambda raw: {k: v for k, v in raw.items() if k != "kernels"},
    "a rate of 0": lambda raw: raw | {"bandwidth": 0},
    "a rate of nan": lambda raw: raw | {"floor": math.nan},
    "an unknown field": lambda raw: raw | {"extra": 1},
    "no points": lambda raw: raw | {"kernels": {"a": {"op": "x", "arithmetic": "y", "points": []}}},
    "a point of nothing": lambda raw: (
        raw | {"kernels": {"a": {"op": "x", "arithmetic": "y", "points": [[0, 1, 1, 1]]}}}
    ),
    "a point too short": lambda raw: (
        raw | {"kernels": {"a": {"op": "x", "arithmetic": "y", "points": [[1, 1]]}}}
    ),
    "an unknown collective": lambda raw: raw | {"collectives": {"shout": {"2": [[1, 1.0]]}}},
    "one rank": lambda raw: raw | {"collectives": {"all_reduce": {"1": [[1, 1.0]]}}},
    "falling sizes": lambda raw: raw | {"collectives": {"all_reduce": {"2": [[2, 1.0], [1, 1.0]]}}},
    "no sizes": lambda raw: raw | {"collectives": {"all_reduce": {"2": []}}},
}


WHOLE = {"all_reduce": {2: ((4096, 1e-5), (8192, 2e-5))}}
NAMED = {  # what a message must name, by change
    "host[0][0]": {"host": [[0, 1.0]]},
    "host[1][0]": {"host": [[2, 1.0], [1, 1.0]]},
    "kernels.a.queue": {
        "kernels": {"a": {"op": "x", "arithmetic": "y", "points": [[1, 1, 1, 1]], "queue": 0}}
    },
    "kernels.a.lasting": {
        "kernels": {"a": {"op": "x", "arithmetic": "y", "points": [[1, 1, 1, 1]], "lasting": "2"}}
    },
    "date": {"date": None},
    "versions": {"versions": []},
    "versions.torch": {"versions": {"torch": 2}},
    "compute": {"compute": {}},
    "compute.int8": {"compute": {"int8": "fast"}},
    "bandwidth": {"bandwidth": True},
    "launch": {"launch": 10**400},
    "kernels": {"kernels": []},
    "kernels.a.points": {"kernels": {"a": {"op": "x", "arithmetic": "y", "points": {}}}},
    "kernels.a.op": {"kernels": {"a": {"op": 1, "arithmetic": "y", "points": [[1, 1, 1, 1]]}}},
    "kernels.a.points[1][0]": {
        "kernels": {"a": {"op": "x", "arithmetic": "y", "points": [[1, 1, 1, 1], [1.5, 1, 1, 1]]}}
    },
    "collectives.all_reduce": {"collectives": {"all_reduce": {}}},
    "collectives.all_reduce.2[0][1]": {"collectives": {"all_reduce": {"2": [[1, None]]}}},
    "collectives.all_reduce: number of ranks": {"collectives": {"all_reduce": {"two": [[1, 1]]}}},
}


@pytest.mark.parametrize("name", NAMED)
def test_a_field_of_another_type_is_named(tmp_path, name):
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(_raw(costs([Point(1, 1, 1, 1)], WHOLE)) | NAMED[name]))
    with pytest.raises(ConfigError, match=rf"costs\.json: field {re.escape(name)} is .*: must be"):
        Costs.read(path)


def places(value, at=()):
    """The path of every value in a file."""
    yield at
    items = value.items() if isinstance(value, dict) else ()
    for key, one in enumerate(value) if isinstance(value, list) else items:
        yield from places(one, (*at, key))


GOOD = json.loads(json.dumps(_raw(costs([Point(1, 1, 1, 1), Point(8, 9, 9, 2)], WHOLE))))
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=4,
)


@given(st.sampled_from(list(places(GOOD))), ANYTHING, st.booleans())
def test_a_file_with_any_value_anywhere_is_costs_or_named(tmp_path_factory, at, value, removed):
    raw = json.loads(json.dumps(GOOD))
    if not at:
        raw = value
    else:
        holder = raw
        for key in at[:-1]:
            holder = holder[key]
        if removed:
            del holder[at[-1]]
        else:
            holder[at[-1]] = value
    path = tmp_path_factory.getbasetemp() / "mutated.json"
    path.write_text(json.dumps(raw))
    try:
        made = Costs.read(path)
    except ConfigError as e:
        assert str(path) in str(e) and "\n" not in str(e)
        return
    made.write(path)
    assert Costs.read(path) == made
    for name, cost in made.kernels.items():
        rows = cost.points[0].rows
        assert 0 < made.seconds(name, rows, OpWork(reads=1e6, flops=1e6)) < math.inf
    for kind in made.collectives:
        assert 0 < made.collective(kind, 4, 1 << 20) < math.inf
    assert isinstance(made.date[:10], str)


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_file_is_named_with_what_is_wrong(tmp_path, broken):
    made = BROKEN[broken](_raw(costs([Point(1, 1, 1, 1)])))
    path = tmp_path / "costs.json"
    path.write_text(made if isinstance(made, str) else json.dumps(made))
    with pytest.raises(ConfigError, match=r"costs\.json: .*tune costs"):
        Costs.read(path)


def test_no_file_and_no_room_are_said(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        Costs.read(tmp_path / "none.json")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        costs([Point(1, 1, 1, 1)]).write(tmp_path / "file" / "costs.json")


@contextmanager
def a_disk_that_fills(after):
    """Files of this process end at `after` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (after, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("after", [0, 1, 100])
@pytest.mark.parametrize("old", [True, False])
def test_a_write_that_fails_half_way_leaves_what_was_there(tmp_path, old, after):
    path = tmp_path / "costs.json"
    if old:
        costs([Point(1, 1, 1, 1)]).write(path)
    with a_disk_that_fills(after), pytest.raises(ConfigError) as caught:
        costs([Point(2, 1, 1, 1)]).write(path)
    assert f"costs {path}: cannot be written: " in str(caught.value)
    assert [*tmp_path.iterdir()] == [path] * old
    assert not old or Costs.read(path) == costs([Point(1, 1, 1, 1)])


def test_a_write_through_a_link_keeps_the_link(tmp_path):
    path, link = tmp_path / "kept" / "costs.json", tmp_path / "costs.json"
    costs([Point(1, 1, 1, 1)]).write(path)
    link.symlink_to(path)
    costs([Point(2, 1, 1, 1)]).write(link)
    assert link.is_symlink() and Costs.read(path) == costs([Point(2, 1, 1, 1)])
    assert [*path.parent.iterdir()] == [path]
