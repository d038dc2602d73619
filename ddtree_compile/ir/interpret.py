"""The interpreter: references on real memory, at the planned offsets. Slow, plain, and the meaning of a plan.

It holds one buffer a space. Each value is a view of its space's buffer; an op's results are rounded once, into the
views of its outs. With `poison`, TEMP memory is filled at birth and at death (NaN, and 0x7FFFFFFF for integers), so
that reading what was never written, or is no longer there, cannot pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ddtree_compile.ir.graph import Graph, Op, Space, TensorType, Value
from ddtree_compile.ir.layouts import TORCH_DTYPES
from ddtree_compile.ir.ops import OPS

BASE_ALIGN = 64
POISON_INT = 0x7FFFFFFF


def buffer(size: int) -> Tensor:
    """`size` bytes whose first lies on a `BASE_ALIGN` boundary, zeroed."""
    raw = torch.zeros(size + BASE_ALIGN, dtype=torch.uint8)
    start = -raw.data_ptr() % BASE_ALIGN
    return raw[start : start + size]


def view(memory: Tensor, offset: int, type_: TensorType) -> Tensor:
    """The tensor of `type_` at a byte offset of a buffer."""
    part = memory[offset : offset + type_.nbytes]
    return part.view(TORCH_DTYPES[type_.dtype]).view(type_.shape)


def poison(tensor: Tensor) -> None:
    """Fill with what no result can survive: NaN, or an integer far out of bounds."""
    tensor.fill_(torch.nan if tensor.is_floating_point() else POISON_INT)


@dataclass(frozen=True, slots=True)
class Step:
    """One reference call: its tensors are bound, its results are copied into `outs`."""

    call: Callable[..., Tensor | tuple[Tensor, ...]]
    args: tuple[Tensor, ...]
    outs: tuple[Tensor, ...]
    attrs: dict[str, object]
    scope: str
    born: tuple[Tensor, ...] = ()
    dead: tuple[Tensor, ...] = ()

    def run(self) -> None:
        for tensor in self.born:
            poison(tensor)
        made = self.call(*self.args, **self.attrs)
        results = made if isinstance(made, tuple) else (made,)
        for out, result in zip(self.outs, results, strict=True):
            out.copy_(result)
        for tensor in self.dead:
            poison(tensor)


def bind(
    graph: Graph, offsets: Mapping[str, int], memory: Mapping[Space, Tensor], weights: Mapping[str, Tensor],
    places: Mapping[str, int], *, poisoned: bool = False,
) -> tuple[Step, ...]:  # fmt: skip
    """A graph's ops as calls. `offsets` of TEMP values, `places` of values in the other spaces, bytes; `memory` a
    buffer a space; `weights` logical tensors by name (of any float dtype: references compute in fp32)."""
    bound: dict[str, Tensor] = {}

    def tensor(value: Value) -> Tensor:
        if value.space is Space.WEIGHT:
            return weights[value.name]
        if value.name not in bound:
            where = offsets if value.space is Space.TEMP else places
            bound[value.name] = view(memory[value.space], where[value.name], value.type)
        return bound[value.name]

    last = {value.name: at for at, op in enumerate(graph.ops) for value in op.values if value.space is Space.TEMP}
    steps: list[Step] = []
    for at, op in enumerate(graph.ops):
        born = tuple(tensor(out) for out in op.outs if out.space is Space.TEMP) if poisoned else ()
        over = {value.name: value for value in op.values if last.get(value.name) == at}
        dead = tuple(tensor(value) for value in over.values()) if poisoned else ()
        calls = _calls(op, tensor)
        for i, step in enumerate(calls):
            first, final = i == 0, i == len(calls) - 1
            steps.append(
                Step(step.call, step.args, step.outs, step.attrs, step.scope, born * first, dead * final)
            )  # fmt: skip
    return tuple(steps)


def _calls(op: Op, tensor: Callable[[Value], Tensor]) -> list[Step]:
    """The reference calls of an op: one, or those of a fused op's parts, whose private values get memory of their
    own."""
    if not op.body:
        outs = tuple(tensor(out) for out in op.outs)
        return [Step(OPS[op.kind].reference, tuple(map(tensor, op.args)), outs, dict(op.attrs), op.scope)]
    public = {value.name for value in op.values}
    private: dict[str, Tensor] = {}

    def inner(value: Value) -> Tensor:
        if value.name in public or value.space is Space.WEIGHT:
            return tensor(value)
        if value.name not in private:
            private[value.name] = torch.empty(value.type.shape, dtype=TORCH_DTYPES[value.type.dtype])
        return private[value.name]

    return [step for part in op.body for step in _calls(part, inner)]


def run(steps: tuple[Step, ...]) -> None:
    """Run bound ops in order."""
    for step in steps:
        step.run()
