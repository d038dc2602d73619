"""A Plan: every temporary has an address, every weight a recipe, every bucket a price. Nothing symbolic is left.

Plain data, and deterministic: the same spec and configs give the same plan on every machine. `plan_json` writes and
reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ddtree_compile.ir.graph import Graph, Space, TensorType
from ddtree_compile.ir.weights import Weight

FORMAT = 1
ALIGN = 256  # bytes; what Triton's divisibility specialisation and wide loads want of every address


@dataclass(frozen=True, slots=True)
class Segment:
    """A staged graph and where its TEMP values lie. `temp_bytes` is what it needs of the arena, `lower_bound` the
    peak of its live bytes: no packing needs less."""

    graph: Graph
    offsets: Mapping[str, int]
    temp_bytes: int
    lower_bound: int

    @property
    def name(self) -> str:
        return self.graph.name


@dataclass(frozen=True, slots=True)
class Place:
    """A value of STATE, ROUND or IO: its offset in its space (bytes) and the largest type it has in any segment."""

    offset: int
    type: TensorType


@dataclass(frozen=True, slots=True)
class Layout:
    """One space of the whole plan."""

    size: int
    places: Mapping[str, Place]


@dataclass(frozen=True, slots=True)
class Plan:
    """What `compile_spec` makes and an executor runs.

    `spec` is the spec as JSON types, `model` what the runtime must know of the two models, `spaces` the layouts of
    STATE, ROUND and IO, `arena` the bytes of the one TEMP arena that all segments share. `report` is the priced plan
    as `plan --json` prints it.
    """

    spec: Mapping[str, Any]
    model: Mapping[str, Any]
    segments: tuple[Segment, ...]
    weights: tuple[Weight, ...]
    spaces: Mapping[Space, Layout]
    arena: int
    report: Mapping[str, Any]

    def segment(self, name: str) -> Segment:
        for segment in self.segments:
            if segment.name == name:
                return segment
        raise KeyError(f"no segment {name!r}; there are {', '.join(s.name for s in self.segments)}")

    @property
    def buckets(self) -> tuple[int, ...]:
        return tuple(self.spec["tree"]["buckets"])

    @property
    def chunks(self) -> tuple[int, ...]:
        return tuple(self.spec["prefill"]["chunks"])
