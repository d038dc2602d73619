"""What a recipe makes, before it is made: its shape from the files' headers, its leaves' files and names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import torch

from ddtree_compile.errors import CheckpointError
from ddtree_compile.ir.weights import Cat, Cut, Int4, Random, Recipe, Stack, Take, View, leaves
from ddtree_compile.runtime.checkpoint import Checkpoint

Checkpoints = Mapping[str, Checkpoint]

NIBBLES: Final = 8  # int4 codes of one int32 word

_SCALES: Final = (torch.bfloat16, torch.float16, torch.float32)


def shape_of(recipe: Recipe, checkpoints: Checkpoints) -> tuple[int, ...]:
    """The shape a recipe makes, from headers alone. CheckpointError when its parts do not fit together."""
    match recipe:
        case Take(tensor):
            return info(tensor, checkpoints)[0]
        case Int4():
            return int4_shape(recipe, checkpoints)
        case Random():
            return recipe.shape
        case View(of, shape):
            inner = shape_of(of, checkpoints)
            if math.prod(inner) != math.prod(shape):
                raise _misfit(recipe, inner, f"the size of {list(shape)}")
            return shape
        case Cut(of, dim, start, stop):
            inner = shape_of(of, checkpoints)
            if not (-len(inner) <= dim < len(inner) and 0 <= start <= stop <= inner[dim]):
                raise _misfit(recipe, inner, f"{start}:{stop} within dimension {dim}")
            return tuple(stop - start if d == dim % len(inner) else size for d, size in enumerate(inner))
        case Cat(parts, dim):
            shapes = [shape_of(part, checkpoints) for part in parts]
            dim %= len(shapes[0])
            total = sum(shape[dim] for shape in shapes if len(shape) > dim)
            for part, shape in zip(parts, shapes, strict=True):
                if _without(shape, dim) != _without(shapes[0], dim):
                    raise _misfit(part, shape, f"{list(shapes[0])} but for dimension {dim}")
            return (*shapes[0][:dim], total, *shapes[0][dim + 1 :])
        case Stack(of, count):
            first = shape_of(fill(of, 0), checkpoints)
            for index in range(1, count):
                part = fill(of, index)
                shape = shape_of(part, checkpoints)
                if shape != first:
                    raise _misfit(part, shape, f"{list(first)} as its neighbours")
            return (count, *first)


def int4_shape(recipe: Int4, checkpoints: Checkpoints) -> tuple[int, int]:
    """[N, K] of a pack-quantized linear, from the headers of its codes and scales, which must fit each other."""
    packed, scale = f"{recipe.module}.weight_packed", f"{recipe.module}.weight_scale"
    (words, words_dtype), (scales, scales_dtype) = (info(tensor, checkpoints) for tensor in (packed, scale))
    if words_dtype != torch.int32 or len(words) != 2:
        raise CheckpointError(f"{packed} is {words_dtype} {list(words)}, expected torch.int32 [N, K / {NIBBLES}]")
    expected = (words[0], words[1] * NIBBLES // recipe.group)
    if scales_dtype not in _SCALES or scales != expected:
        raise CheckpointError(f"{scale} is {scales_dtype} {list(scales)}, expected torch.bfloat16 {list(expected)}")
    return words[0], scales[1] * recipe.group


def fill(recipe: Recipe, index: int) -> Recipe:
    """A stack's `of` with `index` in the place of `{}`."""
    match recipe:
        case Take(tensor):
            return Take(tensor.replace("{}", str(index)))
        case Int4(module, group):
            return Int4(module.replace("{}", str(index)), group)
        case Random(name, shape, seed, std, mean):
            return Random(name.replace("{}", str(index)), shape, seed, std, mean)
        case Cut(of, dim, start, stop):
            return Cut(fill(of, index), dim, start, stop)
        case Cat(parts, dim):
            return Cat(tuple(fill(part, index) for part in parts), dim)
        case View(of, shape):
            return View(fill(of, index), shape)
        case Stack():
            raise ValueError("a stack within a stack has no second place for an index")


def info(tensor: str, checkpoints: Checkpoints) -> tuple[tuple[int, ...], torch.dtype]:
    """(shape, dtype) of `target:NAME` or `drafter:NAME`."""
    checkpoint, name = find(tensor, checkpoints)
    return checkpoint.info(name)


def find(tensor: str, checkpoints: Checkpoints) -> tuple[Checkpoint, str]:
    """The checkpoint and bare name behind `target:NAME` or `drafter:NAME`."""
    which, separator, name = tensor.partition(":")
    if not separator or which not in checkpoints:
        opened = ", ".join(sorted(checkpoints)) or "none"
        raise CheckpointError(f"{tensor}: no checkpoint {which!r} is open (open: {opened})")
    return checkpoints[which], name


def first_tensor(recipe: Recipe) -> str:
    """A name for errors: the first checkpoint tensor (or random name) of a recipe."""
    match next(leaves(recipe)):
        case Take(tensor):
            return tensor
        case Int4(module, _):
            return module
        case Random(name):
            return name


def _misfit(recipe: Recipe, shape: tuple[int, ...], expected: str) -> CheckpointError:
    return CheckpointError(f"{first_tensor(recipe)} gives shape {list(shape)}, expected {expected}")


def _without(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return (*shape[:dim], *shape[dim + 1 :])
