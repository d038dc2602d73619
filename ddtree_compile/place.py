"""Graph -> Plan: run the passes, pack each segment's temporaries, lay the other spaces out once for all segments."""

from __future__ import annotations

from collections.abc import Iterable

from ddtree_compile.ir.graph import Graph, Space, TensorType
from ddtree_compile.passes import Observer, run_passes
from ddtree_compile.passes.buffers import check_arena, lifetimes, pack
from ddtree_compile.plan import ALIGN, Layout, Place, Segment
from ddtree_compile.spec import CompileSpec

SHARED = (Space.STATE, Space.ROUND, Space.IO)


def place_segment(graph: Graph, spec: CompileSpec, observe: Observer | None = None) -> Segment:
    """Optimise one logical graph and give its temporaries offsets; the arena is checked by code that did not pack."""
    staged = run_passes(graph, spec, observe)
    buffers = lifetimes(staged)
    arena = pack(buffers, ALIGN)
    check_arena(buffers, arena)
    return Segment(staged, arena.offsets, arena.size, arena.lower_bound)


def place_spaces(graphs: Iterable[Graph]) -> dict[Space, Layout]:
    """STATE, ROUND and IO: each value at one offset in all segments, as large as its largest use."""
    largest: dict[Space, dict[str, TensorType]] = {space: {} for space in SHARED}
    for graph in graphs:
        for value in graph.values().values():
            if value.space in largest:
                known = largest[value.space].setdefault(value.name, value.type)
                if value.type.nbytes > known.nbytes:
                    largest[value.space][value.name] = value.type
    return {space: _bump(types) for space, types in largest.items()}


def _bump(types: dict[str, TensorType]) -> Layout:
    """One after another, in order of first use."""
    places: dict[str, Place] = {}
    size = 0
    for name, type_ in types.items():
        places[name] = Place(size, type_)
        size += -(-type_.nbytes // ALIGN) * ALIGN
    return Layout(size, places)
