"""Recipes in, tensors out: `evaluate` one recipe, `load_weights` all of a plan, `check_consumed` against the files.

Only what a recipe's cuts leave is read or made: a box ([start, stop) a dimension) is pushed down to the leaves, so a
rank of eight reads an eighth. One weight at a time is in memory beside the packed ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import torch

from ddtree_compile.errors import CheckpointError
from ddtree_compile.ir.boxes import Box, cut_box, through_view, whole
from ddtree_compile.ir.layouts import LAYOUTS, TORCH_DTYPES, Parts
from ddtree_compile.ir.quantised import Quantised
from ddtree_compile.ir.weights import Cat, Cut, Int4, Random, Recipe, Stack, Take, View, Weight
from ddtree_compile.runtime.consumed import check_consumed
from ddtree_compile.runtime.random_weights import random_box
from ddtree_compile.runtime.recipe_shapes import NIBBLES, Checkpoints, check_shape, fill, find, int4_shape, shape_of
from ddtree_compile.runtime.threads import threads_for

__all__ = ["check_consumed", "evaluate", "load_weight", "load_weights", "shape_of"]

OFFSET: Final = 8  # a stored nibble is q + 8


@dataclass(frozen=True, slots=True)
class _Source:
    checkpoints: Checkpoints
    dtype: torch.dtype
    device: torch.device | str


def evaluate(
    recipe: Recipe, checkpoints: Checkpoints, dtype: str, device: torch.device | str = "cpu"
) -> torch.Tensor | Quantised:
    """The tensor a recipe makes, in `dtype` (an IR name); int4 stays `Quantised`, its scales as the file has them.

    `checkpoints` maps "target" and "drafter" to their files. CheckpointError names a tensor that is missing or whose
    shape or dtype does not fit.
    """
    shape = shape_of(recipe, checkpoints)
    return _make(recipe, whole(shape), _Source(checkpoints, TORCH_DTYPES[dtype], device))


def load_weights(
    weights: Iterable[Weight],
    checkpoints: Checkpoints,
    progress: Callable[[int, int], None] | None = None,
    device: torch.device | str = "cpu",
) -> dict[str, Parts]:
    """Every weight's packed parts, by the weight's name; `progress(done, total)` counts packed bytes."""
    weights = tuple(weights)
    sizes = [LAYOUTS[weight.layout].nbytes(weight.value.shape, weight.value.dtype) for weight in weights]
    packed: dict[str, Parts] = {}
    done = 0
    for weight, size in zip(weights, sizes, strict=True):
        packed[weight.value.name] = load_weight(weight, checkpoints, device)
        done += size
        if progress is not None:
            progress(done, sum(sizes))
    return packed


def load_weight(weight: Weight, checkpoints: Checkpoints, device: torch.device | str = "cpu") -> Parts:
    """One weight's parts, laid out. CheckpointError when its recipe makes another shape than its value has."""
    dtype = weight.value.dtype
    check_shape(weight, checkpoints)
    with threads_for(weight.value.type.numel):
        made = evaluate(weight.recipe, checkpoints, dtype, device)
        if isinstance(made, Quantised) and weight.layout == "rows":
            made = made.dequantise().to(TORCH_DTYPES[dtype])
        return LAYOUTS[weight.layout].pack(made)


def _make(recipe: Recipe, box: Box, source: _Source) -> torch.Tensor | Quantised:
    """The part of `recipe` inside `box`."""
    match recipe:
        case Take(tensor):
            return _take(tensor, box, source)
        case Int4():
            return _int4(recipe, box, source)
        case Random(name, shape, seed, std, mean):
            return random_box(name, shape, box, seed, std, mean, source.dtype, source.device)
        case Cut(of, dim, start, _):
            return _make(of, cut_box(box, dim % len(box), start), source)
        case Cat(parts, dim):
            return _join(_cat_parts(parts, dim % len(box), box, source), dim % len(box))
        case Stack(of, _):
            (start, stop), inner = box[0], box[1:]
            made = [_make(fill(of, index), inner, source) for index in range(start, stop)]
            return _stack(made)
        case View(of, shape):
            return _view(of, shape, box, source)


def _take(tensor: str, box: Box, source: _Source) -> torch.Tensor:
    checkpoint, name = find(tensor, source.checkpoints)
    _, dtype = checkpoint.info(name)
    if not dtype.is_floating_point or dtype.itemsize == 1:
        raise CheckpointError(f"{tensor} has dtype {dtype}, expected bf16, f16 or f32")
    read = checkpoint.read(name, box[0]) if box else checkpoint.read(name)
    for dim, (start, stop) in enumerate(box[1:], 1):
        read = read.narrow(dim, start, stop - start)
    return read.to(device=source.device, dtype=source.dtype).contiguous()


def _int4(recipe: Int4, box: Box, source: _Source) -> Quantised:
    """Codes and scales of the box: w[n, 8 j + i] = ((packed[n, j] >> 4 i) & 15) - 8."""
    rows, (start, stop) = box
    n, k = int4_shape(recipe, source.checkpoints)
    checkpoint, module = find(recipe.module, source.checkpoints)
    stated = checkpoint.read(f"{module}.weight_shape").tolist()
    if stated != [n, k]:
        raise CheckpointError(f"{recipe.module}.weight_shape holds {stated}, expected {[n, k]} from codes and scales")
    words = checkpoint.read(f"{module}.weight_packed", rows).to(source.device)
    scales = checkpoint.read(f"{module}.weight_scale", rows).to(source.device)
    nibbles = torch.stack([((words >> (4 * i)) & 15).to(torch.int8) for i in range(NIBBLES)], dim=-1)
    codes = nibbles.view(words.shape[0], -1)[:, :k] - OFFSET
    return Quantised(codes, scales, recipe.group).cut(1, start, stop)


def _cat_parts(parts: tuple[Recipe, ...], dim: int, box: Box, source: _Source) -> list[torch.Tensor | Quantised]:
    """Each part's share of the box; parts outside it are not touched."""
    made: list[torch.Tensor | Quantised] = []
    offset = 0
    for part in parts:
        size = shape_of(part, source.checkpoints)[dim]
        start, stop = max(box[dim][0], offset), min(box[dim][1], offset + size)
        if start < stop:
            made.append(_make(part, (*box[:dim], (start - offset, stop - offset), *box[dim + 1 :]), source))
        offset += size
    return made


def _view(of: Recipe, shape: tuple[int, ...], box: Box, source: _Source) -> torch.Tensor | Quantised:
    inner = shape_of(of, source.checkpoints)
    sizes = tuple(stop - start for start, stop in box)
    pushed = through_view(box, shape, inner)
    if pushed is not None:
        made = _make(of, pushed, source)
        return made.view(sizes) if isinstance(made, Quantised) else made.reshape(sizes)
    made = _make(of, whole(inner), source)
    if isinstance(made, Quantised):
        viewed = made.view(shape)
        for dim, (start, stop) in enumerate(box):
            viewed = viewed.cut(dim, start, stop)
        return viewed
    dense = made.reshape(shape)
    for dim, (start, stop) in enumerate(box):
        dense = dense.narrow(dim, start, stop - start)
    return dense.contiguous()


def _join(parts: list[torch.Tensor | Quantised], dim: int) -> torch.Tensor | Quantised:
    quantised = [part for part in parts if isinstance(part, Quantised)]
    dense = [part for part in parts if isinstance(part, torch.Tensor)]
    if quantised and dense:
        raise ValueError("int4 and dense parts cannot be joined")
    return Quantised.cat(quantised, dim) if quantised else torch.cat(dense, dim)


def _stack(parts: list[torch.Tensor | Quantised]) -> torch.Tensor | Quantised:
    quantised = [part for part in parts if isinstance(part, Quantised)]
    dense = [part for part in parts if isinstance(part, torch.Tensor)]
    if quantised and dense:
        raise ValueError("int4 and dense parts cannot be stacked")
    return Quantised.stack(quantised) if quantised else torch.stack(dense)
