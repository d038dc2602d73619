"""The IR: one segment of a round is a `Graph`, a flat ordered tuple of `Op`s over typed `Value`s.

Nothing here is mutable. A `Value` is named once and lives in a `Space`; a pointer is a space and an offset, so a
graph never holds an address. An op may carry a `body` (a fused op: its meaning is the composition of its parts)
and a `stage` (set by the stage pass: ops of one stage may run at once).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

Attr = int | float | bool | str | tuple[int, ...] | tuple[float, ...] | tuple[str, ...]

DTYPE_BYTES = {"f32": 4, "bf16": 2, "fp8_e4m3": 1, "i64": 8, "i32": 4, "u8": 1}


class Space(StrEnum):
    """Where a value lives. Only TEMP is packed; the others are laid out once for a whole plan."""

    WEIGHT = "weight"  # read-only
    STATE = "state"  # lives across rounds: caches, lengths, root tokens, seeds, limits
    ROUND = "round"  # crosses segments within a round, at offsets fixed for the whole plan
    TEMP = "temp"  # dies within a segment
    PEER = "peer"  # visible to the group
    IO = "io"  # the host reads or writes it


@dataclass(frozen=True, slots=True)
class TensorType:
    """A static shape and a dtype name (a key of `DTYPE_BYTES`); tensors are dense and row-major."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * DTYPE_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class Value:
    """A named tensor in a space. Equal names within a graph mean the same memory."""

    name: str
    type: TensorType
    space: Space

    @property
    def shape(self) -> tuple[int, ...]:
        return self.type.shape

    @property
    def dtype(self) -> str:
        return self.type.dtype


@dataclass(frozen=True, slots=True)
class Op:
    """One operation: `kind` names its record in the op table, which says what it computes and which arguments it
    writes in place. `scope` (such as `verify/l07/moe`) is its one name in dumps, errors and bench rows."""

    kind: str
    args: tuple[Value, ...]
    outs: tuple[Value, ...]
    attrs: tuple[tuple[str, Attr], ...] = ()
    scope: str = ""
    body: tuple[Op, ...] = ()
    stage: int = -1

    def attr(self, name: str) -> Attr:
        """The attribute `name`; KeyError names the op when it is absent."""
        for key, value in self.attrs:
            if key == name:
                return value
        raise KeyError(f"op {self.kind} at {self.scope} has no attribute {name!r}")

    @property
    def values(self) -> Iterator[Value]:
        yield from self.args
        yield from self.outs

    def at(self, stage: int) -> Op:
        return replace(self, stage=stage)


@dataclass(frozen=True, slots=True)
class Graph:
    """The ops of one segment, in an order that may be run as it stands."""

    name: str
    ops: tuple[Op, ...]

    def values(self) -> dict[str, Value]:
        """Every value by name, in order of first appearance (fused bodies' private values left out)."""
        return {value.name: value for op in self.ops for value in op.values}

    def with_ops(self, ops: tuple[Op, ...]) -> Graph:
        return replace(self, ops=ops)
