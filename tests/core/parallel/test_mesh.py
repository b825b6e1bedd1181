"""The mesh's arithmetic, over all meshes of up to some hundred ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_runtime.errors import ConfigError
from ds_runtime.parallel.group import SoloCommunicator
from ds_runtime.parallel.mesh import AXES, Mesh
from ds_runtime.parallel.world import World

few = st.integers(1, 4)


@st.composite
def meshes(draw):
    dp, cp, heads, dcp, pp = (draw(few) for _ in range(5))
    tp = dp * cp * heads * dcp
    ep = draw(st.sampled_from([n for n in range(1, tp + 1) if tp % n == 0]))
    hosts = draw(st.sampled_from([n for n in range(1, 9) if tp * pp % n == 0]))
    return Mesh(tp, dp, pp=pp, ep=ep, cp=cp, dcp=dcp, hosts=hosts)


@given(meshes())
def test_the_groups_of_each_axis_partition_the_ranks(mesh):
    for axis in AXES:
        groups = mesh.groups(axis)
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.size))
        assert {len(group) for group in groups} == {mesh.extent(axis)}
        for group in groups:
            assert [mesh.at(rank, axis) for rank in group] == list(range(mesh.extent(axis)))
            assert all(mesh.group(axis, rank) == group for rank in group)


@given(meshes())
def test_a_coordinate_is_one_rank_and_the_way_back(mesh):
    found = [tuple(mesh.at(rank, axis) for axis in AXES) for rank in range(mesh.size)]
    for rank, at in enumerate(found):
        own = dict(zip(AXES, at, strict=True))
        group = own["attn_dp"] * mesh.cp + own["cp"]
        assert own["pp"] * mesh.tp + group * mesh.attn_tp + own["attn_tp"] == rank
        assert all(0 <= n < mesh.extent(axis) for axis, n in zip(AXES, at, strict=True))
    assert len(set(found)) == mesh.size


@given(meshes())
def test_the_order_is_fixed(mesh):
    """Stages are outermost, then groups of attention: a group's ranks are neighbours."""
    again = replace(mesh)
    for axis in AXES:
        groups = mesh.groups(axis)
        assert groups == again.groups(axis) == tuple(sorted(groups))
        assert all(list(group) == sorted(group) for group in groups)
    neighbours = [group[-1] - group[0] == len(group) - 1 for group in mesh.groups("attn_tp")]
    assert all(neighbours) and mesh.tp == mesh.attn_dp * mesh.cp * mesh.attn_tp


@given(meshes())
def test_groups_nest_and_hosts_are_runs_of_ranks(mesh):
    for inner, outer in (("dcp", "attn_tp"), ("attn_tp", "tp"), ("attn_dp", "tp"), ("ep", "tp")):
        for rank in range(mesh.size):
            assert set(mesh.group(inner, rank)) <= set(mesh.group(outer, rank))
    hosts = [mesh.host(rank) for rank in range(mesh.size)]
    assert hosts == sorted(hosts) and set(hosts) == set(range(mesh.hosts))
    for axis in AXES:
        spread = [len({mesh.host(rank) for rank in group}) for group in mesh.groups(axis)]
        assert mesh.crosses(axis) == (max(spread) > 1)


def test_eight_ranks_in_two_groups_of_attention():
    mesh = Mesh(tp=8, attn_dp=2)
    assert mesh.groups("attn_tp") == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert mesh.groups("attn_dp") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert mesh.groups("tp") == (tuple(range(8)),) and mesh.groups("pp")[0] == (0,)
    assert [mesh.at(5, axis) for axis in AXES] == [0, 5, 0, 1, 1, 0, 0]


@pytest.mark.parametrize(
    ("axes", "said"),
    [
        ({"tp": 4, "attn_dp": 3}, "4 ranks do not divide into 3 groups of attention"),
        ({"tp": 4, "ep": 3}, "4 ranks do not divide into 3 shares of experts"),
        ({"tp": 4, "attn_dp": 2, "dcp": 4}, "2 ranks of attention do not divide into 4 shares"),
        ({"tp": 4, "hosts": 3}, "4 ranks do not divide into 3 hosts"),
        ({"tp": 0}, "tp 0: an axis has at least one rank"),
    ],
)
def test_axes_that_do_not_divide_are_named(axes, said):
    with pytest.raises(ConfigError, match=said):
        Mesh(**axes)


class Splitting(SoloCommunicator):
    """Notes what it is split into."""

    def __init__(self, rank, size):
        self.rank, self.size, self.splits = rank, size, []

    def split(self, groups):
        self.splits.append(groups)
        (own,) = [group for group in groups if self.rank in group]
        return Splitting(own.index(self.rank), len(own))


@given(meshes())
def test_a_world_has_the_group_of_each_axis_and_all_ranks_split_alike(mesh):
    told = set()
    for rank in range(min(mesh.size, 6)):
        everyone = Splitting(rank, mesh.size)
        world = World(mesh, everyone)
        for axis in AXES:
            group = world.group(axis)
            assert (group.rank, group.size) == (mesh.at(rank, axis), mesh.extent(axis))
            if mesh.extent(axis) == mesh.size > 1:
                assert group is everyone
        told.add(tuple(everyone.splits))
    assert len(told) == 1
    (splits,) = told
    assert len(set(splits)) == len(splits)  # axes with the same groups share one
    assert World.alone().group("tp").size == 1
