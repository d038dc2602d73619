"""What an op is: a record in its family's table.

A record's `reference` is the op's meaning, a torch function of its argument tensors and attributes; it computes in
fp32 and the caller rounds each result once, to the type of the op's out. Everything else about the op is data or a
small function of its types, so that a graph can be typed, priced and checked without running it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ddtree_compile.ir.graph import Op, TensorType

Reference = Callable[..., Any]
ShapeRule = Callable[[Op], tuple[TensorType, ...]]


def uniform_experts(rows: int, top_k: int, experts: int) -> float:
    """Distinct experts that `rows` rows are expected to touch when routing is uniform."""
    return experts * (1.0 - (1.0 - top_k / experts) ** rows)


@dataclass(frozen=True, slots=True)
class Facts:
    """What shapes do not tell and a price needs: committed tokens of each live sequence, how many sequences live,
    and how many distinct experts a set of rows is expected to touch."""

    context: int
    live: int = 1
    distinct_experts: Callable[[int, int, int], float] = uniform_experts


FlopRule = Callable[[Op, Facts], float]
ByteRule = Callable[[Op, Facts], float]


def no_work(op: Op, facts: Facts) -> float:
    """Work that does not count towards a floor."""
    return 0.0


@dataclass(frozen=True, slots=True)
class OpRecord:
    """One kind of op.

    `writes`: indices of arguments that the reference updates in place. `flops`: floating-point operations that any
    implementation must do. `cache_bytes`: bytes of K/V that must be read. `weight_share`: the part of its WEIGHT
    bytes that must be read (experts: only those touched; an embedding: only the rows looked up). `tolerance`:
    relative error allowed to a kernel against the reference.
    """

    kind: str
    reference: Reference
    shape: ShapeRule
    writes: tuple[int, ...] = ()
    flops: FlopRule = no_work
    cache_bytes: ByteRule = no_work
    weight_share: Callable[[Op, Facts], float] = lambda op, facts: 1.0
    tolerance: float = 1e-2


def same_as(index: int) -> ShapeRule:
    """The out has the type of argument `index`."""
    return lambda op: (op.args[index].type,)


def table(*records: OpRecord) -> dict[str, OpRecord]:
    """A family's records by kind."""
    return {record.kind: record for record in records}
