"""Weights as recipes: data that says how a weight is made from checkpoint tensors, never a closure.

A `Weight` is a logical tensor (its `value`: the shape and dtype that ops see), the `recipe` that makes it, and the
name of the `layout` in which it is stored. Passes compose recipes; `runtime.weights` evaluates them, one at a time.
Checkpoint tensors are named `target:NAME` or `drafter:NAME`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ddtree_compile.ir.graph import Value


@dataclass(frozen=True, slots=True)
class Take:
    """One checkpoint tensor, as it is. In the `of` of a `Stack`, `{}` in the name stands for the index."""

    tensor: str


@dataclass(frozen=True, slots=True)
class Int4:
    """A compressed-tensors "pack-quantized" linear [N, K]: `NAME.weight_packed`, `NAME.weight_scale` and
    `NAME.weight_shape`, symmetric, `group` inputs a scale. `module` is NAME (with `{}` inside a `Stack`)."""

    module: str
    group: int = 32


@dataclass(frozen=True, slots=True)
class Cut:
    """`of` restricted to [start, stop) along `dim`."""

    of: Recipe
    dim: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Cat:
    """The parts side by side along `dim`."""

    parts: tuple[Recipe, ...]
    dim: int


@dataclass(frozen=True, slots=True)
class Stack:
    """`of` for index 0 .. count-1 (put in the place of `{}`), stacked along a new first dimension."""

    of: Recipe
    count: int


@dataclass(frozen=True, slots=True)
class View:
    """`of` reshaped, row-major."""

    of: Recipe
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Random:
    """Normal values keyed by (seed, name, element), scaled by `std` and moved by `mean`: no file is read."""

    name: str
    shape: tuple[int, ...]
    seed: int
    std: float
    mean: float = 0.0


Recipe = Take | Int4 | Cut | Cat | Stack | View | Random


@dataclass(frozen=True, slots=True)
class Weight:
    """A value in WEIGHT space with the recipe that makes it.

    `layout` names a pack/unpack pair of `ir.layouts`. `split` is the dimension of `value` along which a group of
    ranks would cut it (None: every rank holds all of it).
    """

    value: Value
    recipe: Recipe
    layout: str = "rows"
    split: int | None = None


def leaves(recipe: Recipe) -> Iterator[Take | Int4 | Random]:
    """The leaves of a recipe, stacks expanded, in the order in which they are read."""
    match recipe:
        case Take() | Int4() | Random():
            yield recipe
        case Cut() | View():
            yield from leaves(recipe.of)
        case Cat():
            for part in recipe.parts:
                yield from leaves(part)
        case Stack():
            for index in range(recipe.count):
                for leaf in leaves(recipe.of):
                    match leaf:
                        case Take():
                            yield Take(leaf.tensor.replace("{}", str(index)))
                        case Int4():
                            yield Int4(leaf.module.replace("{}", str(index)), leaf.group)
                        case Random():
                            yield leaf
