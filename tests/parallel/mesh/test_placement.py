"""Placements and meshes: boxes cover a parameter exactly once, and communicators have an order."""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import permutations
from typing import NamedTuple

import numpy as np
import pytest

import collectives
from collectives import Communicator
from parallel import Mesh, Placement
from parallel.mesh import Box, length, pieces_of, span

Splits = tuple[tuple[int, str], ...]

MESHES: list[dict[str, int]] = [
    {"tensor": 4},
    {"data": 2, "tensor": 3},
    {"tensor": 3, "data": 2},
    {"data": 1, "tensor": 2},
    {"pipe": 2, "data": 2, "tensor": 2},
    {"data": 2, "expert": 3, "tensor": 2},
]
SHAPES: list[tuple[int, ...]] = [
    (12,),
    (7,),
    (5,),
    (2,),
    (0,),
    (6, 4),
    (5, 7),
    (1, 3),
    (4, 0),
    (4, 3, 2),
    (5, 2, 7),
    (1, 1, 1),
]


class Found(NamedTuple):
    """What a rank says of itself, and of all ranks."""

    coordinates: dict[str, int]
    box: Box
    boxes: list[Box]


def found(placement: Placement, axes: dict[str, int]) -> list[Found]:
    """By rank."""

    def fn(comm: Communicator) -> Found:
        mesh = Mesh(comm, **axes)
        boxes = [placement.box(mesh, rank) for rank in range(comm.size)]
        return Found(mesh.coordinates, placement.box(mesh), boxes)

    return collectives.run(fn, size=math.prod(axes.values()))


def check(placement: Placement, axes: dict[str, int]) -> None:
    """Boxes cover each element once along the axes of splits, and are equal along the others."""
    ranks = found(placement, axes)
    assert all(each.boxes == [other.box for other in ranks] for each in ranks)
    split_axes = [axis for _, axis in placement.splits if axis in axes]
    by_part: defaultdict[tuple[int, ...], set[Box]] = defaultdict(set)
    for each in ranks:
        by_part[tuple(each.coordinates[axis] for axis in split_axes)].add(each.box)
    assert len(by_part) == math.prod(axes[axis] for axis in split_axes)
    assert all(len(boxes) == 1 for boxes in by_part.values()), "replicas differ"
    times = np.zeros(placement.shape, int)
    for (box,) in by_part.values():
        times[box.slices] += 1
        assert times[box.slices].shape == box.shape
    assert (times == 1).all(), "an element is in no box, or in several"
    for sizes in zip(*(box.shape for (box,) in by_part.values()), strict=True):
        assert max(sizes) - min(sizes) <= 1, "a division is not even"


def splits_of(num_dims: int, axes: dict[str, int]) -> list[Splits]:
    """No split, each dim by each axis, and each pair of axes, also for the same dim."""
    one = [(dim, axis) for dim in range(num_dims) for axis in axes]
    two = [(a, b) for a in one for b in one if a[1] != b[1]]
    return [(), *((each,) for each in one), *two]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.slow
def test_boxes_cover_each_element_once(axes: dict[str, int], shape: tuple[int, ...]) -> None:
    for splits in splits_of(len(shape), axes):
        check(Placement(shape, splits=splits), axes)


def test_an_axis_that_the_mesh_does_not_have_divides_nothing() -> None:
    placement = Placement((5, 3), splits=((0, "expert"), (1, "tensor")))
    check(placement, {"data": 2, "tensor": 3})
    assert found(placement, {"data": 2})[1].box == Box((0, 0), (5, 3))


def test_boxes_are_those_computed_by_hand() -> None:
    """Seven rows: four and three along data, and each part in three along tensor."""
    placement = Placement((7, 2), splits=((0, "data"), (0, "tensor")))
    boxes = [each.box for each in found(placement, {"data": 2, "tensor": 3})]
    assert [(box.start[0], box.shape[0]) for box in boxes] == [
        (0, 2),
        (2, 1),
        (3, 1),
        (4, 1),
        (5, 1),
        (6, 1),
    ]
    assert {(box.start[1], box.shape[1]) for box in boxes} == {(0, 2)}


# Negative controls


class Truncated(Placement):
    """The rest of an uneven division is in no box."""

    def box(self, mesh: Mesh, rank: int | None = None) -> Box:
        (dim, axis), *_ = self.splits
        start, shape = [0] * len(self.shape), list(self.shape)
        shape[dim] //= mesh.axes[axis]
        start[dim] = shape[dim] * mesh.index(axis, rank)
        return Box(tuple(start), tuple(shape))


class Forgetful(Placement):
    """Of several splits, only the last is made."""

    def box(self, mesh: Mesh, rank: int | None = None) -> Box:
        return Placement(self.shape, splits=self.splits[-1:]).box(mesh, rank)


class Scattered(Placement):
    """Ranks along all axes divide the first dimension."""

    def box(self, mesh: Mesh, rank: int | None = None) -> Box:
        return Placement(self.shape, splits=tuple((0, axis) for axis in mesh.axes)).box(mesh, rank)


@pytest.mark.parametrize(
    ("wrong", "splits", "words"),
    [
        (Truncated, ((0, "tensor"),), "in no box"),
        (Forgetful, ((0, "data"), (0, "tensor")), "in several"),
        (Forgetful, ((0, "data"), (1, "tensor")), "in several"),
        (Scattered, ((0, "tensor"),), "replicas differ"),
    ],
)
def test_wrong_boxes_are_noticed(wrong: type[Placement], splits: Splits, words: str) -> None:
    check(Placement((8, 3), splits=splits), {"data": 2, "tensor": 3})
    with pytest.raises(AssertionError, match=words):
        check(wrong((8, 3), splits=splits), {"data": 2, "tensor": 3})


# Communicators


def check_order(axes: dict[str, int], name: str = "") -> None:
    """Ranks along several axes are numbered as the mesh says, in whatever order these are named."""

    def fn(comm: Communicator) -> None:
        mesh = Mesh(comm.split(0, name=name), **axes)
        for names in permutations(axes, min(2, len(axes))):
            along = mesh[names]
            assert along is not None
            group = next(group for group in mesh.ranks(names) if comm.rank in group)
            assert along.rank == mesh.index(names) == group.index(comm.rank)
            assert tuple(along.all_gather(np.array([comm.rank]))) == group

    collectives.run(fn, size=math.prod(axes.values()))


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_a_communicator_has_the_order_of_its_axes(axes: dict[str, int]) -> None:
    check_order(axes)


def test_a_communicator_of_that_name_is_used_only_if_it_has_that_order() -> None:
    for name in ("data,tensor", "tensor,data"):
        check_order({"data": 2, "tensor": 3}, name)


def test_another_order_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: communicators in the order of all ranks."""
    split = Communicator.split
    in_order = lambda self, color, key=0, **options: split(self, color, **options)  # noqa: E731
    monkeypatch.setattr(Communicator, "split", in_order)
    with pytest.raises(AssertionError):
        check_order({"data": 2, "tensor": 3})


# Flat arrays of boxes


@pytest.mark.parametrize("num_parts", [1, 2, 3, 7, 100])
def test_parts_of_a_flat_array_are_boxes_of_parameters(num_parts: int) -> None:
    """Each element once, where the whole parameter has it, and in at most 2 d - 1 boxes."""
    boxes = {
        "matrix": Box((1, 2), (3, 4)),
        "number": Box((), ()),
        "none": Box((0, 3), (0, 2)),
        "vector": Box((1,), (5,)),
        "cube": Box((0, 1, 0), (2, 3, 4)),
    }
    rng, shape = np.random.default_rng(0), (6, 6, 6)
    whole = {name: rng.standard_normal(shape[: len(box.shape)]) for name, box in boxes.items()}
    flat = np.concatenate([whole[name][box.slices].ravel() for name, box in boxes.items()])
    for rank in range(num_parts):
        part = span(len(flat), num_parts, rank)
        mine, times = flat[part], np.zeros(length(part), int)
        pieces = list(pieces_of(boxes, part))
        for name, box, at in pieces:
            wanted = np.atleast_1d(whole[name])[box.slices]
            np.testing.assert_array_equal(mine[at].reshape(box.shape), wanted)
            times[at] += 1
        assert (times == 1).all()
        for name, box in boxes.items():
            assert sum(each.name == name for each in pieces) <= max(1, 2 * len(box.shape) - 1)


@pytest.mark.parametrize(
    ("splits", "sentence"),
    [
        (((2, "tensor"),), r"the dimension 2 of a shape \(4, 3\)"),
        (((-1, "tensor"),), "the dimension -1"),
        ((("0", "tensor"),), "the dimension '0'"),
        (((0, "tenosr"),), "there is no axis 'tenosr'"),
        (((0, "tensor"), (1, "tensor")), "the axis 'tensor' twice"),
    ],
)
def test_a_wrong_split_is_refused(splits: Splits, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Placement((4, 3), splits=splits)


def test_an_axis_named_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="an axis is named twice in data, data"):
        Mesh(None, data=1)["data", "data"]


def test_a_mesh_of_fewer_than_no_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="an axis of less than one rank"):
        Mesh(None, data=-1, tensor=-1)
