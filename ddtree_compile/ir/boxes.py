"""Boxes: rectangular parts of a tensor, [start, stop) a dimension. Recipes' cuts are boxes pushed to their leaves."""

from __future__ import annotations

import math

Box = tuple[tuple[int, int], ...]


def whole(shape: tuple[int, ...]) -> Box:
    """All of a tensor of `shape`."""
    return tuple((0, size) for size in shape)


def cut_box(box: Box, dim: int, start: int) -> Box:
    """A box of a cut that begins at `start` along `dim`, as a box of what was cut."""
    first, last = box[dim]
    return (*box[:dim], (first + start, last + start), *box[dim + 1 :])


def volume(box: Box) -> int:
    """Elements in the box."""
    return math.prod(stop - start for start, stop in box)


def overlap(a: Box, b: Box) -> bool:
    """Do two boxes of one tensor share an element."""
    return all(max(x[0], y[0]) < min(x[1], y[1]) for x, y in zip(a, b, strict=True))


def through_view(box: Box, outer: tuple[int, ...], inner: tuple[int, ...]) -> Box | None:
    """The box of a row-major `inner` shape that holds just the elements of `box` of the `outer` one, or None.

    Works whenever the two shapes' dimensions can be matched in groups of equal size, within each of which the box is
    one run of elements that begins and ends on a boundary of the inner shape's.
    """
    pushed: list[tuple[int, int]] = []
    for outer_dims, inner_dims in _groups(outer, inner):
        run = _run(box[outer_dims], outer[outer_dims])
        part = None if run is None else _unrun(run, inner[inner_dims])
        if part is None:
            return None
        pushed.extend(part)
    return tuple(pushed)


def _groups(outer: tuple[int, ...], inner: tuple[int, ...]) -> list[tuple[slice, slice]]:
    """The finest split of both shapes into consecutive dimensions of equal products."""
    groups: list[tuple[slice, slice]] = []
    i = j = i0 = j0 = 0
    while i < len(outer) or j < len(inner):
        a, b = math.prod(outer[i0:i]), math.prod(inner[j0:j])
        if i > i0 and j > j0 and a == b:
            groups.append((slice(i0, i), slice(j0, j)))
            i0, j0 = i, j
        elif j == len(inner) or (i < len(outer) and a <= b):
            i += 1
        else:
            j += 1
    groups.append((slice(i0, i), slice(j0, j)))
    return groups


def _run(box: Box, shape: tuple[int, ...]) -> tuple[int, int] | None:
    """The run of row-major element indices that a box is, or None if it is not one run."""
    start, stop = 0, 1
    partial = False
    for (first, last), size in zip(box, shape, strict=True):
        if partial and (first, last) != (0, size):
            return None
        if stop - start == 1:
            start, stop = start * size + first, start * size + last
        else:
            start, stop = start * size, stop * size
        partial = partial or (stop - start) > 1
    return start, stop


def _unrun(run: tuple[int, int], shape: tuple[int, ...]) -> Box | None:
    """The box that a run of row-major element indices is, or None if it is not a box."""
    start, stop = run
    if start == stop:
        return None
    box: list[tuple[int, int]] = []
    stride = math.prod(shape)
    for size in shape:
        stride //= size
        if start % stride == 0 and stop % stride == 0:
            box.append((start // stride, stop // stride))
            box.extend((0, rest) for rest in shape[len(box) :])
            return tuple(box)
        if start // stride != (stop - 1) // stride:
            return None
        box.append((start // stride, start // stride + 1))
        start, stop = start % stride, stop - (start // stride) * stride
    return tuple(box)
