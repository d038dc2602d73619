"""What a recipe makes, before it is made: its shape from the files' headers, its leaves' files and names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import torch

from ddtree_compile.errors import CheckpointError
from ddtree_compile.ir.weights import Cat, Cut, Int4, Random, Recipe, Stack, Take, View, Weight, leaves
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
            if math.prod(inner) != math.prod(shape) or inner[-1:] != shape[-1:]:  # a view parts or joins rows
                raise _misfit(recipe, inner, f"the size of {list(shape)}, with rows as long")
            return shape
        case Cut(of, dim, start, stop):
            inner = shape_of(of, checkpoints)
            if not (-len(inner) <= dim < len(inner) and 0 <= start <= stop <= inner[dim]):
                raise _misfit(recipe, inner, f"{start}:{stop} within dimension {dim}")
            return tuple(stop - start if d == dim % len(inner) else size for d, size in enumerate(inner))
        case Cat(parts, dim):
            return _joined(parts, [shape_of(part, checkpoints) for part in parts], dim)
        case Stack(of, count):
            first = shape_of(fill(of, 0), checkpoints)
            for index in range(1, count):
                part = fill(of, index)
                shape = shape_of(part, checkpoints)
                if shape != first:
                    raise _misfit(part, shape, f"{list(first)} as its neighbours")
            return (count, *first)


def _joined(parts: tuple[Recipe, ...], shapes: list[tuple[int, ...]], dim: int) -> tuple[int, ...]:
    """The shape of `parts` joined along `dim`."""
    first = shapes[0]
    if not -len(first) <= dim < len(first):
        raise _misfit(parts[0], first, f"a dimension {dim} to join along")
    dim %= len(first)
    for part, shape in zip(parts, shapes, strict=True):
        if len(shape) != len(first) or _without(shape, dim) != _without(first, dim):
            raise _misfit(part, shape, f"{list(first)} but for dimension {dim}")
    return (*first[:dim], sum(shape[dim] for shape in shapes), *first[dim + 1 :])


def check_shape(weight: Weight, checkpoints: Checkpoints) -> None:
    """CheckpointError when a weight's recipe makes another shape than its value has."""
    expected, found = weight.value.shape, shape_of(weight.recipe, checkpoints)
    if found != expected:
        tensor = first_tensor(weight.recipe)
        raise CheckpointError(
            f"weight {weight.value.name}: {tensor} gives shape {list(found)}, expected {list(expected)}"
        )


def int4_shape(recipe: Int4, checkpoints: Checkpoints) -> tuple[int, int]:
    """[N, K] of a pack-quantized linear, from the headers of its codes and scales, which must fit each other."""
    packed, scale = f"{recipe.module}.weight_packed", f"{recipe.module}.weight_scale"
    (words, words_dtype), (scales, scales_dtype) = (info(tensor, checkpoints) for tensor in (packed, scale))
    if words_dtype != torch.int32 or len(words) != 2:
        raise CheckpointError(f"{packed} is {words_dtype} {list(words)}, expected torch.int32 [N, K / {NIBBLES}]")
    expected = (words[0], words[1] * NIBBLES // recipe.group)
    if scales_dtype not in _SCALES or scales != expected:
        raise CheckpointError(f"{scale} is {scales_dtype} {list(scales)}, expected torch.bfloat16 {list(expected)}")
    if words[1] * NIBBLES % recipe.group:
        raise CheckpointError(f"{packed} is {list(words)}: {words[1] * NIBBLES} codes are no groups of {recipe.group}")
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
