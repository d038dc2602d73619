"""Does a plan use each checkpoint tensor exactly once? A tensor left over is a layer we forgot, one used twice is a
recipe that is wrong."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Final

from ddtree_compile.errors import CheckpointError
from ddtree_compile.ir.boxes import Box, cut_box, overlap, through_view, volume, whole
from ddtree_compile.ir.weights import Cat, Cut, Int4, Random, Recipe, Stack, Take, View, Weight, leaves
from ddtree_compile.runtime.recipe_shapes import Checkpoints, check_shape, fill, shape_of

# Tensors that some checkpoints carry and no model needs: inverse frequencies follow from the config.
KNOWN_SKIPS: Final = ("*.rotary_emb.inv_freq",)

_SHOWN: Final = 5  # names in an error

Shape = tuple[int, ...]
_Pieces = dict[Take | Int4, list[tuple[Shape, Box]]]


def check_consumed(weights: Iterable[Weight], checkpoints: Checkpoints, skip: Iterable[str] = ()) -> None:
    """Every tensor of every checkpoint is consumed exactly once by `weights`, or skipped; else CheckpointError.

    Cuts of one tensor must partition it. `skip` holds prefixes such as `target:vision_tower.`. To be called with the
    weights of the whole model, before any rank takes its share. At most five names are shown of each kind.
    """
    weights = {weight.value.name: weight for weight in weights}.values()
    wanted = {name for weight in weights for leaf in leaves(weight.recipe) for name in _names(leaf)}
    present = {f"{which}:{name}" for which, checkpoint in checkpoints.items() for name in checkpoint.names()}
    prefixes = tuple(skip)
    extra = [name for name in sorted(present - wanted) if not _skipped(name, prefixes)]
    missing = sorted(wanted - present)
    if missing or extra:
        found = [f"{word} {_some(names)}" for word, names in (("missing:", missing), ("not used:", extra)) if names]
        which = (missing or extra)[0].partition(":")[0]
        at = f"{checkpoints[which].directory}: " if which in checkpoints else ""
        raise CheckpointError(
            f"{at}the checkpoint does not fit its config; {'; '.join(found)}; fetch both whole, from one revision"
        )
    pieces: _Pieces = defaultdict(list)
    for weight in weights:
        check_shape(weight, checkpoints)
        _collect(weight.recipe, whole(shape_of(weight.recipe, checkpoints)), checkpoints, pieces)
    for leaf, parts in pieces.items():
        _check_partition(leaf, shape_of(leaf, checkpoints), parts)


def _collect(recipe: Recipe, box: Box, checkpoints: Checkpoints, pieces: _Pieces) -> None:
    """Notes which part of each leaf `box` of `recipe` needs, as (shape in which the box is meant, box)."""
    match recipe:
        case Take() | Int4():
            pieces[recipe].append((shape_of(recipe, checkpoints), box))
        case Random():
            return
        case Cut(of, dim, start, _):
            _collect(of, cut_box(box, dim % len(box), start), checkpoints, pieces)
        case Stack(of, _):
            for index in range(*box[0]):
                _collect(fill(of, index), box[1:], checkpoints, pieces)
        case Cat(parts, dim):
            _collect_cat(parts, dim % len(box), box, checkpoints, pieces)
        case View(of, shape):
            pushed = through_view(box, shape, shape_of(of, checkpoints))
            if pushed is not None:
                _collect(of, pushed, checkpoints, pieces)
            elif isinstance(of, Take | Int4):
                pieces[of].append((shape, box))
            else:
                raise ValueError(f"a cut of a view of a {type(of).__name__} has no box in what it views")


def _collect_cat(parts: tuple[Recipe, ...], dim: int, box: Box, checkpoints: Checkpoints, pieces: _Pieces) -> None:
    offset = 0
    for part in parts:
        size = shape_of(part, checkpoints)[dim]
        start, stop = max(box[dim][0], offset), min(box[dim][1], offset + size)
        if start < stop:
            share = (*box[:dim], (start - offset, stop - offset), *box[dim + 1 :])
            _collect(part, share, checkpoints, pieces)
        offset += size


def _check_partition(leaf: Take | Int4, shape: Shape, parts: list[tuple[Shape, Box]]) -> None:
    frame = next((part_shape for part_shape, _ in parts if part_shape != shape), shape)
    boxes: list[Box] = []
    for part_shape, box in parts:
        moved = through_view(box, part_shape, frame)
        if moved is None:
            raise ValueError(f"{_name(leaf)}: its cuts are meant in shapes that cannot be compared")
        boxes.append(moved)
    for index, box in enumerate(boxes):
        if any(overlap(box, other) for other in boxes[:index]):
            raise CheckpointError(f"{_name(leaf)} of shape {list(shape)} is used twice")
    used, size = sum(map(volume, boxes)), volume(whole(shape))
    if used != size:
        raise CheckpointError(f"{_name(leaf)} of shape {list(shape)} is used in part: {used} of {size} elements")


def _names(leaf: Take | Int4 | Random) -> tuple[str, ...]:
    match leaf:
        case Take(tensor):
            return (tensor,)
        case Int4(module, _):
            return tuple(f"{module}.weight_{part}" for part in ("packed", "scale", "shape"))
        case Random():
            return ()


def _name(leaf: Take | Int4) -> str:
    return leaf.tensor if isinstance(leaf, Take) else leaf.module


def _skipped(name: str, prefixes: tuple[str, ...]) -> bool:
    return name.startswith(prefixes) or any(fnmatchcase(name, pattern) for pattern in KNOWN_SKIPS)


def _some(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
